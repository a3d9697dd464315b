"""The tables of whole models: the demo, every method, systems by bytes, efforts."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path

from harness.record import RESULTS, mean
from tables.engine import Content, Row, Table, load

# The texts of the reference model, and what they are called.
TEXTS = {"wiki.test.raw": "wikitext2", "ptb.test.txt": "ptb", "c4_sample.jsonl[700:]": "c4"}
MODEL = "MODEL TEXT… --calibration FILE"


def named(perplexity: dict[str, float]) -> dict[str, float]:
    """Perplexities by the names of the texts."""
    return {TEXTS.get(text, Path(text).stem): value for text, value in perplexity.items()}


def per_cent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def demo(content: Content) -> Iterable[Row]:
    for row in content["rows"]:
        dense: Row = {} if row["seconds"] else {"relative_error": None, "seconds": None}
        yield row | {"millions": row["parameters"] / 1e6} | dense


def demo_screen(content: Content) -> Row:
    """The results as `hasslefree demo` prints them in a terminal of 76 columns, as a block of code."""
    from rich.console import Console

    from hasslefree.demo.run import DemoRow, demo_table

    console = Console(width=76, file=io.StringIO(), record=True)
    console.print(demo_table([DemoRow(**row) for row in content["rows"]]))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return {"screen": "\n".join(f"    {line}" for line in lines if line)}


def verdict(content: Content) -> Row:
    """The end of a run, as a block of code."""
    return {"screen": "\n".join(f"    {line}".rstrip() for line in content["lines"])}


def reference(content: Content) -> Iterable[Row]:
    """One table for each setting of the reference model."""
    for setting, results in content["results"].items():
        for method, row in results.items():
            figures = dict.fromkeys(["mean_relative_error", "solver_seconds", "peak_mb"]) | {"kept": "100 %"}
            if method != "dense":
                figures = row | {"kept": per_cent(row["kept_share"])}
            yield figures | {"setting": spelled(setting), "method": method, "perplexity": named(row["perplexity"])}


def spelled(setting: str) -> str:
    pattern, rank = setting.split("/")
    return f"{pattern} + rank {rank}"


def in_percent(logarithm: float) -> float:
    """The perplexity increase of a mean of log(perplexity / dense perplexity)."""
    return 100 * math.expm1(logarithm)


def by_draw(content: Content) -> Iterable[Row]:
    """The perplexity increase by calibration seeds, and its ratios."""
    seeds = [load(path.stem)["results"] for path in seed_files()]
    for setting, runs in content["results"].items():
        dense = runs["dense"]
        joint, rival = ([increase(found[setting][m], dense) for found in seeds] for m in ("joint", "3basil"))
        yield {
            "setting": spelled(setting),
            "joint": mean(joint),
            "rival": mean(rival),
            "ratio": mean(joint) / mean(rival),
            "by_seed": ", ".join(f"{one / other:.2f}" for one, other in zip(joint, rival, strict=True)),
            "over_hassle_free": increase(runs["joint"], dense) / increase(runs["hassle-free"], dense),
        }


def seed_files() -> list[Path]:
    return sorted(RESULTS.glob("reference_seed*.json"))


def increase(run: Row, dense: Row) -> float:
    """The perplexity increase over all texts."""
    return in_percent(mean(math.log(found / dense["perplexity"][text]) for text, found in run["perplexity"].items()))


def over_seeds(seeds: dict[str, Row], field: str) -> float:
    return mean(row[field] for row in seeds.values())


def efforts(content: Content) -> Iterable[Row]:
    """The perplexity increase, and time, of the three efforts and of published methods; and the ratios."""
    for setting, variants in content["results"].items():
        increases = {name: in_percent(over_seeds(seeds, "gap")) for name, seeds in variants.items()}
        seconds = {name: over_seeds(seeds, "cpu_seconds") for name, seeds in variants.items()}
        ratios = {rival: increases["best"] / increases[rival] for rival in ("3basil", "hassle-free")}
        yield {"setting": setting, "increase": increases, "seconds": seconds, "ratio": ratios}


def systems(content: Content) -> Iterable[Row]:
    """Every system by the bytes that it takes."""
    for name, row in sorted(content["results"].items(), key=lambda item: (item[1]["bytes_a_weight"], item[1]["gap"])):
        yield row | {"name": name, "perplexity": named(row["perplexity"]), "increase": in_percent(row["gap"])}
    blank = dict.fromkeys(["increase", "mean_relative_error"])
    yield {"name": "dense", "bytes_a_weight": 2.0, "perplexity": named(content["dense"]), **blank}


EFFORTS = (
    ("perplexity increase", "{setting}"),
    ("*", "{increase[*]:.2f} % ({seconds[*]:.0f})"),
    ("best / *", "{ratio[*]:.2f}"),
)
EFFORTS_NOTE = (
    "Calibrated on {samples} × {seqlen} tokens, perplexity on {max_tokens} tokens per text, CPU seconds in brackets; "
    "seed 0, on {where}."
)

TABLES: dict[str, tuple[Table, ...]] = {
    "demo": (
        Table(
            "demo",
            "python benchmarks/models.py demo",
            (
                ("2:4 + rank 16", "{method}"),
                ("perplexity", "{perplexity:.2f}"),
                ("relative error", "{relative_error:.4f}"),
                ("non-zeros", "{millions:.2f} M"),
                ("seconds", "{seconds:.0f}"),
            ),
            demo,
            note="{seconds:.0f} seconds in all, on {where}.",
        ),
    ),
    "demo_screen": (Table("demo", "python benchmarks/models.py demo", note="{screen}", facts=demo_screen),),
    "end_of_run": (Table("verdict", "python benchmarks/models.py verdict", note="{screen}", facts=verdict),),
    "reference": (
        Table(
            "reference_model",
            f"python benchmarks/models.py methods {MODEL}",
            (
                ("{setting}", "{method}"),
                ("*", "{perplexity[*]:.1f}"),
                ("relative error", "{mean_relative_error:.4f}"),
                ("kept", "{kept}"),
                ("seconds", "{solver_seconds:.0f}"),
                ("peak MB", "{peak_mb}"),
            ),
            reference,
            split="setting",
            note="Calibrated on {samples} × {seqlen} tokens of C4, seed {seed}, on {where}.",
        ),
    ),
    "draws": (
        Table(
            "reference_model",
            f"python benchmarks/models.py methods {MODEL} --seed N --output benchmarks/results/reference_seedN.json",
            (
                ("perplexity increase", "{setting}"),
                ("joint", "{joint:.2f} %"),
                ("3basil", "{rival:.2f} %"),
                ("joint / 3basil", "{ratio:.2f}"),
                ("by seed", "{by_seed}"),
                ("joint / hassle-free (seed 0)", "{over_hassle_free:.2f}"),
            ),
            by_draw,
            note="Means over {seeds} seeds.",
            facts=lambda content: {"seeds": len(seed_files())},
        ),
    ),
    "efforts": (Table("efforts", f"python benchmarks/models.py efforts {MODEL}", EFFORTS, efforts, note=EFFORTS_NOTE),),
    "efforts_demo": (
        Table(
            "efforts_demo",
            f"python benchmarks/models.py efforts {MODEL} --output benchmarks/results/efforts_demo.json",
            EFFORTS,
            efforts,
            note=EFFORTS_NOTE,
        ),
    ),
    "systems": (
        Table(
            "systems",
            f"python benchmarks/models.py systems {MODEL}",
            (
                ("", "{name}"),
                ("bytes per weight", "{bytes_a_weight:.3f}"),
                ("*", "{perplexity[*]:.1f}"),
                ("perplexity increase", "{increase:.2f} %"),
                ("relative error", "{mean_relative_error:.4f}"),
            ),
            systems,
            note="Calibrated on {samples} × {seqlen} tokens, perplexity on {max_tokens} tokens per text, seed {seed}, "
            "on {where}.",
        ),
    ),
}
