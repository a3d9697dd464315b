"""The pictures of the documentation, from what benchmarks/results holds: nothing is measured.

    python benchmarks/pictures.py [NAME …]

NAME is that of a picture in docs, such as results/whole_files; without one, all are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.record import ROOT, mean
from harness.styles import BYTES, HASSLEFREE, LOSS, Groups, Point, Style, canvas, chart, finish, plot, save, style_of
from layers import means
from tables.choices import EQUAL_FILES, RIVALS, percentages
from tables.engine import Content, load
from tables.models import in_percent
from tables.real import TOKENS, gap_of

MODEL = "SmolLM2-135M-Instruct"
QWEN = "Qwen2.5-Coder-0.5B"
# The rows of whole_files_MODEL.json in the picture with which README begins, and the label of each.
OURS = {
    "3.54bits, balanced, entropy-coded": "--size 3.54bits",
    "4.3bits, balanced, entropy-coded": "--size 4.3bits",
    "4.6bits, balanced, entropy-coded": "--size 4.6bits",
    "5.2bits, balanced, entropy-coded": "default",
    "105MB, balanced, entropy-coded": "--size 105MB",
}
FIXED = {
    "4.3bits, best": "--size 4.3bits, best",
    "5.2bits, balanced": "default size",
    "105MB, balanced": "--size 105MB",
}
LLAMA_CPP = {f"llama.cpp {kind}, matrix": kind for kind in ("IQ3_M", "IQ4_XS", "Q3_K_M", "Q4_K_M", "Q5_K_M")}
# How the names of our rows in two_four.json begin.
EFFORTS = ("fast", "balanced", "best", "an hour")


def first_seeds(name: str) -> Content:
    """By name, the first seed of every row of a result file."""
    return {row: next(iter(seeds.values())) for row, seeds in load(name)["results"].items()}


def whole_files() -> Any:
    """The loss on unseen kinds of text against the size of the file, in letters that a phone can show."""
    rows = first_seeds(f"whole_files_{MODEL}")
    names = ("hasslefree", "hasslefree, --coding fixed", "llama.cpp, importance matrix")
    groups: Groups = {name: [] for name in names}
    for (group, points), labels in zip(groups.items(), (OURS, FIXED, LLAMA_CPP), strict=True):
        for name in [name for name in labels if name in rows]:
            increase = in_percent(rows[name]["unseen"])
            point = Point(rows[name]["file_bytes"] / 1e6, increase, labels[name], style_of(group))
            points.append(replace(point, filled=labels is not FIXED))
    figure, axes = canvas(6, 4)
    axes.set_ylim(0, 1.4 * max(point.y for points in groups.values() for point in points))
    axes.margins(x=0.19)
    title = "At equal file size, hasslefree loses less"
    x, y = "whole file, MB: all weights, embeddings included", "perplexity increase on unseen kinds of text, %"
    chart(axes, groups, (title, MODEL, x, y), joined=names[:2], letters=9, legend="upper right")
    return figure


def equal_files() -> Any:
    """The loss on each unseen kind of text, for each model in files of one size."""
    figure, panels = canvas(9, 3.9, len(EQUAL_FILES))
    places = ("WikiText-2", "Penn\nTreebank", "code", "conver-\nsation", "German")
    texts = ("wikitext2", "ptb", "code", "conversation", "german")
    for axes, (model, ours) in zip(panels, EQUAL_FILES.items(), strict=True):
        rows = first_seeds(f"whole_files_{model}")
        without, with_matrix = RIVALS
        shown = {without: "Q4_K_M", with_matrix: "Q4_K_M, matrix", next(iter(ours)): "hasslefree"}
        for name, label in shown.items():
            style = HASSLEFREE if label == "hasslefree" else style_of("llama.cpp")
            increases = percentages(rows[name])
            points = [Point(place, increases[text], "", style, name != without) for place, text in enumerate(texts)]
            plot(axes, points, name=label)
        axes.axhline(0, color="black", linewidth=0.5)
        finish(axes, model.removesuffix("-Instruct"), f"{rows[without]['file_bytes'] / 1e6:.0f} MB", "", "")
        axes.set_xticks(range(len(texts)), places, fontsize=8)
    panels[0].set_ylabel("perplexity increase, %")
    panels[0].legend(fontsize=8, loc="upper left")
    figure.suptitle(
        "In files of the size of llama.cpp's Q4_K_M, hasslefree loses less on almost every text",
        fontsize=10,
        fontweight="bold",
    )
    return figure


def frontier() -> Any:
    """The loss of every pattern and rank against bytes."""
    rows = first_seeds("frontier")
    dense = rows.pop("dense")["perplexity"]
    groups: Groups = {}
    for name, row in sorted(rows.items(), key=lambda item: item[1]["bytes_a_weight"]):
        pattern = name.partition(" + ")[0]
        style = Style(f"C{pattern[0]}", HASSLEFREE.marker)
        increase = in_percent(gap_of(row["perplexity"], dense))
        point = Point(row["bytes_a_weight"], increase, name.replace("rank ", ""), style)
        groups.setdefault(pattern, []).append(point)
    figure, axes = canvas(7, 5)
    axes.axvline(2, color="black", linewidth=1, linestyle="--")
    axes.annotate("dense: 2 bytes", (2, 100), rotation=90, ha="right", va="center", fontsize=8)
    note = f"{MODEL}, effort fast; labels: pattern + rank"
    title = "Pruned weights: 4:8 loses less than 2:4 in the same bytes"
    chart(axes, groups, (title, note, BYTES, LOSS), joined=groups, yscale="log")
    return figure


def four_bits() -> Any:
    """The loss of quantised rows, ours and of other programs, against bytes."""
    groups: Groups = {}
    for name, row in first_seeds("four_bits").items():
        if name in ("dense", "llama.cpp Q8_0"):
            continue
        sized = ", dealt, " in name
        text = name.replace(", dealt", "").replace(" in 8 bits", " (int8)")
        group = "hasslefree, bits chosen by layer" if sized else "hasslefree, the same bits in every layer"
        if row["program"]:
            group, text = row["program"], row["label"]
        filled = sized or bool(row["program"])
        point = Point(row["bytes_a_weight"], in_percent(row["gap"]), text, style_of(group), filled)
        groups.setdefault(group, []).append(point)
    figure, axes = canvas(8, 5.5)
    axes.margins(x=0.15, y=0.1)
    note = f"{MODEL}; embeddings not counted; Q8_0, at 1.06 bytes, is outside"
    title = "Quantised weights: bits chosen by layer lose least in the same bytes"
    ticks = {"xticks": [0.5, 0.55, 0.6, 0.65, 0.7], "yticks": [3, 5, 10, 20, 40]}
    chart(axes, groups, (title, note, BYTES, LOSS), legend="upper right", xscale="log", yscale="log", **ticks)
    return figure


def two_four() -> Any:
    """The loss of the efforts and of published methods against CPU minutes; bars are the range over draws."""
    results = load("two_four")["results"]
    dense = next(iter(results.pop("dense").values()))["perplexity"]
    groups: Groups = {"rank 16": [], "rank 30 in 8 bits": [], "published": []}
    figure, axes = canvas(8, 5)
    for name, seeds in results.items():
        if name.endswith(TOKENS):
            continue
        gaps = [gap_of(row["perplexity"], dense) for row in seeds.values()]
        increase = in_percent(mean(gaps))
        minutes = mean(row["cpu_seconds"] for row in seeds.values()) / 60
        effort, _, coded = name.partition(", ")
        if effort not in EFFORTS:
            groups["published"].append(Point(minutes, increase, name, style_of(name)))
            continue
        axes.vlines(minutes, in_percent(min(gaps)), in_percent(max(gaps)), color=HASSLEFREE.colour, linewidth=3)
        group = "rank 30 in 8 bits" if coded else "rank 16"
        label = f"{'60 minutes' if effort == 'an hour' else effort}, {group}"
        groups[group].append(Point(minutes, increase, label, filled=bool(coded)))
    axes.margins(x=0.2)
    note = f"{MODEL}, 2:4, 1.22 bytes a weight, sparsegpt 1.13; bars: draws"
    title = "At 2:4, balanced loses less than every published method"
    names = title, note, "CPU minutes of the whole compression", LOSS
    ticks = {"xticks": [5, 10, 20, 30, 60, 120], "yticks": [20, 30, 50, 100, 200, 300]}
    joined = ("rank 16", "rank 30 in 8 bits")
    chart(axes, groups, names, joined=joined, letters=9, xscale="log", yscale="log", **ticks)
    return figure


def systems() -> Any:
    """The loss of every method, in a line each, by the bytes that it takes."""
    content = load("systems")
    rows = sorted(content["results"].items(), key=lambda item: (-round(item[1]["bytes_a_weight"], 2), -item[1]["gap"]))
    sizes = [f"{row['bytes_a_weight']:.3f}" for _, row in rows]
    figure, axes = canvas(7, 6.5)
    for height, (name, row) in enumerate(rows):
        plot(axes, [Point(in_percent(row["gap"]), height, "", style_of(name))])
        if sizes[height] != sizes[height - 1]:
            axes.axhline(height - 0.5, color="black", linewidth=0.5)
    names = [f"{name}    {size}" for (name, _), size in zip(rows, sizes, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xscale="log", ylim=(-0.6, len(rows) - 0.4))
    note = f"blue: ours; {content['model']}, 5.5 M parameters"
    title = "Pruned weights: joint loses least in the same bytes"
    finish(axes, title, note, LOSS, f"method, and {BYTES.partition(':')[0]}")
    return figure


def layers_full() -> Any:
    """The error of methods on single layers against their time, both over 3basil's; labels are rounds."""
    content = load("layers_full")
    groups: Groups = {}
    for key, (error, seconds) in means(content).items():
        name, _, rounds = key.partition(" @ ")
        point = Point(seconds, error, rounds.replace("2000", "to its end"), style_of(name))
        groups.setdefault(name, []).append(point)
    figure, axes = canvas(7, 5)
    note = f"{len(content['problems'])} single layers, geometric means; labels: rounds"
    title = "joint has the smallest error, in a fraction of the time of 3basil"
    ticks = {"xticks": [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], "yticks": [0.5, 1, 2, 4]}
    names = title, note, "time / time of 3basil", "relative error / that of 3basil"
    chart(axes, groups, names, joined=groups, legend="center left", xscale="log", yscale="log", **ticks)
    return figure


