"""Compare the predictions of two models for the same tokens, from their logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.gram import working_dtype
from hasslefree.errors import ModelError, option

# Number of logits that are in float32 at a time: the vocabulary may have 150,000 tokens.
ENTRIES = 2**20


def finite_log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax in the working dtype, with the lowest number in place of −∞. A model may rule out
    tokens by logits of −∞; their probability stays exactly zero.
    """
    logarithms = F.log_softmax(logits.to(working_dtype(logits)), -1)
    return logarithms.clamp_min_(torch.finfo(logarithms.dtype).min)


def kl_by_token(dense: Tensor, compressed: Tensor) -> Tensor:
    """KL(dense ‖ compressed) = Σ_v p_v (log p_v − log q_v) of each token, in nats: (tokens,).

    Args:
        dense, compressed: the logits of p and of q, (tokens, vocabulary) each.
    """
    divergences: list[Tensor] = []
    rows = max(ENTRIES // dense.shape[-1], 1)
    for p_logits, q_logits in zip(dense.split(rows), compressed.split(rows), strict=True):
        p = finite_log_softmax(p_logits)
        q = finite_log_softmax(q_logits)
        divergence = (p.exp() * (p - q)).sum(-1)
        divergences.append(divergence.clamp_min_(0))  # rounding may give −1e-8
    return torch.cat(divergences)


class Comparison:
    """The predictions of a compressed model, compared with those of its dense model.

    Args:
        kl: `kl_by_token`, one tensor per call of `add`.
        same: number of tokens for which both models predict the same most likely token.
    """

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.same = 0

    def add(self, dense: Tensor, compressed: Tensor) -> None:
        """Add the logits for some tokens, both (tokens, vocabulary).

        Raises:
            ModelError: the vocabularies differ in size.
        """
        if dense.shape != compressed.shape:
            raise ModelError(
                f"the dense model predicts one of {dense.shape[-1]} tokens and the other model one"
                f" of {compressed.shape[-1]}, and the KL divergence needs the same vocabulary;"
                f" give the model that was compressed with {option('dense')}"
            )
        self.kl.append(kl_by_token(dense, compressed))
        self.same += int((dense.argmax(-1) == compressed.argmax(-1)).sum())

    def sorted(self) -> Tensor:
        """Return the KL of all tokens in ascending order, (tokens,) float64, on the CPU: Apple's
        GPUs have no float64.
        """
        return torch.cat(self.kl).cpu().double().sort().values


def quantile(ascending: Tensor, share: float) -> float:
    """Return a quantile of sorted values (n,), with linear interpolation.

    torch.quantile accepts at most 2²⁴ values.
    """
    position = share * (len(ascending) - 1)
    below = int(position)
    above = min(below + 1, len(ascending) - 1)
    return torch.lerp(ascending[below], ascending[above], position - below).item()
