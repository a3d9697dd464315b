"""A report as one HTML page, with its scripts, its style and its data in it."""

import base64
import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hasslefree.checkpoint.card import trained
from hasslefree.escaping import escaped_within
from hasslefree.packed.spec import LayerSpec
from hasslefree.report.charts import comparisons, dense_bytes, run_charts
from hasslefree.report.content import Content, Parts, Run, place
from hasslefree.report.drawing import ASSETS, CONFIG, Drawing
from hasslefree.report.samples import Samples
from hasslefree.units import duration, size


def render(content: Content, samples: Sequence[Samples] = ()) -> str:
    """Write the page, which escapes what comes from a folder, and runs its own scripts alone.

    Args:
        samples: those of each run, or none.
    """
    selected = selected_layers(content.runs)
    charts_of_runs: list[dict[str, Drawing]] = []
    compared = comparisons(content)
    charts = dict(compared)
    for index, (run, layer) in enumerate(zip(content.runs, selected, strict=True)):
        drawings = run_charts(run, content, layer)
        charts_of_runs.append(drawings)
        for name, drawing in drawings.items():
            charts[f"{name}-{index}"] = drawing
    definitions = {name: drawing.on_page() for name, drawing in charts.items()}
    texts: dict[str, None] = {}
    tasks: dict[str, None] = {}
    held_out = False
    evaluations = list(content.others.values())
    specs: list[LayerSpec] = []
    for run in content.runs:
        evaluations.append(run.evaluation)
        held_out = held_out or bool(run.record.held_out)
        specs.extend(layer.spec for layer in run.record.layers)
    for evaluation in evaluations:
        texts.update(dict.fromkeys(evaluation.perplexity))
        tasks.update(dict.fromkeys(evaluation.tasks))
    scripts = [vega_bundle(), (ASSETS / "page.js").read_text(encoding="utf-8")]
    return (
        environment()
        .get_template("page.html")
        .render(
            content=content,
            runs=content.runs,
            lead=lead(Parts.of(specs)),
            selected=selected,
            run_charts=charts_of_runs,
            comparisons=compared,
            texts=list(texts),
            tasks=list(tasks),
            held_out=held_out,
            dense_bytes={name: dense_bytes(name, content.runs) for name in content.others},
            samples=samples,
            vega=vl_convert.get_vega_version(),
            data={"config": CONFIG, "charts": definitions},
            style=(ASSETS / "page.css").read_text(encoding="utf-8"),
            scripts=scripts,
            hashes=[script_hash(script) for script in scripts],
        )
    )


def environment() -> Environment:
    """The templates and their filters. Texts lose their control characters; the markup stays."""
    made = Environment(
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=without_control_characters,
    )
    made.filters |= {
        "percent": percent,
        "error": error_figure,
        "size": size,
        "duration": duration,
        "precise": precise_duration,
        "range": number_range,
        "leading": leading,
        "trained": trained,
        "layer": layer_text,
        "leaf": leaf,
    }
    return made


def without_control_characters(value: Any) -> Any:
    """Escape the control characters of a text, but not the page's own markup."""
    if isinstance(value, Markup):
        return value
    return escaped_within(value)


def selected_layers(runs: Sequence[Run]) -> list[str]:
    """The layer that each folder shows first: the worst of the first folder, or else its own."""
    selected: list[str] = []
    for run in runs:
        names = {layer.name for layer in run.record.layers}
        if selected and selected[0] in names:
            selected.append(selected[0])
        else:
            worst = max(run.record.layers, key=lambda layer: layer.relative_error)
            selected.append(worst.name)
    return selected


def lead(parts: Parts) -> str:
    """Say what a compressed layer consists of."""
    kind = "sparse"
    if parts.quantised:
        kind = "sparse or quantised" if parts.sparse else "quantised"
    if parts.low_rank:
        return f"every layer in the blocks is the sum of a {kind} matrix S and a low-rank matrix L."
    return f"every layer in the blocks is a {kind} matrix S, without a low-rank part."


def script_hash(script: str) -> str:
    """The hash by which a Content-Security-Policy allows an inline script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


@functools.cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines vegaEmbed."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace(
        "</script", r"<\/script"
    )


def leading(values: Sequence[float], share: float) -> int:
    """Count the largest singular values that hold this share of the sum of squares."""
    least = share * sum(value * value for value in values)
    held = 0.0
    for count, value in enumerate(values, 1):
        held += value * value
        if held >= least > 0:
            return count
    return 0


def layer_text(name: str) -> str:
    """A layer by its block and the last part of its name."""
    block, kind = place(name)
    return f"block {block}, {kind.rpartition('.')[2]}"


def leaf(path: str) -> str:
    """The last part of a path."""
    return Path(path).name or path


def number_range(values: Iterable[int]) -> str:
    """The least and the greatest of some numbers: 3 to 6, or 4 if all are the same."""
    numbers = list(values)
    if min(numbers) == max(numbers):
        return str(min(numbers))
    return f"{min(numbers)} to {max(numbers)}"


def error_figure(value: float) -> str:
    """A relative error as a number of the tables."""
    if value >= 1e-4 or value == 0:
        return f"{value:.5f}"
    return f"{value:.2e}"


def precise_duration(seconds: float) -> str:
    """A duration, with tenths of a second below ten seconds."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return duration(seconds)


def percent(share: float) -> str:
    """A share in per cent, two digits of it, and no more than two after the point."""
    value = 100 * share
    if 0 < value < 0.005:
        return "<.01"
    if value >= 9.95:
        return f"{value:.0f}"
    if value >= 0.995:
        return f"{value:.1f}"
    return f"{value:.2f}"
