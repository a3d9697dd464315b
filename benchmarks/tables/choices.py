"""The tables of what to choose: sizes, patterns, ranks, bits, and other programs that quantise."""

from __future__ import annotations

from collections.abc import Iterable

from tables.engine import Content, Row, Table
from tables.models import MODEL, in_percent, over_seeds
from tables.real import REAL_NOTE, measured

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


def whole_files(content: Content) -> Iterable[Row]:
    """Every row by the size of its file, with the perplexity increase on each text."""
    results = content["results"]
    firsts = {name: next(iter(seeds.values())) for name, seeds in results.items()}
    for name, first in sorted(firsts.items(), key=lambda pair: pair[1]["file_bytes"]):
        seconds = first.get("cpu_seconds")
        yield {
            "name": name,
            "words": in_words(name),
            "megabytes": first["file_bytes"] / 1e6,
            "bytes": first.get("bytes_a_weight"),
            "percent": percentages(first),
            "peak": first["peak_mb"] / 1000 if "peak_mb" in first else None,
            "cpu_minutes": None if seconds is None else seconds / 60,
        }


def percentages(row: Row) -> Row:
    """The perplexity increase on each text, over all texts that were not calibrated on, and on the worst of them."""
    if "increase" not in row:
        return dict.fromkeys([*row["perplexity"], "mean", "worst"])
    logarithms = row["increase"] | {"mean": row["unseen"], "worst": row["worst"]}
    return {text: in_percent(value) for text, value in logarithms.items()}


def in_words(name: str) -> str:
    """The name of a row, as flags where it is a size: 105MB, fast becomes `--size 105MB`, fast."""
    size, comma, effort = name.partition(", ")
    if size.endswith(("MB", "bits")) and comma:
        return f"`--size {size}`, {effort}"
    return name


# The row that README begins with, and the one of another program that it stands beside.
HEADLINE = "105MB, balanced"
BESIDE = "llama.cpp Q4_K_M, matrix"


def headline(content: Content) -> Row:
    """The dense model, ours, and a rival, in one sentence."""
    rows = {row["name"]: row for row in whole_files(content)}
    return {"dense": rows["dense"], "ours": rows[HEADLINE], "rival": rows[BESIDE]}


# What README offers: the goal, the row and the flags.
SETTINGS = (
    ("closest to dense, in the size of llama.cpp's Q4_K_M", HEADLINE, "hasslefree compress MODEL OUT --size 105MB"),
    ("**the default**", "5.2bits, balanced", "hasslefree compress MODEL OUT"),
    ("no fine-tuning", "5.2bits, fast", "hasslefree compress MODEL OUT --effort fast"),
    ("smallest", "4.3bits, best", "hasslefree compress MODEL OUT --size 4.3bits --effort best"),
)


def settings(content: Content) -> Iterable[Row]:
    """Settings of ours, with how much they raise the perplexity. A row that is not measured yet is left out."""
    rows = {row["name"]: row for row in whole_files(content)}
    yield rows["dense"] | {"goal": "dense", "command": ""}
    for goal, name, command in SETTINGS:
        if name in rows:
            yield rows[name] | {"goal": goal, "command": f"`{command}`"}


WHOLE_FILES = "whole_files_SmolLM2-135M-Instruct"
FOUR_BITS = f"python benchmarks/four_bits.py {MODEL}"
FRONTIER = f"python benchmarks/real_model.py frontier {MODEL}"
TABLES: dict[str, tuple[Table, ...]] = {
    "headline": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            note="**SmolLM2-135M-Instruct shrinks from {dense[megabytes]:.0f} to {ours[megabytes]:.0f} MB, embeddings "
            "included, in {ours[cpu_minutes]:.0f} minutes of one CPU thread, and its perplexity rises by "
            "{ours[percent][mean]:.1f} % on average over five kinds of text that it was not calibrated on.** "
            "llama.cpp's Q4_K_M takes {rival[megabytes]:.0f} MB with an importance matrix from the same text, and "
            "loses {rival[percent][mean]:.1f} %. On the worst of the five, it is {ours[percent][worst]:.1f} % here and "
            "{rival[percent][worst]:.1f} % there.\n\n"
            "<sub>One draw. Both were calibrated on {samples} × {seqlen} tokens of C4. The texts: WikiText-2, Penn "
            "Treebank, Python code, a conversation, and German; the first {max_tokens:,} tokens of each. The weights "
            "are those of an equivalent model, as in the table below.</sub>",
            facts=headline,
        ),
    ),
    "settings": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            (
                ("SmolLM2-135M-Instruct", "{goal}"),
                ("command", "{command}"),
                ("whole file, MB", "{megabytes:.0f}"),
                ("perplexity increase: WikiText-2", "{percent[wikitext2]:.1f} %"),
                ("mean of five kinds of text", "{percent[mean]:.1f} %"),
                ("worst of them", "{percent[worst]:.1f} %"),
                ("CPU minutes", "{cpu_minutes:.0f}"),
            ),
            settings,
            note="<sub>All rows add `--samples 64 --seqlen 512 --calibration FILE` to the command, with C4 as the "
            "file; the defaults, 128 and 2048, take longer. Minutes of one CPU thread beside other work. The only "
            "copy of this model that we had was rounded to 4 bits, which would favour some methods. We therefore "
            "measured a model that gives the same outputs but whose weights are [not "
            "rounded](docs/results/quality.md#whole-files-next-to-llamacpp).</sub>",
        ),
    ),
    "whole_files": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            (
                ("", "{words}"),
                ("whole file, MB", "{megabytes:.1f}"),
                ("bytes per layer weight", "{bytes:.3f}"),
                ("*", "{percent[*]:.1f} %"),
                ("CPU minutes", "{cpu_minutes:.1f}"),
            ),
            whole_files,
            note="SmolLM2-135M-Instruct, off its grid (σ = {off_grid[sigma]}, seed {off_grid[seed]}); calibrated on "
            "{samples} × {seqlen} tokens of C4. Perplexity increase on {max_tokens} tokens of each text, in windows of "
            "{window}, in {dtype}; mean and worst are those of the texts other than C4. On {where}.",
        ),
    ),
    "durations": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            (
                ("SmolLM2-135M-Instruct, {samples} × {seqlen} tokens", "{command}"),
                ("CPU minutes", "{cpu_minutes:.0f}"),
                ("peak GB of RAM", "{peak:.1f}"),
            ),
            lambda content: [row for row in settings(content) if "5.2bits" in row["name"]],
            note="On {where}.",
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
                ("perplexity increase", "{increase:.1f} %"),
            ),
            frontier,
            note=REAL_NOTE,
        ),
    ),
    "four_bits": (
        Table(
            "four_bits",
            FOUR_BITS,
            (
                ("", "{words}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("*", "{perplexity[*]:.2f}"),
                ("perplexity increase", "{increase:.1f} %"),
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
