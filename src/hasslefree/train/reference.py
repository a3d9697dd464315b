"""The dense model's predictions for the text that the compressed model is trained on."""

from dataclasses import dataclass

from torch import Tensor

from hasslefree.models.activations import Activations
from hasslefree.planning.schedule import passes_over, trained_of


@dataclass(frozen=True)
class Reference:
    """The last hidden states of the dense model for the text that the model is trained on.

    Args:
        segments: token ids of this process, (samples, tokens).
        states: outputs of the last block for these segments.
        total: number of segments of all processes.
        tokens: requested number of training tokens.
    """

    segments: Tensor
    states: Activations
    total: int
    tokens: int = 0

    @property
    def validation(self) -> range:
        """Global indices of the segments that are held out: the first ones, at least one."""
        return range(self.total - trained_of(self.total))

    @property
    def training(self) -> range:
        """Global indices of the segments to train on."""
        return range(len(self.validation), self.total)

    @property
    def seqlen(self) -> int:
        return self.segments.shape[1]

    @property
    def passes(self) -> int:
        """The number of passes over the segments to train on, without a deadline."""
        return passes_over(self.total, self.tokens, self.seqlen)
