"""A report as one HTML page, with its scripts, its style and its data in it."""

import base64
import functools
import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hasslefree.checkpoint.card import trained
from hasslefree.escaping import escaped_within
from hasslefree.report.charts import ASSETS, CONFIG, comparisons, dense_bytes, run_charts
from hasslefree.report.content import Content, place
from hasslefree.report.samples import Samples
from hasslefree.units import duration, size


def render(content: Content, samples: Sequence[Samples] = ()) -> str:
    """The page, which escapes what comes from a folder, and runs its own scripts alone. samples: of
    each run, or ().
    """
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    # Texts lose their control characters; the page's own markup stays.
    options["finalize"] = lambda value: (
        value if isinstance(value, Markup) else escaped_within(value)
    )
    environment = Environment(loader=FileSystemLoader(ASSETS), undefined=StrictUndefined, **options)
    environment.filters |= {
        "percent": percent,
        "error": lambda value: f"{value:.5f}" if value >= 1e-4 or value == 0 else f"{value:.2e}",
        "size": size,
        "duration": duration,
        "precise": lambda seconds: f"{seconds:.1f} s" if seconds < 9.95 else duration(seconds),
        "leading": leading,
        "trained": trained,
        "layer": layer_text,
        "leaf": lambda path: Path(path).name or path,
    }
    worst = [
        max(run.record.layers, key=lambda layer: layer.relative_error).name for run in content.runs
    ]
    layers = [{layer.name for layer in run.record.layers} for run in content.runs]
    selected = [
        worst[0] if worst[0] in names else other for other, names in zip(worst, layers, strict=True)
    ]
    drawings = [
        run_charts(run, content, layer) for run, layer in zip(content.runs, selected, strict=True)
    ]
    compared = comparisons(content)
    charts = compared | {
        f"{name}-{i}": each for i, charts in enumerate(drawings) for name, each in charts.items()
    }
    evaluations = [*content.others.values(), *(run.evaluation for run in content.runs)]
    scripts = [vega_bundle(), (ASSETS / "page.js").read_text(encoding="utf-8")]
    return environment.get_template("page.html").render(
        content=content,
        runs=content.runs,
        selected=selected,
        run_charts=drawings,
        comparisons=compared,
        texts=list(
            dict.fromkeys(text for evaluation in evaluations for text in evaluation.perplexity)
        ),
        tasks=list(dict.fromkeys(task for evaluation in evaluations for task in evaluation.tasks)),
        dense_bytes={name: dense_bytes(name, content.runs) for name in content.others},
        samples=samples,
        vega=vl_convert.get_vega_version(),
        data={
            "config": CONFIG,
            "charts": {name: drawing.on_page() for name, drawing in charts.items()},
        },
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        # What a Content-Security-Policy calls an inline script.
        hashes=[
            f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
            for text in scripts
        ],
    )


@functools.cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines vegaEmbed."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace(
        "</script", r"<\/script"
    )


def leading(values: Sequence[float], share: float) -> int:
    """How many of the largest singular values hold this share of the sum of squares."""
    squares = [value * value for value in values]
    sums, least = enumerate(accumulate(squares), 1), share * sum(squares)
    return next((count for count, held in sums if held >= least > 0), 0)


def layer_text(name: str) -> str:
    """A layer by its block and the last part of its name."""
    block, kind = place(name)
    return f"block {block}, {kind.rpartition('.')[2]}"


def percent(share: float) -> str:
    """A share in per cent, two digits of it, and no more than two after the point."""
    value = 100 * share
    if 0 < value < 0.005:
        return "<.01"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"
