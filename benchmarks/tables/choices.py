"""The tables of what to choose: patterns, ranks, bits, and other programs that quantise."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tables.engine import Content, Row, Table, load
from tables.models import MODEL, over_seeds
from tables.real import REAL_NOTE, measured, two_four

DENSE_BYTES = 2.0


def by_bytes(rows: Iterable[Row]) -> list[Row]:
    """From the smallest to the largest."""
    return sorted(rows, key=lambda row: (row["bytes"] or DENSE_BYTES, row["gap"] or 0.0))


def frontier(content: Content) -> Iterable[Row]:
    """Every pattern and rank, by the bytes of the compressed layers."""
    return by_bytes(measured(content, content["results"]))


def four_bits(content: Content) -> Iterable[Row]:
    """Every quantised row, ours and those of other programs, by the bytes of the compressed layers."""
    results = content["results"]
    for row in by_bytes(measured(content, results)):
        seeds = results[row["name"]]
        first = next(iter(seeds.values()))
        minutes = None if row["name"] == "dense" else over_seeds(seeds, "cpu_seconds") / 60
        kinds = stored(first) if first.get("program") == "llama.cpp" else ""
        yield row | {"cpu_minutes": minutes, "stored": kinds, "words": as_flags(row["name"])}


def as_flags(name: str) -> str:
    """The name of a row of results, with the flag of a size: 5.2 bits, dealt, fast becomes `--size 5.2bits`, fast."""
    bits, dealt, effort = name.partition(" bits, dealt, ")
    return f"`--size {bits}bits`, {effort}" if dealt else name


def stored(row: Row) -> str:
    """Which of llama.cpp's types hold the weights: a file mixes several."""
    whole = sum(row["kinds"].values())
    shares = sorted(((count / whole, kind) for kind, count in row["kinds"].items()), reverse=True)
    return ", ".join(f"{kind} {share:.0%}".replace("%", " %") for share, kind in shares if share > 0.005)


def versions(content: Content) -> Row:
    """The packages of other programs."""
    rows = [next(iter(seeds.values())) for seeds in content["results"].values()]
    found = {name: version for row in rows for name, version in row.get("versions", {}).items()}
    return {"programs": ", ".join(f"{name} {version}" for name, version in sorted(found.items()))}


# A row of the frontier, of the real model or of the quantised ones, and what stands for it beside other programs.
SIDE_BY_SIDE = {
    "dense": "dense, bfloat16",
    "5.2 bits, dealt, balanced": "**the default**: `hasslefree compress MODEL OUT`",
    "4.3 bits, dealt, best": "smallest: `--size 4.3bits --effort best`",
    "4.6 bits, dealt, fast": "smaller, no training: `--size 4.6bits --effort fast`",
    "4 bits + rank 16, balanced": "4 bits everywhere: `--bits 4 --rank 16`",
    "4 bits + rank 16, best": "the same: `--bits 4 --rank 16 --effort best`",
    "llama.cpp Q8_0": "llama.cpp Q8_0",
    "llama.cpp Q4_K_M": "llama.cpp Q4_K_M",
    "llama.cpp Q3_K_M": "llama.cpp Q3_K_M",
    "AutoRound, 50 iterations, 4 bits": "AutoRound, 4 bits (50 iterations instead of 200)",
    "llm-compressor GPTQ, 4 bits": "llm-compressor GPTQ, 4 bits",
    "6:8 + rank 16": "6:8: `--pattern 6:8 --rank 16 --effort fast`",
    "best": "2:4: `--pattern 2:4 --rank 16 --effort best`",
    "fast": "2:4, no training: `--pattern 2:4 --rank 16 --effort fast`",
    "sparsegpt": "2:4, no L: `--method sparsegpt --rank 0`",
}


def rows_by_name(content: Content) -> dict[str, Row]:
    """The rows of the frontier, the efforts at 2:4, and the quantised rows; the dense one is the frontier's.

    Minutes are those of the clock if the machine did nothing else, and otherwise of the processor.
    """
    efforts = [*two_four(load("two_four")), *measured(load("real_model"), ["sparsegpt"])]
    rows = (*four_bits(load("four_bits")), *efforts, *frontier(content))
    found = {}
    for row in rows:
        cpu_minutes = row["cpu_seconds"] / 60 if row.get("cpu_seconds") else row.get("cpu_minutes")
        minutes = row["seconds"] / 60 if row["seconds"] else cpu_minutes
        found[row["name"]] = row | {"bytes": row["bytes"] or DENSE_BYTES, "minutes": minutes}
    return found


