"""A report as one HTML page, with its script, its style and its data in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hasslefree.folder.record import LayerRecord
from hasslefree.report.content import Content, Evaluation, Run
from hasslefree.report.figures import block_means, shares
from hasslefree.report.frontier import dense_bytes, frontiers
from hasslefree.report.layer_map import by_kind, error_range, layer_map, place, shade
from hasslefree.report.samples import Samples
from hasslefree.units import duration, significant, size

ASSETS = Path(__file__).parent / "assets"

# Numbers in the curves of all layers of a page together, some seven bytes each.
POINTS = 12_000


def render(content: Content, samples: Sequence[Samples] = ()) -> str:
    """The page. Whatever comes from a folder is escaped; the browser runs the page's own two scripts and no other.

    Args:
        samples: of each run, in their order; empty for a page without samples.
    """
    library, script = read_script("chart.umd.min.js"), read_script("page.js")
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "error": error_text,
        "size": size,
        "duration": duration,
        "precise": precise,
    }
    environment.filters |= {"layer": layer_text, "leaf": lambda path: Path(path).name or path}
    layers = [layer for run in content.runs for layer in run.record.layers]
    texts = [text for found in evaluations(content) for text in found.perplexity]
    tasks = [task for found in evaluations(content) for task in found.tasks]
    least, most = error_range(layers)
    return environment.get_template("page.html").render(
        content=content,
        runs=content.runs,
        grids=[layer_map(run.record.layers) for run in content.runs],
        shade=lambda layer: round(shade(layer.relative_error, least, most), 3),
        ink=lambda layer: ink(shade(layer.relative_error, least, most)),
        least=least,
        most=most,
        texts=list(dict.fromkeys(texts)),
        tasks=list(dict.fromkeys(tasks)),
        dense_bytes={name: dense_bytes(name, content.runs) for name in content.others},
        frontiers=list(frontiers(content)),
        samples=samples,
        data=page_data(content),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        scripts=[library, script],
        hashes=[script_hash(text) for text in (library, script)],
    )


def ink(shade: float) -> str:
    """The class of a cell's text: dark text on light cells can be read up to 0.66, light on dark ones up to 0.5."""
    return "deep" if shade > 0.66 else "middle" if shade > 0.5 else "pale"


def read_script(name: str) -> str:
    """A script without the comment that names its source map, which is not on the page."""
    return (ASSETS / name).read_text(encoding="utf-8").partition("\n//# sourceMappingURL")[0]


def script_hash(text: str) -> str:
    """What a Content-Security-Policy calls an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def evaluations(content: Content) -> list[Evaluation]:
    return [*content.others.values(), *(run.evaluation for run in content.runs)]


def page_data(content: Content) -> dict[str, Any]:
    """What the charts are drawn from."""
    count = sum(len(run.record.layers) for run in content.runs)
    most = max(12, POINTS // (2 * count))
    points = [[dataclasses.asdict(point) for point in found] for found in frontiers(content).values()]
    return {"runs": [run_data(run, most) for run in content.runs], "frontiers": points}


def run_data(run: Run, most: int) -> dict[str, Any]:
    """One run. most: points of a curve."""
    grid, (sparse, low_rank) = layer_map(run.record.layers), shares(run.record.layers)
    kinds = {layer.name: kind for (_, kind), layer in grid.cells.items()}
    layers = [layer_data(run, layer, kinds[layer.name], most) for layer in run.record.layers]
    means = block_means(run.record.layers)
    return {
        "name": run.name,
        "layers": layers,
        "sparse": [significant(value) for value in sparse],
        "lowRank": [significant(value) for value in low_rank],
        "sensitivities": [
            {"kind": kind, "data": [{"x": block, "y": significant(value)} for block, value in line.items()]}
            for kind, line in by_kind(run.record.sensitivities or {}).items()
        ],
        "blocks": [{"x": block, "y": significant(mean)} for block, mean in means.items()],
    }


def layer_data(run: Run, layer: LayerRecord, kind: str, most: int) -> dict[str, Any]:
    values = run.spectra.get(layer.name, ())
    return {
        "name": layer.name,
        "block": place(layer.name)[0],
        "kind": kind,
        "shape": list(layer.spec.shape),
        "pattern": layer.spec.pattern,
        "rank": layer.spec.rank,
        "nonzeros": layer.spec.nonzeros,
        "error": significant(layer.relative_error),
        "sensitivity": (run.record.sensitivities or {}).get(layer.name),
        "before": significant(layer.relative_error_before_cast),
        "history": curve(layer.history, most),
        "spectrum": curve(values, most),
        "ninety": leading(values, 0.9),
        "remarks": list(layer.remarks),
        "step": run.step,
    }


def curve(values: Sequence[float], most: int) -> dict[str, Any]:
    """At most so many of the values, evenly spread, the first and the last among them; and how many there were.

    Of n values in p points, point s is value ⌊s (n − 1) / (p − 1)⌋: page.js counts so too.
    """
    count = len(values)
    kept = [step * (count - 1) // (most - 1) for step in range(most)] if count > most else range(count)
    return {"count": count, "values": [significant(values[index], 5) for index in kept]}


def leading(values: Sequence[float], share: float) -> int:
    """How many of the largest singular values hold this share of the sum of squares."""
    total, so_far = sum(value * value for value in values), 0.0
    for count, value in enumerate(values, 1):
        so_far += value * value
        if so_far >= share * total:
            return count
    return 0


def percent(share: float) -> str:
    """A share in per cent, two digits of it, and no more than two after the point."""
    value = 100 * share
    if 0 < value < 0.005:
        return "<.01"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def error_text(value: float) -> str:
    return f"{value:.5f}" if value >= 1e-4 or value == 0 else f"{value:.2e}"


def layer_text(name: str) -> str:
    """A layer by its block and the last part of its name."""
    block, kind = place(name)
    return f"block {block}, {kind.rpartition('.')[2]}"


def precise(seconds: float) -> str:
    """A duration, with a tenth of a second below 10 s."""
    return f"{seconds:.1f} s" if seconds < 9.95 else duration(seconds)
