"""The tables of single layers: methods against time and bytes, grids, factors, growth, the authors' code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.record import geometric_mean, mean
from hasslefree.core.shrinkage import TOKENS_A_DRAW
from tables.engine import Content, Row, Table, where

# The order of the rows; JSON has that of the measurements. A method that is not named comes last.
METHODS = ["godec", "pcp", "oats", "hassle-free", "hassle-free, exact step", "eora", "3basil", "joint"]
BASE = "3basil @ 2000"


def ends(key: str) -> bool:
    """Whether a row is the end of its curve: the rounds of the published method, or the default."""
    return key.partition(" @ ")[2] in ("", "80", "2000") or key == "joint @ 100"


def label(key: str) -> str:
    name, _, rounds = key.partition(" @ ")
    return f"{name}, {rounds} rounds" if rounds not in ("", "2000") else name


def place(key: str) -> int:
    name = key.partition(" @ ")[0]
    return METHODS.index(name) if name in METHODS else len(METHODS)


def over_3basil(content: Content) -> Iterable[Row]:
    """The ends of the curves, and all of joint's: over 3basil on the same problem."""
    problems = list(content["problems"].values())
    for key in sorted(problems[0]["rows"], key=place):  # stable: by rounds
        if not key.startswith("joint") and not ends(key):
            continue
        row: Row = {"label": label(key)}
        for source in ("model", "synthetic"):
            mine = [p["rows"] for p in problems if (p["source"] == "synthetic") == (source == "synthetic")]
            error, time = ([r[key][f] / r[BASE][f] for r in mine] for f in ("relative_error", "seconds"))
            row[source] = {"error": geometric_mean(error), "most": max(error), "time": geometric_mean(time)}
        yield row


def by_bytes(content: Content) -> Iterable[Row]:
    """Every system on single layers, with the budget that it has: geometric means."""
    found: dict[str, list[Row]] = {}
    for problem in content["problems"].values():
        for key in filter(ends, problem["rows"]):
            found.setdefault(f"support + rank: {label(key)}", []).append(problem["rows"][key])
        for name, row in problem["rooms"].items():
            found.setdefault(f"{row['room']}: {name}", []).append(row)
    fields = ("bytes_a_weight", "relative_error", "seconds")
    means = [
        {"name": name} | {field: geometric_mean(row[field] for row in rows) for field in fields}
        for name, rows in found.items()
        if len(rows) == len(content["problems"])  # the groups of a grid may not suit every problem
    ]
    return sorted(means, key=lambda row: (row["bytes_a_weight"], row["relative_error"]))


def protocol(content: Content) -> Row:
    clock = ", processor time" if content["clock"] == "cpu" else ""
    return {"protocol": f"{len(content['problems'])} problems, seed {content['seed']}{clock}, on {where(content)}."}


def quantised(content: Content) -> Iterable[Row]:
    """Error over plain rounding's, in the mean and at most, and the bits of a weight."""
    problems = list(content["problems"].values())
    for name in problems[0]:
        ratios = [rows[name]["relative_error"] / rows["rtn"]["relative_error"] for rows in problems]
        means = {field: mean(rows[name][field] for rows in problems) for field in ("bits", "seconds")}
        yield {"name": name, "error": geometric_mean(ratios), "most": max(ratios), **means}


def one_sweep(content: Content) -> Row:
    """What pruning and rounding in one sweep leaves of the error of one after the other."""
    problems, found = list(content["problems"].values()), {}
    for key, other in (("nearest", "2:4, then nearest"), ("second", "2:4, then a second sweep")):
        over = [rows["2:4 in one sweep"]["relative_error"] / rows[other]["relative_error"] for rows in problems]
        found[key] = {"mean": geometric_mean(over), "most": max(over)}
    return {"over": found, "layers": len(problems)}


def factors(content: Content) -> Iterable[Row]:
    """What rounding the factors adds to the loss, in per cent, for every way and method."""
    for way, scales in content["ways"].items():
        added = {name: 100 * (geometric_mean(found[way]) - 1) for name, found in content["losses"].items()}
        yield {"way": way, "scales": scales, "added": added}


def recorded(content: Content) -> Iterable[Row]:
    """Our relative error over the recorded one of the authors' code, like for like."""
    results = content["results"]
    for method, problems in results.items():
        alike = [runs[-1] for runs in problems.values()]
        # The deterministic methods have recorded outputs too.
        distances = [run["relative_distance"] for run in alike if "relative_distance" in run]
        name = f"{method} / 3basil" if method.startswith("joint") else method
        yield {"name": name, **spread(run["ratio"] for run in alike), "distance": max(distances, default=None)}
    rivals = [runs[-1]["recorded"] for runs in results["hassle-free"].values()]
    ours = [runs[-1]["relative_error"] for runs in results["joint"].values()]
    ratios = (a / b for a, b in zip(ours, rivals, strict=True))
    yield {"name": "joint / hassle-free", **spread(ratios), "distance": None}


def spread(ratios: Iterable[float]) -> dict[str, Any]:
    ratios = list(ratios)
    return {"mean": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}