def choices(content: Content) -> Iterable[Row]:
    """Ways to make one model smaller, side by side. A row that is not measured yet is left out."""
    rows = rows_by_name(content)
    return [rows[name] | {"name": words} for name, words in SIDE_BY_SIDE.items() if name in rows]


# The row that README begins with, the default, and the one of another program that it stands beside.
HEADLINE, BESIDE = "5.2 bits, dealt, balanced", "llama.cpp Q4_K_M"


def headline(content: Content) -> Row:
    """The dense model, the default, and a rival, in one sentence."""
    rows = {row["name"]: row for row in four_bits(content)}
    ours, rival = (rows[name] | {"percent": 100 * math.expm1(rows[name]["gap"])} for name in (HEADLINE, BESIDE))
    return {"dense": rows["dense"], "ours": ours, "rival": rival}


# What README offers: the goal, the row, the flags, and the model whose speed of generation was measured so.
SETTINGS = (
    (
        "closest to dense: **the default**",
        "5.2 bits, dealt, balanced",
        "hasslefree compress MODEL OUT",
        "smollm2, `--size 5.2bits`",
    ),
    ("smallest", "4.3 bits, dealt, best", "hasslefree compress MODEL OUT --size 4.3bits --effort best", None),
    ("fastest", "4 bits + rank 16, balanced", "hasslefree compress MODEL OUT --bits 4 --rank 16", "smollm2"),
)


def settings(content: Content) -> Iterable[Row]:
    """Three settings of ours, with how much they raise the perplexity, on average over the texts."""
    rows = {row["name"]: row for row in four_bits(content)}
    dense = rows["dense"]
    yield dense | {"goal": "dense", "command": "", "bytes": DENSE_BYTES, "percent": None, "speed": "1.00 ×"}
    for goal, name, command, model in SETTINGS:
        percent = 100 * math.expm1(rows[name]["gap"])
        ways = load("generation_four_bits")["models"][model] if model else []
        speeds = [f"{way['tokens_over_dense']:.2f} ×" for way in ways if way["way"] == "packed"]
        speed = speeds[0] if speeds else "not measured"
        yield rows[name] | {"goal": goal, "command": f"`{command}`", "percent": percent, "speed": speed}


# What a reader of the results may be after, the row for it, and its name.
GOALS = (
    ("", "dense", "dense, bfloat16"),
    ("little loss at a third of the size: the default", "5.2 bits, dealt, balanced", "`--size 5.2bits`, `balanced`"),
    ("fewer bytes, no training", "4.8 bits, dealt, fast", "`--size 4.8bits`, `fast`"),
    ("fewest bytes, no training", "4.6 bits, dealt, fast", "`--size 4.6bits`, `fast`"),
    ("fewest bytes", "4.3 bits, dealt, best", "`--size 4.3bits`, `best`"),
    ("4 bits everywhere, for fast kernels", "4 bits + rank 16, balanced", "4 bits + rank 16, `balanced`"),
    ("the same, lowest loss", "4 bits + rank 16, best", "4 bits + rank 16, `best`"),
    ("almost no loss, bfloat16", "6:8 + rank 16", "6:8 + rank 16, `fast`"),
    ("half of the weights zero", "4:8 + rank 16", "4:8 + rank 16, `fast`"),
    ("2:4 kernels, lowest loss", "best", "2:4 + rank 16, `best`"),
    ("2:4 kernels, less time", "balanced", "2:4 + rank 16, `balanced`"),
    ("2:4 kernels, no training", "fast", "2:4 + rank 16, `fast`"),
)


def goals(content: Content) -> Iterable[Row]:
    """What to choose, by goal. A row that is not measured yet is left out."""
    rows = rows_by_name(content)
    for goal, name, words in GOALS:
        if name in rows:
            yield rows[name] | {"goal": goal, "words": words}


