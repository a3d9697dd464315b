"""The tables of the paper as measured here, and where the paper's order of methods holds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from harness.paper import TASKS, TEXTS
from harness.record import mean
from tables.engine import Content, Row, Table
from tables.models import per_cent


def measured(content: Content) -> Iterable[Row]:
    """A table of the paper, row by row: what was measured, and what it prints."""
    for table, rows in content["tables"].items():
        # Of the tasks the average, where they were measured.
        texts = [name for name in rows[0]["measured"] if name not in TASKS]
        # The paper's own texts, whatever was measured.
        printed = [text for text in rows[0]["paper"] if text in TEXTS]
        for row in rows:
            yield {
                "table": table[-1],
                "name": name_of(row, content["rounds"]),
                "measured": {text: row["measured"][text] for text in texts},
                "relative_error": row.get("relative_error"),
                "kept": per_cent(row["kept_share"]) if "kept_share" in row else None,
                "paper": {text: row["paper"][text] if row["paper"] else None for text in printed},
            }


def name_of(row: Row, rounds: int | None) -> str:
    """The setting and method of a row, and its rounds if they are not those of the others."""
    if not row["setting"]:
        return "dense"
    name = f"{row['setting']}: {row['method']}"
    own = row.get("rounds", rounds)
    return name if own == rounds else f"{name}, {own} rounds"


def protocol(content: Content) -> Row:
    """How it was measured; the last table says whether with tasks."""
    rows = list(content["tables"].values())[-1]
    text = f"at most {content['max_tokens']:,} tokens of each text"
    if any(name in rows[0]["measured"] for name in TASKS):
        text += f"; average: of the table's zero-shot tasks, in per cent, {content['limit']} rows of each"
    counted = f"{content['rounds']} rounds of every method that counts them"
    rounds = counted if content["rounds"] else "each method's own rounds"
    return {"own_rounds": rounds, "texts": text, "beside": counterparts(content["tables"])}


def counterparts(tables: dict[str, Sequence[Row]]) -> str:
    """The paper's models beside which the rows of tables stand."""
    names = {table[-1]: rows[0]["beside"] for table, rows in tables.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return " and ".join(f"{name} in table {table}" for table, name in names.items())


def paper_order(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """For two methods: in how many settings the first is ahead in the paper, in the measurements, and in how many both.

    A method is ahead that has the lesser mean over texts of log(perplexity). Counted are settings in which the paper
    has both methods: (in the paper, measured, settings).
    """
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for one, other in itertools.permutations(rows, 2):
        alike = all(one[field] == other[field] for field in ("model", "beside", "config"))
        if alike and one["method"] < other["method"] and one["paper"] and other["paper"]:
            ahead = [log_mean(one, of) < log_mean(other, of) for of in ("paper", "measured")]
            counts = found.get((one["method"], other["method"]), (0, 0, 0))
            found[one["method"], other["method"]] = (counts[0] + ahead[0], counts[1] + ahead[1], counts[2] + 1)
    return found


def log_mean(row: Row, of: str) -> float:
    """The mean of log(perplexity) over the texts of a row. of: "paper" or "measured"."""
    logs = [math.log(value) for name, value in row[of].items() if name not in (*TASKS, "average")]
    return sum(logs) / len(logs)


def order(content: Content) -> Iterable[Row]:
    """For pairs of methods, in how many settings the first is ahead: in the paper, and measured."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for rows in content["tables"].values():
        for pair, counts in paper_order(rows).items():
            pairs[pair] = [a + b for a, b in zip(pairs.get(pair, [0, 0, 0]), counts, strict=True)]
    for (one, other), (paper, here, settings) in pairs.items():
        yield {"pair": f"{one} ahead of {other}", "paper": paper, "here": here, "settings": settings}


def best(content: Content) -> Row:
    """In how many settings joint, the layers alone, is ahead of all other methods."""
    ahead = settings = 0
    for rows in content["tables"].values():
        for joint in (row for row in rows if row["method"] == "joint"):
            rivals = [row for row in rows if row["config"] == joint["config"] and "joint" not in row["method"]]
            ahead += all(log_mean(joint, "measured") < log_mean(row, "measured") for row in rivals)
            settings += 1
    return {"ahead": ahead, "settings": settings}


def figure1(content: Content) -> Iterable[Row]:
    """The relative error of each layer of one block, by method."""
    errors = content["figure1"]["errors"]
    for layer in next(iter(errors.values())):
        yield {"layer": layer, "error": {method: errors[method][layer] for method in errors}}


# The texts of other_text.json, and how the page names them.
ON_TEXTS = {
    "calibration": "the calibration text",
    "wiki.test.raw": "wikitext2",
    "ptb.test.txt": "ptb",
    "c4_sample.jsonl[700:]": "other text of c4",
}


def by_pattern(content: Content) -> Iterable[Row]:
    """The mean error of a method over all layers of a block, over that of OATS on the same text."""
    for name, layers in content["results"].items():
        block, pattern = name.split(", ")
        means = {method: mean_by_text(layers, method) for method in measured_on_all(layers)}
        for method in [method for method in means if method != "oats"]:
            ratios = {shown: means[method][text] / means["oats"][text] for text, shown in ON_TEXTS.items()}
            smaller = sum(row[method]["wiki.test.raw"] < row["oats"]["wiki.test.raw"] for row in layers.values())
            yield {
                "block": block,
                "name": f"{pattern} + rank {content['rank']}: {method}",
                "ratio": ratios,
                "smaller": f"{smaller} of {len(layers)}",
            }


def measured_on_all(layers: Row) -> list[str]:
    """The methods that every layer was decomposed with."""
    first, *others = layers.values()
    return [method for method in first if all(method in row for row in others)]


def mean_by_text(layers: Row, method: str) -> dict[str, float]:
    """The mean relative error of a method over layers, by text."""
    return {text: mean(row[method][text] for row in layers.values()) for text in ON_TEXTS}


def by_rounds(content: Content) -> Iterable[Row]:
    """The error on WikiText-2 of the attention's layers at 2:4, by method."""
    for setting, layers in content["results"].items():
        if not setting.endswith("2:4"):
            continue
        for layer, row in layers.items():
            if "self_attn" in layer:
                errors = {method: found["wiki.test.raw"] for method, found in row.items()}
                yield {"layer": layer.rpartition(".")[2], "error": errors}


def reproduction(name: str) -> tuple[Table, ...]:
    results, command = f"reproduction_{name}", f"python benchmarks/reproduction.py PART --record {name}"
    columns = (
        ("table {table}", "{name}"),
        ("*", "{measured[*]:.2f}"),
        ("relative error", "{relative_error:.4f}"),
        ("kept", "{kept}"),
        ("paper: *", "{paper[*]:.2f}"),
    )
    note = "Calibrated on {samples} × {seqlen} tokens, {own_rounds}; {texts}. The paper's figures are for {beside}."
    ahead = "`joint` is ahead of the others in {ahead} of {settings} settings. On {where}."
    pairs = (
        ("which method is ahead", "{pair}"),
        ("settings in the paper", "{paper}"),
        ("settings here", "{here}"),
        ("of", "{settings}"),
    )
    return (
        Table(results, command, columns, measured, split="table", note=note, facts=protocol),
        Table(results, command, pairs, order, note=ahead, facts=best),
    )


def without_order(name: str) -> tuple[Table, ...]:
    """The same for results with too few rows to compare the order of the methods."""
    rows, _ = reproduction(name)
    return (dataclasses.replace(rows, note=rows.note + " On {where}."),)


def figure(name: str) -> tuple[Table, ...]:
    columns = (
        ("block {figure1[block]}, {figure1[pattern]} + rank {figure1[rank]}", "{layer}"),
        ("*", "{error[*]:.2g}"),
    )
    return (Table(f"reproduction_{name}", f"python benchmarks/reproduction.py PART --record {name}", columns, figure1),)


TABLES = {f"reproduction_{name}": reproduction(name) for name in ("embedded", "reference", "smollm2")}
TABLES["reproduction_qwen"] = without_order("qwen")
TABLES["other_text"] = (
    Table(
        "other_text",
        "python benchmarks/other_text.py MODEL TEXT…",
        (
            ("block {block}: error / that of oats", "{name}"),
            ("on *", "{ratio[*]:.2f}"),
            ("layers with a smaller error on wikitext2", "{smaller}"),
        ),
        by_pattern,
    ),
    Table(
        "other_text",
        "python benchmarks/other_text.py MODEL TEXT…",
        (("2:4 + rank {rank}, error on wikitext2", "{layer}"), ("*", "{error[*]:.2g}")),
        by_rounds,
        note="{model}, fitted on {samples} × {seqlen} tokens of C4, measured on {text_samples} × {seqlen} tokens of "
        "each other text; on {where}.",
    ),
)
TABLES |= {f"figure1_{name}": figure(name) for name in ("embedded", "reference", "qwen")}
