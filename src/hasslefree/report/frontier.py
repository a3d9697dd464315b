"""Perplexity against the bytes of the weights: a point for each model, a picture for each text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hasslefree.report.content import Content, Run


@dataclass(frozen=True)
class Point:
    """A model on one text.

    Args:
        name: of the folder, or of the dense model. bytes: of all weights, as stored.
        run: the index of the folder in the report; None for a dense model.
    """

    name: str
    bytes: int
    perplexity: float
    run: int | None


def frontiers(content: Content) -> dict[str, list[Point]]:
    """The points of every text on which at least two models were evaluated whose bytes are known."""
    found: dict[str, list[Point]] = {}
    for model, evaluation in content.others.items():
        if (size := dense_bytes(model, content.runs)) is not None:
            for text, perplexity in evaluation.perplexity.items():
                name = f"{Path(model).name or model} (dense)"
                found.setdefault(text, []).append(Point(name, size, perplexity, None))
    for index, run in enumerate(content.runs):
        for text, perplexity in run.evaluation.perplexity.items():
            found.setdefault(text, []).append(Point(run.name, run.sizes.bytes, perplexity, index))
    return {text: points for text, points in found.items() if len(points) > 1}


def dense_bytes(model: str, runs: tuple[Run, ...]) -> int | None:
    """The bytes of the dense model from which one of the folders was made; None for any other model."""
    for run in runs:
        if run.record.model == model or Path(run.record.model).resolve() == Path(model).resolve():
            return run.sizes.dense_bytes
    return None