def inference() -> Any:
    """The speed of packed layers over that of dense ones, on a processor without AMX and on one with it."""
    figure, panels = canvas(9, 3.9, 3)
    shown = [("inference", "float32"), ("inference", "bfloat16"), ("inference_amx", "bfloat16")]
    for axes, (file, dtype) in zip(panels, shown, strict=True):
        content = load(file)
        curves: dict[str, list[Content]] = {}
        for row in content["rows"]:
            if row["way"] != "dense layer" and row["dtype"] == dtype:
                curves.setdefault(f"{row['out']}×{row['in']}", []).append(row)
        for line, (shape, rows) in zip(("-", "--", ":", "-."), curves.items(), strict=False):
            speeds = [1 / row["over_dense"] for row in rows]
            axes.plot([row["tokens"] for row in rows], speeds, f"o{line}", color=HASSLEFREE.colour, label=shape)
        axes.axhline(1, color="black", linewidth=1)
        axes.annotate("dense layer", (content["tokens"][0], 0.98), va="top", fontsize=8)
        axes.set(xscale="log", ylim=(0, 3.3))
        finish(axes, f"{dtype}, {'AMX' if file == 'inference_amx' else 'no AMX'}", "", "tokens at once", "")
        counts = [count for count in content["tokens"] if count != 12]  # beside 16
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.legend(fontsize=8, title="out×in", title_fontsize=8)
    panels[0].set_ylabel("speed / speed of the dense layer")
    title = "On a CPU without AMX, packed layers (2:4 + rank 64) are mostly faster than dense ones"
    figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure


