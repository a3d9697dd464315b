"""Write a report as one HTML page that contains its scripts, style and data."""

import base64
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hasslefree.checkpoint.card import trained
from hasslefree.checkpoint.record import kl_in_words
from hasslefree.escaping import escaped_within
from hasslefree.report.charts import comparisons, run_charts
from hasslefree.report.content import OUTSIDE, Content, Evaluation, model_name, place
from hasslefree.report.drawing import ASSETS, CONFIG
from hasslefree.report.maps import MAPS
from hasslefree.report.samples import Samples
from hasslefree.units import duration, size


def render(content: Content, samples: Sequence[Samples] = ()) -> str:
    """The page. Everything from a folder is escaped, and only the page's own scripts run.

    Args:
        samples: one for each run, or none at all.
    """
    compared = comparisons(content)
    charts = dict(compared)
    for index, run in enumerate(content.runs):
        worst = max(run.record.layers, key=lambda layer: layer.relative_error)
        charts.update(run_charts(run, content, str(index), worst.name))
    scripts = [vega_bundle(), (ASSETS / "page.js").read_text(encoding="utf-8")]
    definitions = {name: drawing.on_page() for name, drawing in charts.items()}
    template = environment().get_template("page.html")
    return template.render(
        content=content,
        runs=content.runs,
        charts=charts,
        comparisons=compared,
        columns=measured(content.evaluations),
        samples=samples,
        vega=vl_convert.get_vega_version(),
        data={"config": CONFIG, "charts": definitions},
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        hashes=[script_hash(script) for script in scripts],
    )


def measured(evaluations: Sequence[Evaluation]) -> dict[str, list[str]]:
    """The columns of the comparison: the texts with a perplexity, the texts with a KL divergence,
    and the tasks of any model, in order of appearance.
    """
    perplexity: dict[str, Any] = {}
    kl: dict[str, Any] = {}
    tasks: dict[str, Any] = {}
    for evaluation in evaluations:
        perplexity |= evaluation.perplexity
        kl |= evaluation.kl
        tasks |= evaluation.tasks
    return {"perplexity": list(perplexity), "kl": list(kl), "tasks": list(tasks)}


@functools.cache
def environment() -> Environment:
    """The templates and their filters. Control characters are escaped in texts."""
    made = Environment(
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=without_control_characters,
    )
    made.filters |= {
        "duration": duration,
        "kl": kl_in_words,
        "layer": layer_text,
        "leading": leading,
        "model": model_name,
        "short": MAPS["sensitivity"].text,
        "percentage": MAPS["relative-error"].text,
        "size": size,
        "trained": trained,
    }
    return made


def without_control_characters(value: Any) -> Any:
    """Escape the control characters in a text, but leave the page's own markup as it is."""
    if isinstance(value, Markup):
        return value
    return escaped_within(value)


def script_hash(script: str) -> str:
    """The hash by which a Content-Security-Policy allows an inline script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


@functools.cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines vegaEmbed."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", r"<\/script")


def leading(values: Sequence[float], share: float) -> int:
    """The number of leading singular values that have this share of the sum of squares."""
    least = share * sum(value * value for value in values)
    held = 0.0
    for count, value in enumerate(values, 1):
        held += value * value
        if held >= least > 0:
            return count
    return 0


def layer_text(name: str) -> str:
    """A layer in words: its block and the last part of its name."""
    block, kind = place(name)
    leaf = kind.rpartition(".")[2]
    if block == OUTSIDE:
        return leaf
    return f"block {block}, {leaf}"