FRONTIER = f"python benchmarks/real_model.py frontier {MODEL}"
TABLES: dict[str, tuple[Table, ...]] = {
    "headline": (
        Table(
            "four_bits",
            f"python benchmarks/four_bits.py {MODEL}",
            note="**The layers of SmolLM2-135M-Instruct shrink from 2.00 to {ours[bytes]:.2f} bytes per weight in "
            "{ours[cpu_minutes]:.0f} minutes on one CPU thread, and the perplexity on WikiText-2 rises from "
            "{dense[perplexity][wikitext2]:.1f} to {ours[perplexity][wikitext2]:.1f}.** llama.cpp's Q4_K_M reaches "
            "{rival[perplexity][wikitext2]:.1f} with {rival[bytes]:.2f} bytes per weight. On average over three texts, "
            "the perplexity increases by {ours[percent]:.1f} %, and by {rival[percent]:.1f} % with Q4_K_M.\n\n"
            "<sub>Only the compressed layers count as bytes; embeddings stay as they are. Calibrated on one random "
            "sample of C4, {samples} × {seqlen} tokens; perplexity on the first {max_tokens:,} tokens of each text, in "
            "windows of {window}. The weights are those of an equivalent model, as in the table below.</sub>",
            facts=headline,
        ),
    ),
    "settings": (
        Table(
            "four_bits",
            f"python benchmarks/four_bits.py {MODEL}",
            (
                ("SmolLM2-135M-Instruct", "{goal}"),
                ("command", "{command}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("perplexity, WikiText-2", "{perplexity[wikitext2]:.1f}"),
                ("mean perplexity increase, three texts", "{percent:.1f} %"),
                ("CPU minutes", "{cpu_minutes:.0f}"),
                ("tokens per second vs dense", "{speed}"),
            ),
            settings,
            note="<sub>All rows add `--samples 64 --seqlen 512` to the command and use one random sample of C4; the "
            "defaults, 128 and 2048, take longer. Minutes on one CPU thread. Speed: transformers on one thread of a "
            "CPU with AMX. The only copy of this model that we had was rounded to 4 bits, which would favour some "
            "methods. We therefore measured a model that gives the same outputs but whose weights are [not "
            "rounded](docs/results/quality.md#quantised-s-next-to-other-programs).</sub>",
        ),
    ),
    "choices": (
        Table(
            "frontier",
            FRONTIER,
            (
                ("SmolLM2-135M-Instruct", "{name}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("perplexity, WikiText-2", "{perplexity[wikitext2]:.1f}"),
                ("gap", "{gap:.3f}"),
                ("minutes", "{minutes:.1f}"),
            ),
            choices,
        ),
    ),
    "goals": (
        Table(
            "frontier",
            FRONTIER,
            (
                ("if you want", "{goal}"),
                ("setting", "{words}"),
                ("bytes per weight", "{bytes:.2f}"),
                ("perplexity, WikiText-2", "{perplexity[wikitext2]:.1f}"),
                ("gap", "{gap:.3f}"),
                ("minutes", "{minutes:.1f}"),
            ),
            goals,
            note="SmolLM2-135M-Instruct, {samples} × {seqlen} calibration tokens of C4. Minutes are processor time; "
            "`fast`, `balanced` and `best` at 2:4 ran on a slower processor, without AMX.",
        ),
    ),
    "frontier": (
        Table(
            "frontier",
            FRONTIER,
            (
                ("", "{name}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("*", "{perplexity[*]:.2f}"),
                ("gap", "{gap:.3f}"),
            ),
            frontier,
            note=REAL_NOTE,
        ),
    ),
    "four_bits": (
        Table(
            "four_bits",
            f"python benchmarks/four_bits.py {MODEL}",
            (
                ("", "{words}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("*", "{perplexity[*]:.2f}"),
                ("gap", "{gap:.3f}"),
                ("CPU minutes", "{cpu_minutes:.1f}"),
                ("", "{stored}"),
            ),
            four_bits,
            note=REAL_NOTE + " The weights were moved off their grid with σ = {off_grid[sigma]} and seed "
            "{off_grid[seed]}. Other programs: {programs}.",
            facts=versions,
        ),
    ),
}
