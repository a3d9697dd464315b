"""Write an equivalent of a Llama, a Qwen 2 or a Gemma 3 whose weights lie on no grid.

    python benchmarks/off_grid.py MODEL DEST [--sigma 0.2] [--seed 0]

Many small models are shipped quantised and converted back to bfloat16. Their weights lie on a grid already, which
flatters every method whose groups are those of that grid. Here the columns of every matrix in a block are multiplied by
exp(sigma n), with n normal, and what feeds these columns is divided by the same factors: the gains of the norms before
q, k, v and before gate, up; the rows of v before o; the rows of up before down.

The function stays the same up to rounding. Both divergences from MODEL are printed: before the rounding to the dtype of
the checkpoint, where anything but the rounding of float32 is an error, and after. DEST/off_grid.json keeps them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.models import CALIBRATION

RECORD = "off_grid.json"
TOKENS = 512
# Nats per token, of a copy in float32: rounding alone gives less, a wrong layer thousands of times as much.
LIMIT = 1e-5


def divide_rows(layer: nn.Module, factors: Tensor) -> None:
    """Divide what a norm or a linear layer puts out."""
    for parameter in layer.parameters(recurse=False):  # the weight, and the bias if there is one
        parameter /= factors.view(-1, *(1,) * (parameter.ndim - 1))


@torch.no_grad()
def rescale(model: Any, sigma: float, generator: torch.Generator) -> None:
    """Multiply the columns of every linear layer in the blocks of a model, and divide what feeds them."""
    config = model.config
    is_gemma = config.model_type.startswith("gemma")
    less = 1.0 if is_gemma else 0.0  # it stores the gains of norms less 1
    before_mlp = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    shared = config.num_attention_heads // config.num_key_value_heads  # heads that read one head of v

    def factors(count: int) -> Tensor:
        return torch.exp(sigma * torch.randn(count, generator=generator))

    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (getattr(block, before_mlp), (mlp.gate_proj, mlp.up_proj)),
        ):
            scale = factors(config.hidden_size)
            norm.weight += less
            divide_rows(norm, scale)
            norm.weight -= less
            for reader in readers:
                reader.weight *= scale
        scale = factors(mlp.up_proj.out_features)
        divide_rows(mlp.up_proj, scale)
        mlp.down_proj.weight *= scale
        scale = factors(attention.v_proj.out_features)
        divide_rows(attention.v_proj, scale)
        heads = scale.view(config.num_key_value_heads, -1)
        attention.o_proj.weight *= heads.repeat_interleave(shared, dim=0).flatten()


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Of every next token, by a copy of the weights in float32: (tokens, vocabulary)."""
    log_softmax: Tensor = model(ids).logits[0].log_softmax(-1)
    return log_softmax


def divergence(expected: Tensor, found: Tensor) -> float:
    """The mean KL divergence in nats per token of two sets of log-probabilities."""
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def write_copy(source: str, destination: Path, sigma: float, seed: int) -> dict[str, Any]:
    """Write the copy, and what was done to it. Returns the record."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    dtype, model = model.dtype, model.float()
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor([tokenizer(CALIBRATION.read_text(encoding="utf-8")[: 16 * TOKENS])["input_ids"][:TOKENS]])
    before = log_probabilities(model, ids)
    rescale(model, sigma, torch.Generator().manual_seed(seed))
    exact = divergence(before, log_probabilities(model, ids))
    if not exact <= LIMIT:
        raise SystemExit(
            f"the rescaled {type(model).__name__} diverges from {source} by {exact:.1e} nats per token: other layers "
            "than in a Llama read or feed its matrices, and only the layout of a Llama is known here"
        )
    rounded = divergence(before, log_probabilities(model.to(dtype).float(), ids))
    model.to(dtype).save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    record = {"sigma": sigma, "seed": seed, "divergence": exact, "divergence_rounded": rounded}
    (destination / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--sigma", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_copy(args.model, args.destination, args.sigma, args.seed))


if __name__ == "__main__":
    main()
