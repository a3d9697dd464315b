"""Single layers to solve: of a model, with the Grams of the dense model, and synthetic ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from harness.models import CALIBRATION, MODEL
from hasslefree import Gram
from hasslefree.distributed import ALONE
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calibrate import gather
from hasslefree.models.load import load_model
from hasslefree.models.sites import find_sites
from hasslefree.models.tokenizer import encode, load_tokenizer
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.texts.segments import draw_segments
from hasslefree.texts.sources import calibration_documents

# Pattern, sparsity where the pattern does not say, rank.
Setting = tuple[str, float | None, int]
BUDGETS: list[Setting] = [
    ("2:4", None, 32), ("4:8", None, 64), ("3:8", None, 32), ("2:8", None, 16),
    ("unstructured", 0.6, 32), ("unstructured", 0.7, 64),
]  # fmt: skip
SHAPES = [(512, 512), (1024, 256), (256, 1024), (1024, 1024)]
LAYERS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]


@dataclass(frozen=True)
class Problem:
    """A layer with a budget. source: "synthetic" or the name of the model."""

    name: str
    source: str
    weight: torch.Tensor
    gram: Gram
    pattern: str
    sparsity: float | None
    rank: int

    def as_json(self) -> dict[str, Any]:
        out, width = self.weight.shape
        fields = {"out": out, "in": width, "pattern": self.pattern, "sparsity": self.sparsity, "rank": self.rank}
        return {"source": self.source, **fields, "tokens": self.gram.tokens}


def synthetic(out: int, width: int, seed: int) -> tuple[torch.Tensor, Gram]:
    """A weight and a Gram from 8·in tokens: eigenvalues of H fall as 1/k, singular values of W as k^−½ over noise.

    Inputs have a mean square of one, but for one in a hundred: an outlier of ten times the size.
    """
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, columns: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(rows, columns, generator=generator)).Q

    decay = torch.arange(1, width + 1) ** -0.5
    x = torch.randn(8 * width, width, generator=generator) * decay @ orthonormal(width, width).T
    x /= x.square().mean().sqrt()
    x[:, torch.randperm(width, generator=generator)[: max(width // 100, 1)]] *= 10
    least = min(out, width)
    smooth = (orthonormal(out, least) * decay[:least]) @ orthonormal(width, least).T
    weight = 8 * smooth + 0.02 * torch.randn(out, width, generator=generator)
    return weight * (0.02 / weight.std()), Gram.from_activations(x)


def label(pattern: str, sparsity: float | None) -> str:
    return pattern if sparsity is None else f"{pattern} {sparsity:.0%}"


def synthetic_problems(shapes: list[tuple[int, int]], budgets: list[Setting]) -> Iterator[Problem]:
    for out, width in shapes:
        weight, gram = synthetic(out, width, seed=out + width)
        for pattern, sparsity, rank in budgets:
            name = f"{out}×{width} {label(pattern, sparsity)} + rank {rank}"
            yield Problem(name, "synthetic", weight, gram, pattern, sparsity, rank)


def model_problems(
    model_name: str, calibration: str, samples: int, seqlen: int, budgets: list[Setting]
) -> Iterator[Problem]:
    """Four layers of the first, a middle and the last block, each with the next of the budgets, at half the rank."""
    layers = model_layers(model_name, calibration, samples, seqlen)
    for number, (index, name, weight, gram) in enumerate(layers):
        pattern, sparsity, rank = budgets[number % len(budgets)]
        title = f"block {index} {name.split('.')[1]} {label(pattern, sparsity)} + rank {rank // 2}"
        yield Problem(title, Path(model_name).name, weight, gram, pattern, sparsity, rank // 2)


def model_layers(
    model_name: str, calibration: str, samples: int, seqlen: int
) -> Iterator[tuple[int, str, torch.Tensor, Gram]]:
    """Block, name, weight and Gram of `LAYERS` in the first, a middle and the last block of a dense model."""
    model, tokenizer = load_model(model_name, dtype="float32"), load_tokenizer(model_name)
    documents = calibration_documents(calibration)
    segments = draw_segments(documents, lambda text: encode(tokenizer, text), samples, seqlen, seed=0)
    blocks = find_blocks(model)
    walk = Walk.open(model, blocks, Weights(model, model.device), segments[:1])
    hidden, last = walk.entering(segments), len(blocks.modules) - 1
    for visit in walk.visits(hidden):
        if visit.index in (0, last // 2, last):
            grams = gather(visit.block, visit.prefix, visit.call, hidden, [[name] for name in LAYERS], ALONE)
            sites = find_sites(visit.block)
            for name, gram in zip(LAYERS, grams, strict=True):
                yield visit.index, name, sites[name].weight(), gram


def few_problems() -> list[Problem]:
    """The four layers of the first block of the embedded model, and a synthetic one."""
    of_model = islice(model_problems(str(MODEL), str(CALIBRATION), 64, 256, BUDGETS), len(LAYERS))
    return [*of_model, *synthetic_problems(SHAPES[:1], BUDGETS[:1])]