def layer_errors(found: Content) -> Any:
    """Figure 1 of the paper. found: the model, block, pattern, rank, and the errors by method and layer."""
    errors: dict[str, dict[str, float]] = found["errors"]
    layers = list(next(iter(errors.values())))
    best = min(errors, key=lambda method: sum(errors[method].values()))
    wins = sum(errors[best][layer] == min(each[layer] for each in errors.values()) for layer in layers)
    groups: Groups = {
        method: [Point(place, values[layer], "", style_of(method)) for place, layer in enumerate(layers)]
        for method, values in errors.items()
    }
    figure, axes = canvas(7, 4)
    axes.set_xticks(range(len(layers)), layers)
    setting = f"{Path(found['model']).name} model, block {found['block']}, {found['pattern']} + rank {found['rank']}"
    title = f"{best} has the smallest error in {wins} of {len(layers)} layers"
    chart(axes, groups, (title, setting, "", "relative error"), legend="best", yscale="log")
    return figure


def energies() -> Any:
    """The norm of the first token of a segment, and of the others, before each block and after the last."""
    rows = load("energies")["rows"]
    figure, axes = canvas(7, 3.7)
    axes.plot([row["first"] for row in rows], "o-", color="#D55E00", markersize=3, label="first token of a segment")
    axes.plot([row["others"] for row in rows], "s-", color="#000000", markersize=3, label="other tokens")
    axes.set_yscale("log")
    title = "From block 12 on, the state of the first token is far larger: an attention sink"
    finish(axes, title, MODEL, "block that the hidden states enter", "median norm of the hidden states")
    axes.legend()
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "results/whole_files": whole_files,
    "results/equal_files": equal_files,
    "results/frontier": frontier,
    "results/four_bits": four_bits,
    "results/two_four": two_four,
    "results/systems": systems,
    "results/layers_full": layers_full,
    "results/inference": inference,
    "results/figure1_embedded": lambda: layer_errors(load("reproduction_embedded")["figure1"] | {"model": "demo"}),
    "results/figure1_reference": lambda: layer_errors(load("reproduction_reference")["figure1"]),
    "results/figure1_qwen": lambda: layer_errors(load("reproduction_qwen")["figure1"] | {"model": QWEN}),
    "explanation/energies": energies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names
    if unknown := set(names) - PICTURES.keys():
        parser.error(f"no picture is named {min(unknown)}; known: {', '.join(PICTURES)}")
    for name in names or PICTURES:
        save(PICTURES[name](), ROOT / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
