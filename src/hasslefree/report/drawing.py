"""Charts in Vega-Lite, for the page and for PNG and SVG files.

Colours are variables of page.css: charts on the page follow the reader's colour scheme, and files
have the light scheme.
"""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import StrictUndefined, Template

from hasslefree.errors import MemoryShortError
from hasslefree.escaping import escaped, escaped_within

ASSETS = Path(__file__).parent / "assets"

# vl-convert runs JavaScript in a thread of this process. A forked child does not have this thread.
ENGINE_PROCESS = os.getpid()

# The style of all charts.
CONFIG: dict[str, Any] = json.loads((ASSETS / "config.json").read_text(encoding="utf-8"))


# A row of a chart's data.
Row = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """A chart and its data, the data set "rows" of the chart.

    Args:
        note: how to read the chart; empty if the title is enough.
    """

    title: str
    chart: dict[str, Any]
    rows: list[Row]
    note: str = ""

    def on_page(self) -> dict[str, Any]:
        """The chart for the page, as wide as its container, without the shared `CONFIG`."""
        content = self._definition()
        content["width"] = "container"
        content["datasets"] = {"rows": escaped_within(self.rows)}
        return content

    def svg(self) -> str:
        """The chart as an SVG file. The same data give the same text."""
        content = self._definition()
        content["config"] = CONFIG
        content["title"] = escaped(self.title)
        coloured = json.loads(in_light_colours(json.dumps(content)))
        coloured["datasets"] = {"rows": escaped_within(self.rows)}
        return with_repeatable_ids(_vega_svg(json.dumps(coloured)))

    def _definition(self) -> dict[str, Any]:
        return escaped_within(self.chart | {"description": self.title})


def vega_lite(template: str, **values: Any) -> dict[str, Any]:
    """Fill in a template of Vega-Lite in `assets`."""
    text = (ASSETS / template).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(Template(text, undefined=StrictUndefined).render(values))
    return content


def in_light_colours(text: str) -> str:
    """Replace the variables of page.css by the colours of the light scheme, its first one."""
    style = (ASSETS / "page.css").read_text("utf-8").partition("@media")[0]
    for name, colour in re.findall(r"--(\w+): (#\w+)", style):
        text = text.replace(f"var(--{name})", colour)
    return text


def with_repeatable_ids(svg: str) -> str:
    """Number clips and gradients from 0. Vega's numbers depend on earlier charts of the process."""
    numbers: dict[str, int] = {}

    def renamed(match: re.Match[str]) -> str:
        number = numbers.setdefault(match[2], len(numbers))
        return f"{match[1]}part{number}"

    return re.sub(r'(id="|url\(#)((?:clip|gradient_)\d+)', renamed, svg)


def png(svg: str) -> bytes:
    """Convert an SVG to PNG, with two pixels per unit."""
    return vl_convert.svg_to_png(svg, scale=2)


def _vega_svg(definition: str) -> str:
    """Draw a chart, in another process if the engine cannot run in this one."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    if os.getpid() == ENGINE_PROCESS and unlimited:
        return vl_convert.vegalite_to_svg(definition)
    script = (
        "import sys, vl_convert; sys.stdout.write(vl_convert.vegalite_to_svg(sys.stdin.read()))"
    )
    command = [sys.executable, "-X", "utf8", "-c", script]
    done = subprocess.run(command, input=definition, capture_output=True, encoding="utf-8")
    if done.returncode:  # V8 reserves more than 64 GB of addresses, and aborts if it gets none
        raise MemoryShortError(
            "the charts could not be drawn: lift the limit on address space (ulimit -v), and repeat"
        )
    return done.stdout
