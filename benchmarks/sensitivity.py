"""Allocation by the estimate of one backward pass, and by what it estimates: the exact divergence of every layer.

    python benchmarks/sensitivity.py MODEL TEXT… --calibration FILE [--rows uniform estimate exact]

The exact divergence of a layer is the mean KL(dense ‖ pruned) of the predictions of the whole model in which only this
layer is pruned, in float32 on the first --probes calibration segments: one forward pass of the model for each layer.
Every row is a compression with `--effort fast` at 2:4 + rank 16, in a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hasslefree
from harness import models
from harness.models import Measurement
from harness.record import RESULTS, machine, resumed
from hasslefree.allocate.sensitivity import ProbedLayer
from hasslefree.pipeline.inputs import draw
from hasslefree.progress import ALLOCATION, PROBES

RECIPE = {"pattern": "2:4", "rank": 16, "effort": "fast"}
ROWS = {"uniform": RECIPE, "estimate": RECIPE | {"allocate": "error"}, "exact": RECIPE | {"allocate": "error"}}


def exact_divergence(model: Any, segments: Tensor) -> Callable[[ProbedLayer, Tensor], float]:
    """What `ProbedLayer.divergence` estimates. model: dense. segments: (segments, tokens)."""

    @torch.no_grad()
    def predictions() -> Tensor:
        return torch.cat([F.log_softmax(model(segment[None]).logits[0], -1) for segment in segments])

    dense = predictions()

    def divergence(layer: ProbedLayer, changed: Tensor) -> float:
        weight = model.get_submodule(layer.full).weight
        kept, weight.data = weight.data, changed.to(weight.dtype)
        pruned = predictions()
        weight.data = kept
        return F.kl_div(pruned, dense, log_target=True, reduction="sum").item() / len(dense)

    return divergence


def row(measurement: Measurement, name: str, probes: int) -> dict[str, Any]:
    """Compress and measure; seconds are those of the allocation, and of all."""
    recipe = measurement.recipe(**ROWS[name])
    if name == "exact":
        model = models.loaded(measurement.model)
        segments = draw(model, models.load_tokenizer(measurement.model), recipe)[:probes]
        ProbedLayer.divergence = exact_divergence(model, segments)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        report = hasslefree.compress(measurement.model, f"{scratch}/out", recipe)
        perplexity = models.rounded(measurement.perplexities(models.loaded(f"{scratch}/out", "auto")))
    allocation = sum(phase.seconds for phase in report.phases if phase.name in (PROBES, ALLOCATION))
    return {
        "processor": machine()["processor"],
        "perplexity": perplexity,
        "seconds": round(report.seconds, 1),
        "allocation_seconds": round(allocation, 1),
        "sensitivities": report.sensitivities,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[models.options(max_tokens=16 * 1024)],
    )
    parser.set_defaults(samples=64, seqlen=512)
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window of text")
    parser.add_argument("--probes", type=int, default=1, help="segments, for the exact divergence")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--output", type=Path, default=RESULTS / "sensitivity.json")
    args = parser.parse_args()
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "window", "max_tokens", "probes")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    measurement = Measurement.of(args)
    models.fill(content, args.output, {(name,): (measurement, name, args.probes) for name in args.rows}, row)


if __name__ == "__main__":
    main()
