"""The tables of what to choose: sizes, patterns, ranks, bits, and other programs that quantise."""

from __future__ import annotations

from collections.abc import Iterable

from tables.engine import Content, Row, Table, load
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
    """The name of a row of results, with flags where it has a size: 5.2 bits, dealt, fast becomes `--size 5.2bits
    --coding fixed`, fast.
    """
    bits, dealt, effort = name.partition(" bits, dealt, ")
    return f"`--size {bits}bits --coding fixed`, {effort}" if dealt else name


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
    """The name of a row, as flags where it has a size: 105MB, fast, entropy-coded becomes `--size 105MB`, fast."""
    if name.startswith(GGUF):
        size, _, effort = name.removeprefix(GGUF).partition(", ")
        return f"GGUF: `--engine llama.cpp --size {size}`, {effort}"
    size, *words = name.split(", ")
    if not size.endswith(("MB", "bits")) or not words:
        return name
    flags = f"--size {size}"
    if ENTROPY_CODED in words:
        words.remove(ENTROPY_CODED)
    else:
        flags += " --coding fixed"
    return f"`{flags}`, {', '.join(words)}"


GGUF = "GGUF, "
ENTROPY_CODED = "entropy-coded"
# By model: the rows of ours that README begins with, and their words. RIVALS: those of llama.cpp of the same size, of
# which the better one counts.
EQUAL_FILES = {
    "Qwen2.5-Coder-1.5B-Instruct": {
        "985MB, fast, entropy-coded, mixture": "`--size 985MB --effort fast`, mixture of texts",
    },
    "Qwen2.5-Coder-0.5B-Instruct": {
        "398MB, balanced, mixture": "`--size 398MB --coding fixed`, mixture of texts",
    },
    "SmolLM2-135M-Instruct": {
        "105MB, balanced, entropy-coded": "`--size 105MB`",
        "5.2bits, balanced, entropy-coded": "the default size",
        "GGUF, 103.6MB, balanced": "`--engine llama.cpp --size 103.6MB`",
    },
}
RIVALS = ("llama.cpp Q4_K_M", "llama.cpp Q4_K_M, matrix")


def equal_files(content: Content) -> Iterable[Row]:
    """Files of ours and of llama.cpp, for each model. A row that is not measured yet is left out."""
    for model, ours in EQUAL_FILES.items():
        rows = {row["name"]: row for row in whole_files(load(f"whole_files_{model}"))}
        dense = rows["dense"]["megabytes"]
        rival = min(RIVALS, key=lambda name: rows[name]["percent"]["mean"])
        label = f"{model.removesuffix('-Instruct')}, {dense:.0f} MB"
        for name, words in ours.items():
            if name in rows:
                yield rows[name] | {"model": label, "words": words}
                label = ""
        yield rows[rival] | {"model": "", "words": rival.replace(", matrix", ", importance matrix")}


def durations(content: Content) -> Iterable[Row]:
    """The settings whose run was timed."""
    return (row for row in settings(content) if row["cpu_minutes"] is not None)


def whole_files_of(model: str) -> Table:
    """The table of every row of a model."""
    return Table(
        f"whole_files_{model}",
        f"python benchmarks/four_bits.py {model}",
        (
            ("", "{words}"),
            ("whole file, MB", "{megabytes:.1f}"),
            ("bytes per layer weight", "{bytes:.3f}"),
            ("*", "{percent[*]:.1f} %"),
            ("CPU minutes", "{cpu_minutes:.1f}"),
        ),
        whole_files,
        note="{model}, off its grid (σ = {off_grid[sigma]}, seed {off_grid[seed]}); calibrated on {samples} × {seqlen} "
        "tokens of C4. Perplexity increase on {max_tokens} tokens of each text, in windows of {window}, in {dtype}; "
        "mean and worst are those of the texts other than C4. On {where}.",
    )


def parts(content: Content) -> Iterable[Row]:
    """The rows of a file in its order, without the dense model."""
    rows = {row["name"]: row for row in whole_files(content)}
    return (rows[name] for name in content["results"] if name != "dense")


def overfitting(content: Content) -> Iterable[Row]:
    """Which parts of a compression read the mixture."""
    for name, row in content["results"].items():
        if name != "dense":
            words = "none" if name == "none" else name.replace("Grams", "layer inputs").replace("budgets", "bits")
            yield {"words": words, "percent": {text: in_percent(value) for text, value in row["increase"].items()}}


def overfitting_of(file: str, effort: str) -> Table:
    """The table of a file."""
    return Table(
        file,
        f"python benchmarks/overfitting.py MODEL TEXT… --calibration TEXT --mixture TEXT:SHARE% … --effort {effort}",
        (("from the mixture", "{words}"), ("*", "{percent[*]:.1f} %")),
        overfitting,
        note="{model}, off its grid, `--size {size} --coding fixed --effort {effort}`, {samples} × {seqlen} tokens; "
        "perplexity increase on {max_tokens} tokens of each text, in windows of {window}, in {dtype}. On {where}.",
    )