OVER_3BASIL = (
    ("divided by 3basil's", "{label}"),
    ("model: error", "{model[error]:.2f}"),
    ("largest", "{model[most]:.2f}"),
    ("time", "{model[time]:.2f}"),
    ("synthetic: error", "{synthetic[error]:.2f}"),
    ("largest", "{synthetic[most]:.2f}"),
    ("time", "{synthetic[time]:.2f}"),
)


def shrunk(content: Content) -> Iterable[Row]:
    """A row for each method and number of tokens an input: trusted correlations beside shrunk ones, at each number of
    tokens a draw.
    """
    shown = {"trusted": 0, "shrunk": TOKENS_A_DRAW}
    by_draw: dict[tuple[str, int], dict[int, Row]] = {}
    for row in content["rows"]:
        by_draw.setdefault((row["method"], row["tokens_an_input"]), {})[row["tokens_a_draw"]] = row
    for (method, tokens), rows in by_draw.items():
        names = {draw: f"error, tokens per draw: {draw}" for draw in rows if draw}
        yield {
            "method": method,
            "tokens": tokens,
            "error": {name: f"{rows[draw]['error']:.2f} ({rows[draw]['largest']:.2f})" for draw, name in names.items()},
            "expected": {word: with_bounds(rows[draw]["expected"]) for word, draw in shown.items()},
        }


def with_bounds(values: list[float]) -> str:
    """A mean with the least and the largest value."""
    center, least, largest = values
    return f"{center:.2f} ({least:.2f} to {largest:.2f})"


TABLES: dict[str, tuple[Table, ...]] = {
    "shrinkage": (
        Table(
            "shrinkage",
            "python benchmarks/shrinkage.py MODEL --calibration FILE --text FILE",
            (
                ("method", "`{method}`"),
                ("tokens for each input", "{tokens}"),
                ("*", "{error[*]}"),
                ("expected / measured, not shrunk", "{expected[trusted]}"),
                ("expected / measured, shrunk", "{expected[shrunk]}"),
            ),
            shrunk,
            note="{model}, {rows[0][layers]} layers of blocks {blocks}; `joint-grid` entropy-coded with {bits} bits, "
            "`joint` at 2:4 + rank 16 with 50 rounds; calibrated on {calibration}, measured on {text}. On {where}.",
        ),
    ),
    "layers": (
        Table(
            "layers", "python benchmarks/layers.py curves", OVER_3BASIL, over_3basil, note="{protocol}", facts=protocol
        ),
    ),
    "layers_full": (
        Table(
            "layers_full",
            "python benchmarks/layers.py curves --set full --model MODEL --calibration FILE",
            OVER_3BASIL,
            over_3basil,
            note="{protocol}",
            facts=protocol,
        ),
    ),
    "rooms": (
        Table(
            "layers",
            "python benchmarks/layers.py curves",
            (
                ("budget: system", "{name}"),
                ("bytes per weight", "{bytes_a_weight:.3f}"),
                ("relative error", "{relative_error:.5f}"),
                ("seconds", "{seconds:.3f}"),
            ),
            by_bytes,
            note="Geometric means. {protocol}",
            facts=protocol,
        ),
    ),
    "growth": (
        Table(
            "growth",
            "python benchmarks/layers.py growth",
            (("size", "{size}²"), ("seconds", "{seconds:.2f}")),
            lambda content: content["rows"],
            note="The time grows as width^{exponent:.2f}. On {where}.",
        ),
    ),
    "quantised": (
        Table(
            "quantised",
            "python benchmarks/grids.py methods",
            (
                ("{grid}; rank {rank}", "{name}"),
                ("bits", "{bits:.2f}"),
                ("error / rtn's", "{error:.3f}"),
                ("largest", "{most:.3f}"),
                ("CPU seconds", "{seconds:.2f}"),
            ),
            quantised,
            note="The error of `2:4 in one sweep` is {over[nearest][mean]:.3f} times that of `2:4, then nearest` (at "
            "most {over[nearest][most]:.3f} times), and {over[second][mean]:.3f} times that of `2:4, then a second "
            "sweep` (at most {over[second][most]:.3f} times). Geometric means over {layers} layers, on {where}.",
            facts=one_sweep,
        ),
    ),
    "factors": (
        Table(
            "factors",
            "python benchmarks/grids.py factors",
            (("added to the relative error", "{way}"), ("scales", "{scales}"), ("*", "{added[*]:.1f} %")),
            factors,
            note="Geometric means over {layers} layers, rank {rank}, on {where}.",
            facts=lambda content: {"layers": len(next(iter(next(iter(content["losses"].values())).values())))},
        ),
    ),
    "recorded": (
        Table(
            "recorded",
            "python benchmarks/recorded.py FOLDER",
            (
                ("ours / recorded, {layers} layers", "{name}"),
                ("mean", "{mean:.4f}"),
                ("min", "{least:.4f}"),
                ("max", "{most:.4f}"),
                ("largest relative distance of S + L", "{distance:.0e}"),
            ),
            recorded,
            facts=lambda content: {"layers": len(content["results"]["joint"])},
        ),
    ),
}
