"""Write the tables of README.md from the results, between the marks <!-- NAME --> and <!-- /NAME -->.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose other columns are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def demo() -> str:
    """The rows of the demo, and the machine that they were measured on."""
    content = json.loads((RESULTS / "demo.json").read_text())
    rows = [
        [
            row["method"],
            f"{row['perplexity']:.2f}",
            f"{row['relative_error']:.4f}" if row["seconds"] else "",
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['seconds']:.0f}" if row["seconds"] else "",
        ]
        for row in content["rows"]
    ]
    table = markdown(["2:4 + rank 16", "perplexity", "relative error", "non-zeros", "seconds"], rows)
    return f"{table}\n\n{content['seconds']:.0f} seconds in all, on {where(content)}."


def reference() -> str:
    """One table for each setting of the reference model."""
    content = json.loads((RESULTS / "reference_model.json").read_text())
    names = {"wiki.test.raw": "wikitext2", "ptb.test.txt": "ptb", "c4_sample.jsonl[700:]": "c4"}
    tables = []
    for setting, results in content["results"].items():
        rows = []
        for method, row in results.items():
            cells = [method, *(f"{row['perplexity'][text]:.1f}" for text in names)]
            if method == "dense":
                cells += ["", "100 %", "", ""]
            else:
                cells += [f"{row['mean_relative_error']:.4f}", f"{row['kept_share']:.1%}".replace("%", " %")]
                cells += [f"{row['solver_seconds']:.0f}", f"{row['peak_mb']}"]
            rows.append(cells)
        pattern, rank = setting.split("/")
        heads = [f"{pattern} + rank {rank}", *names.values(), "relative error", "kept", "seconds", "peak MB"]
        tables.append(markdown(heads, rows))
    calibration = f"{content['samples']} × {content['seqlen']} tokens of C4"
    return "\n\n".join(tables) + f"\n\nCalibrated on {calibration}, seed {content['seed']}, on {where(content)}."


def recorded() -> str:
    """Our relative error over the recorded one of the authors' code, like for like."""
    content = json.loads((RESULTS / "recorded.json").read_text())
    rows = []
    for method, problems in content["results"].items():
        alike = [runs[-1] for runs in problems.values()]
        ratios = [run["ratio"] for run in alike]
        # The deterministic methods have recorded outputs too.
        distances = [run["relative_distance"] for run in alike if "relative_distance" in run]
        distance = f"{max(distances):.0e}" if distances else ""
        rows.append([method, f"{min(ratios):.4f}", f"{max(ratios):.4f}", distance])
    return markdown(["nine layers", "least", "most", "largest distance of S + L"], rows)


def where(content: dict[str, Any]) -> str:
    machine = content["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    return f"{machine['processor']}, {threads}, torch {machine['torch']}, transformers {machine['transformers']}"


def filled(text: str) -> str:
    """The README with every table made anew."""
    for name, make in {"demo": demo, "reference": reference, "recorded": recorded}.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{make()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