# What README offers: the goal, the row and the flags.
SETTINGS = (
    ("closest to dense, in the size of llama.cpp's Q4_K_M", "105MB, balanced, entropy-coded", "--size 105MB"),
    ("**the default size and effort**", "5.2bits, balanced, entropy-coded", ""),
    ("no fine-tuning", "5.2bits, fast, entropy-coded", "--effort fast"),
    ("less memory and more speed, with AVX-512", "5.2bits, balanced", "--coding fixed"),
    ("smaller", "4.6bits, balanced, entropy-coded", "--size 4.6bits"),
    ("smaller still", "4.3bits, balanced, entropy-coded", "--size 4.3bits"),
    ("smallest file", "3.54bits, balanced, entropy-coded", "--size 3.54bits"),
)


def settings(content: Content) -> Iterable[Row]:
    """Settings of ours, with how much they raise the perplexity. A row that is not measured yet is left out."""
    rows = {row["name"]: row for row in whole_files(content)}
    yield rows["dense"] | {"goal": "dense", "command": ""}
    for goal, name, flags in SETTINGS:
        if name in rows:
            yield rows[name] | {"goal": goal, "command": f"`{flags}`" if flags else "none"}


WHOLE_FILES = "whole_files_SmolLM2-135M-Instruct"
FOUR_BITS = f"python benchmarks/four_bits.py {MODEL}"
FRONTIER = f"python benchmarks/real_model.py frontier {MODEL}"
TABLES: dict[str, tuple[Table, ...]] = {
    "equal_files": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            (
                ("", "{model}"),
                ("", "{words}"),
                ("whole file, MB", "{megabytes:.0f}"),
                ("perplexity increase: WikiText-2", "{percent[wikitext2]:.1f} %"),
                ("Penn Treebank", "{percent[ptb]:.1f} %"),
                ("Python code", "{percent[code]:.1f} %"),
                ("conversation", "{percent[conversation]:.1f} %"),
                ("German", "{percent[german]:.1f} %"),
                ("CPU minutes", "{cpu_minutes:.1f}"),
            ),
            equal_files,
        ),
    ),
    "settings": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            (
                ("SmolLM2-135M-Instruct", "{goal}"),
                ("flags", "{command}"),
                ("whole file, MB", "{megabytes:.0f}"),
                ("perplexity increase: WikiText-2", "{percent[wikitext2]:.1f} %"),
                ("mean of five kinds of text", "{percent[mean]:.1f} %"),
                ("worst of them", "{percent[worst]:.1f} %"),
                ("CPU minutes", "{cpu_minutes:.0f}"),
            ),
            settings,
            note="<sub>The command is `hasslefree compress MODEL OUT --samples 64 --seqlen 512 --calibration FILE`, "
            "with C4 as the file, and the flags. The default `--samples 128 --seqlen 2048` takes longer. Minutes are "
            "those of one CPU thread; a run that was interrupted has none. The entropy-coded rows (all but `--coding "
            "fixed`) were measured on a slower processor, with AVX2 alone.</sub>",
        ),
    ),
    "durations": (
        Table(
            WHOLE_FILES,
            FOUR_BITS,
            (
                ("SmolLM2-135M-Instruct, `--samples {samples} --seqlen {seqlen}`", "{goal}"),
                ("further flags", "{command}"),
                ("CPU minutes", "{cpu_minutes:.0f}"),
                ("peak GB of RAM", "{peak:.1f}"),
            ),
            durations,
            note="Peak RAM is that of the compression. The entropy-coded rows (all but `--coding fixed`) ran on a "
            "slower processor, with AVX2 alone. On {where}.",
        ),
    ),
    "whole_files": tuple(map(whole_files_of, (*EQUAL_FILES, "gemma-3-270m"))),
    "quantising_parts": (
        Table(
            "quantising_parts",
            f"{FOUR_BITS} --output benchmarks/results/quantising_parts.json --rows …",
            (
                ("SmolLM2-135M-Instruct", "{name}"),
                ("whole file, MB", "{megabytes:.1f}"),
                ("bytes per layer weight", "{bytes:.3f}"),
                ("*", "{percent[*]:.1f} %"),
                ("CPU minutes", "{cpu_minutes:.0f}"),
            ),
            parts,
            note="Off its grid; calibrated on {samples} × {seqlen} tokens of C4 unless it says more, with `--effort "
            "fast` unless it says trained. Perplexity increase on {max_tokens} tokens of each text, in windows of "
            "{window}, in {dtype}; mean and worst are those of the texts other than C4. Minutes are those of one "
            "thread beside other work. On {where}.",
        ),
    ),
    "overfitting": (
        overfitting_of("overfitting_SmolLM2-135M-Instruct", "fast"),
        overfitting_of("overfitting_balanced_SmolLM2-135M-Instruct", "balanced"),
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
