"""Write the tables of README.md and docs/ from the results, between the marks <!-- NAME --> and <!-- /NAME -->.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.record import geometric_mean

from hasslefree.reproduction.paper import TASKS
from hasslefree.reproduction.tables import log_mean, paper_order

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


# The texts of the reference model, and what they are called.
TEXTS = {"wiki.test.raw": "wikitext2", "ptb.test.txt": "ptb", "c4_sample.jsonl[700:]": "c4"}


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


def scaling() -> str:
    """The arithmetic of large models, with the rates that it assumes."""
    content = json.loads((RESULTS / "scaling.json").read_text())
    rows = [
        [
            f"{row['size']}, {row['order']}",
            str(row["processes"]),
            f"{row['gpu_gb']:.0f}",
            f"{row['ram_gb']:.0f}",
            f"{row['network_gb_a_block']:.1f}",
            *(f"{row['hours'][part]:.2f}" for part in ("solving", "forward and Grams", "network", "disk")),
            f"{sum(row['hours'].values()):.1f}",
        ]
        for row in content["rows"]
    ]
    heads = ["model, order", "GPUs", "GB a GPU", "GB of RAM", "GB sent a block"]
    heads += ["hours: solving", "forward, Grams", "network", "disk", "all"]
    rates = content["assumed"]
    return (
        f"{markdown(heads, rows)}\n\nAssumed: {rates['float32'] / 1e12:.0f} TFLOP/s for float32 products and "
        f"{rates['bfloat16'] / 1e12:.0f} for bfloat16 ones, {rates['network'] / 1e9:.0f} GB/s between processes, "
        f"{rates['disk'] / 1e9:.0f} GB/s from the disk. Arithmetic, not measured on a GPU."
    )


def streaming() -> str:
    """Peak memory and time of whole compressions of random weights."""
    content = json.loads((RESULTS / "streaming.json").read_text())
    rows = [
        [
            f"{row['blocks']}",
            f"{row['processes']}",
            f"{row['peak_mb']:,}",
            f"{row['planned_mb']:,}",
            f"{row['seconds']:.0f}",
        ]
        for row in content["rows"]
    ]
    table = markdown(["blocks", "processes", "peak MB", "as planned", "seconds"], rows)
    return f"{table}\n\nAn idle process has {content['idle_mb']:,} MB. On {where(content)}."


def reference() -> str:
    """One table for each setting of the reference model."""
    content = json.loads((RESULTS / "reference_model.json").read_text())
    tables = []
    for setting, results in content["results"].items():
        rows = []
        for method, row in results.items():
            cells = [method, *(f"{row['perplexity'][text]:.1f}" for text in TEXTS)]
            if method == "dense":
                cells += ["", "100 %", "", ""]
            else:
                cells += [f"{row['mean_relative_error']:.4f}", f"{row['kept_share']:.1%}".replace("%", " %")]
                cells += [f"{row['solver_seconds']:.0f}", f"{row['peak_mb']}"]
            rows.append(cells)
        pattern, rank = setting.split("/")
        heads = [f"{pattern} + rank {rank}", *TEXTS.values(), "relative error", "kept", "seconds", "peak MB"]
        tables.append(markdown(heads, rows))
    calibration = f"{content['samples']} × {content['seqlen']} tokens of C4"
    return "\n\n".join(tables) + f"\n\nCalibrated on {calibration}, seed {content['seed']}, on {where(content)}."


def gap() -> str:
    """What compression costs a model, on average over texts and over calibration seeds, and its ratios."""
    seeds = [json.loads(path.read_text())["results"] for path in sorted(RESULTS.glob("reference_seed*.json"))]
    rows = []
    for setting, runs in json.loads((RESULTS / "reference_model.json").read_text())["results"].items():
        dense = runs["dense"]
        joint, rival = ([log_excess(found[setting][m], dense) for found in seeds] for m in ("joint", "3basil"))
        pattern, rank = setting.split("/")
        cells = [f"{mean(joint):.4f}", f"{mean(rival):.4f}", f"{mean(joint) / mean(rival):.2f}"]
        cells.append(", ".join(f"{one / other:.2f}" for one, other in zip(joint, rival, strict=True)))
        cells.append(f"{log_excess(runs['joint'], dense) / log_excess(runs['hassle-free'], dense):.2f}")
        rows.append([f"{pattern} + rank {rank}", *cells])
    heads = ["gap", "joint", "3basil", "joint / 3basil", "by seed", "joint / hassle-free (seed 0)"]
    return f"{markdown(heads, rows)}\n\nMeans over {len(seeds)} seeds."


def log_excess(run: dict[str, Any], dense: dict[str, Any]) -> float:
    """The mean over texts of log(perplexity / dense)."""
    return mean([math.log(found / dense["perplexity"][text]) for text, found in run["perplexity"].items()])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def recorded() -> str:
    """Our relative error over the recorded one of the authors' code, like for like."""
    results = json.loads((RESULTS / "recorded.json").read_text())["results"]
    rows = []
    for method, problems in results.items():
        alike = [runs[-1] for runs in problems.values()]
        # The deterministic methods have recorded outputs too.
        distances = [run["relative_distance"] for run in alike if "relative_distance" in run]
        distance = f"{max(distances):.0e}" if distances else ""
        label = f"{method} / 3basil" if method.startswith("joint") else method
        rows.append([label, *spread([run["ratio"] for run in alike]), distance])
    rivals = [runs[-1]["recorded"] for runs in results["hassle-free"].values()]
    ours = [runs[-1]["relative_error"] for runs in results["joint"].values()]
    rows.append(["joint / hassle-free", *spread([a / b for a, b in zip(ours, rivals, strict=True)]), ""])
    return markdown(
        [f"ours / recorded, {len(ours)} layers", "mean", "least", "most", "largest distance of S + L"], rows
    )


def spread(ratios: list[float]) -> list[str]:
    """Geometric mean, least and most."""
    return [f"{value:.4f}" for value in (geometric_mean(ratios), min(ratios), max(ratios))]


# The order of the rows; JSON has that of the measurements.
METHODS = ["godec", "pcp", "oats", "hassle-free", "hassle-free, exact step", "eora", "3basil", "joint"]


def layers(stem: str) -> str:
    """The ends of the curves, and all of joint's: over 3basil on the same problem."""
    content = json.loads((RESULTS / f"{stem}.json").read_text())
    problems = list(content["problems"].values())
    rows = []
    for key in sorted(problems[0]["rows"], key=lambda key: METHODS.index(key.partition(" @ ")[0])):  # stable: by rounds
        if not key.startswith("joint") and not ends(key):
            continue
        cells = [label(key)]
        for synthetic in (False, True):
            mine = [p["rows"] for p in problems if (p["source"] == "synthetic") == synthetic]
            error, time = (
                [row[key][field] / row["3basil @ 2000"][field] for row in mine]
                for field in ("relative_error", "seconds")
            )
            cells += [f"{geometric_mean(error):.2f}", f"{max(error):.2f}", f"{geometric_mean(time):.2f}"]
        flops = [p["rows"][key]["flops"] / p["rows"]["3basil @ 2000"]["flops"] for p in problems]
        rows.append([*cells, f"{geometric_mean(flops):.2f}"])
    heads = ["over 3basil", "model: error", "most", "time", "synthetic: error", "most", "time", "FLOPs"]
    return f"{markdown(heads, rows)}\n\n{protocol(content)}"


def ends(key: str) -> bool:
    """Whether a row is the end of its curve: the rounds of the published method, or the default."""
    return key.partition(" @ ")[2] in ("", "80", "2000") or key == "joint @ 100"


def label(key: str) -> str:
    name, _, rounds = key.partition(" @ ")
    return f"{name}, {rounds} rounds" if rounds not in ("", "2000") else name


def protocol(content: dict[str, Any]) -> str:
    clock = ", processor time" if content["clock"] == "cpu" else ""
    return f"{len(content['problems'])} problems, seed {content['seed']}{clock}, on {where(content)}."


def rooms() -> str:
    """Every system on single layers, with the budget that it has: geometric means."""
    content = json.loads((RESULTS / "layers.json").read_text())
    found: dict[str, list[dict[str, Any]]] = {}
    for problem in content["problems"].values():
        for key in filter(ends, problem["rows"]):
            found.setdefault(f"support + rank: {label(key)}", []).append(problem["rows"][key])
        for name, row in problem["rooms"].items():
            found.setdefault(f"{row['room']}: {name}", []).append(row)
    fields = ("bytes_a_weight", "relative_error", "seconds")
    means = {
        name: [geometric_mean(row[field] for row in rows) for field in fields]
        for name, rows in found.items()
        if len(rows) == len(content["problems"])  # the groups of a grid may not suit every problem
    }
    cells = [
        [name, f"{size:.3f}", f"{error:.5f}", f"{seconds:.3f}"]
        for name, (size, error, seconds) in sorted(means.items(), key=lambda item: item[1][:2])
    ]
    heads = ["budget: system", "bytes a weight", "relative error", "seconds"]
    return f"{markdown(heads, cells)}\n\nGeometric means. {protocol(content)}"


def growth() -> str:
    """Seconds by size, and the exponent."""
    content = json.loads((RESULTS / "growth.json").read_text())
    rows = [[f"{r['size']}²", f"{r['seconds']:.2f}", f"{r['flops'] / r['seconds'] / 1e9:.0f}"] for r in content["rows"]]
    table = markdown(["size", "seconds", "GFLOPs a second"], rows)
    return f"{table}\n\nThe exponent of a power law is {content['exponent']:.2f}, on {where(content)}."


def faults() -> str:
    """How many ways to end a compression were tried, and how many lost nothing."""
    content = json.loads((RESULTS / "faults.json").read_text())
    kills = sum(name.startswith("SIGKILL") for name in content["results"])
    others = ", ".join(name for name in content["results"] if not name.startswith("SIGKILL"))
    return (
        f"{content['faults']} faults, {content['survived']} survived, seed {content['seed']}: {kills} × SIGKILL at "
        f"random moments, {others}. On {where(content)}."
    )


def levers(stem: str) -> str:
    """One table for each setting: what every lever wins, and what it costs; means over seeds."""
    content = json.loads((RESULTS / f"{stem}.json").read_text())
    texts = {name: TEXTS.get(name, Path(name).stem) for name in content["dense"]}
    tables = []
    for setting, variants in content["results"].items():
        base = over_seeds(variants["joint"], "gap")
        cells = []
        for name, seeds in variants.items():
            gaps = [row["gap"] for row in seeds.values()]
            spread = f" ({min(gaps):.4f} to {max(gaps):.4f})" if len(gaps) > 1 else ""
            perplexities = [mean([row["perplexity"][text] for row in seeds.values()]) for text in texts]
            figures = [f"{mean(gaps):.4f}{spread}", f"{mean(gaps) / base:.2f}"]
            figures += [f"{over_seeds(seeds, field):.0f}" for field in ("cpu_seconds", "peak_mb")]
            cells.append([name, *(f"{value:.1f}" for value in perplexities), *figures])
        dense = ["dense", *(f"{content['dense'][text]:.1f}" for text in texts), "", "", "", ""]
        heads = [setting, *texts.values(), "gap", "of joint's", "CPU seconds", "peak MB"]
        tables.append(markdown(heads, [dense, *cells]))
    protocol = f"{content['samples']} × {content['seqlen']} tokens, perplexity on {content['max_tokens']} tokens a text"
    seeds = "seed 0, or the mean over seeds from 0 on, with the least and the most"
    return "\n\n".join(tables) + f"\n\nCalibrated on {protocol}; {seeds}, on {where(content)}."


def systems() -> str:
    """Every system by the bytes that it takes."""
    content = json.loads((RESULTS / "systems.json").read_text())
    ordered = sorted(content["results"].items(), key=lambda item: (item[1]["bytes_a_weight"], item[1]["gap"]))
    rows = [
        [
            name,
            f"{row['bytes_a_weight']:.3f}",
            *(f"{row['perplexity'][text]:.1f}" for text in TEXTS),
            f"{row['gap']:.4f}",
            f"{row['mean_relative_error']:.4f}",
        ]
        for name, row in ordered
    ]
    dense = ["dense", "2.000", *(f"{content['dense'][text]:.1f}" for text in TEXTS), "", ""]
    table = markdown(["", "bytes a weight", *TEXTS.values(), "gap", "relative error"], [*rows, dense])
    protocol = f"{content['samples']} × {content['seqlen']} tokens, perplexity on {content['max_tokens']} tokens a text"
    return f"{table}\n\nCalibrated on {protocol}, seed {content['seed']}, on {where(content)}."


def efforts() -> str:
    """The gap, and time, of the three efforts and of rivals; and the ratios."""
    content = json.loads((RESULTS / "levers.json").read_text())
    ours = ["effort fast", "effort balanced", "effort best"]
    rivals = ["3basil", "3basil, published matching", "hassle-free"]
    rows = []
    for setting, variants in content["results"].items():
        gaps = {n: over_seeds(v, "gap") for n, v in variants.items()}
        cells = [
            f"{gaps[n]:.4f} ({over_seeds(variants[n], 'cpu_seconds'):.0f})" if n in gaps else ""
            for n in [*ours, *rivals]
        ]
        # Like for like: the seeds that both have.
        ratios = []
        for rival in rivals:
            common = variants["effort best"].keys() & variants.get(rival, {}).keys()
            best, other = (sum(variants[n][s]["gap"] for s in common) for n in ("effort best", rival))
            ratios.append(f"{best / other:.2f}" if common else "")
        rows.append([setting, *cells, *ratios])
    names = [name.removeprefix("effort ") for name in ours] + rivals
    heads = ["gap", *names, *(f"best / {name}" for name in rivals)]
    return f"{markdown(heads, rows)}\n\nSeeds as in docs/levers.md, on {where(content)}."


def learning_rates() -> str:
    """What is left of the error of blocks by the learning rate of matching, on every model."""
    content = json.loads((RESULTS / "learning_rates.json").read_text())
    models = content["models"]
    names = next(iter(models.values()))["ratios"]
    rows = [[name, *(f"{model['ratios'][name]['mean']:.3f}" for model in models.values())] for name in names]
    heads = ["learning rate", *(f"{name}, {model['blocks']} blocks" for name, model in models.items())]
    calibration = f"{content['samples']} × {content['seqlen']} tokens, an eighth of them judging"
    return f"{markdown(heads, rows)}\n\nCalibrated on {calibration}; seed {content['seed']}, on {where(content)}."


def over_seeds(seeds: dict[str, dict[str, Any]], field: str) -> float:
    """The mean of a field."""
    return mean([row[field] for row in seeds.values()])


def reproduction(name: str) -> str:
    """The tables of the paper on a small model, and where the paper's order of methods holds."""
    content = json.loads((RESULTS / f"reproduction_{name}.json").read_text())
    parts = []
    for table, rows in content["tables"].items():
        # Of the tasks the average, where they were measured.
        texts = [name for name in rows[0]["measured"] if name not in TASKS]
        # The paper's own texts, whatever was measured.
        printed = [text for text in rows[0]["paper"] if text in PAPER_TEXTS]
        cells = []
        for row in rows:
            line = [f"{row['setting']}: {row['method']}" if row["setting"] else "dense"]
            line += [f"{row['measured'][text]:.2f}" for text in texts]
            line += [f"{row['relative_error']:.4f}" if "relative_error" in row else ""]
            line += [f"{row['kept_share']:.1%}".replace("%", " %") if "kept_share" in row else ""]
            cells.append(line + [f"{row['paper'][text]:.2f}" if row["paper"] else "" for text in printed])
        heads = [f"table {table[-1]}", *texts, "relative error", "kept", *(f"paper: {text}" for text in printed)]
        parts.append(markdown(heads, cells))
    rounds = f"{content['rounds']} rounds of every method" if content["rounds"] else "each method's own rounds"
    calibration = f"{content['samples']} × {content['seqlen']} tokens, {rounds}"
    text = f"at most {content['max_tokens']:,} tokens of each text"
    if any(name in rows[0]["measured"] for name in TASKS):
        text += f"; average: of the table's zero-shot tasks, in per cent, {content['limit']} rows of each"
    parts.append(f"Calibrated on {calibration}; {text}. The paper's figures are those of {rows[0]['beside']}.")
    return "\n\n".join([*parts, order(content)])


# In the order of the paper's tables.
PAPER_TEXTS = ("c4", "wikitext2", "ptb")


def order(content: dict[str, Any]) -> str:
    """For pairs of methods, in how many settings the first is ahead: in the paper, and measured."""
    pairs: dict[tuple[str, str], list[int]] = {}
    best = [0, 0]
    for rows in content["tables"].values():
        for pair, counts in paper_order(rows).items():
            found = pairs.setdefault(pair, [0, 0, 0])
            pairs[pair] = [a + b for a, b in zip(found, counts, strict=True)]
        for joint in (row for row in rows if row["method"] == "joint"):
            rivals = [row for row in rows if row["config"] == joint["config"] and row is not joint]
            best[0] += all(log_mean(joint, "measured") < log_mean(row, "measured") for row in rivals)
            best[1] += 1
    cells = [[f"{one} before {other}", *map(str, counts)] for (one, other), counts in pairs.items()]
    table = markdown(["settings in which", "the paper has it so", "so here", "of"], cells)
    return f"{table}\n\n`joint` is before the others in {best[0]} of {best[1]} settings. On {where(content)}."


def figure1(name: str) -> str:
    """The relative error of each layer of one block, by method."""
    content = json.loads((RESULTS / f"reproduction_{name}.json").read_text())["figure1"]
    methods = list(content["errors"])
    rows = [
        [layer, *(f"{content['errors'][method][layer]:.4f}" for method in methods)]
        for layer in content["errors"][methods[0]]
    ]
    return markdown([f"block {content['block']}, {content['pattern']} + rank {content['rank']}", *methods], rows)


def inference() -> str:
    """Milliseconds of the packed and of the dense layer, and their ratio at every number of tokens."""
    content = json.loads((RESULTS / "inference.json").read_text())
    found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    dense = {}
    for row in content["rows"]:
        key = (f"{row['out']}×{row['in']}", row["dtype"], row["way"])
        (dense if row["way"] == "dense layer" else found).setdefault(key, {})[row["tokens"]] = row
    rows = []
    for (shape, dtype, way), by_tokens in found.items():
        base = dense[shape, dtype, "dense layer"]
        cells = [f"{shape}, {dtype}, {way}", f"{base[1]['milliseconds']:.2f}", f"{by_tokens[1]['milliseconds']:.2f}"]
        cells += [f"{by_tokens[1]['gigabytes_a_second']:.1f}"]
        rows.append(cells + [f"{1 / row['over_dense']:.2f}" for row in by_tokens.values()])
    heads = ["out×in", "dense, ms", "packed, ms", "GB/s", *(f"{count} tokens" for count in content["tokens"])]
    clock = "processor time of one thread" if content["clock"] == "cpu" else "wall time"
    plain = f"A plain read reaches {content['read_gigabytes_a_second']:.1f} GB/s; {clock}"
    return f"{markdown(heads, rows)}\n\n{plain}, {content['preemptions']} preemptions, on {where(content)}."


def loaded() -> str:
    """Memory of wide layers, and tokens a second of the embedded model."""
    content = json.loads((RESULTS / "loaded.json").read_text())
    memory = content["memory"]
    rows = [[r["model"], f"{r['tokens_a_second']:.0f}", f"{r['time_over_dense']:.2f}"] for r in content["generate"]]
    table = markdown(["the embedded model, one text at a time", "tokens a second", "time over dense"], rows)
    text = (
        f"{memory['blocks']} blocks of Llama-3-8B's shapes in bfloat16, loaded and used once, take "
        f"{memory['dense']:.0f} MB dense and {memory['packed']:.0f} MB with 2:4 + rank {content['rank']}: "
        f"{memory['packed_over_dense']:.3f} of it."
    )
    return f"{text}\n\n{table}\n\nOn {where(content)}."


# The one layer of a size that is really met; all methods are measured on smaller ones.
WIDEST = "joint 4096x14336 2:4"


def workspace() -> str:
    """Peak memory of every method, fitted over shapes: arrays of out × in and of in × in."""
    content = json.loads((RESULTS / "workspace.json").read_text())
    del content["rows"][WIDEST]
    rows: dict[str, list[list[float]]] = {}
    for row in content["rows"].values():
        arrays, squares = row["out"] * row["in"] * 4 / 1e6, row["in"] ** 2 * 4 / 1e6
        label = row["method"] + (", unstructured" if row["pattern"] == "unstructured" else "")
        rows.setdefault(label, []).append([arrays, squares, *(row[f] / 1e6 for f in ("prepare", "kept", "solve"))])
    cells = []
    for label, values in rows.items():
        prepare, kept = (max(v[field] / v[1] for v in values) for field in (2, 3))
        a, b = fit([v[:2] for v in values], [v[4] for v in values])
        cells.append([label, f"{prepare:.1f}", f"{kept:.1f}", f"{a:.1f}", f"{round(b, 1) + 0.0:.1f}"])
    heads = ["2:4 but where it says so", "prepare: in×in", "kept: in×in", "solve: out×in", "in×in"]
    shapes = ", ".join(dict.fromkeys(f"{row['out']}×{row['in']}" for row in content["rows"].values()))
    return f"{markdown(heads, cells)}\n\n{shapes}; rank {content['rank']} where there is one; on {where(content)}."


def quantised() -> str:
    """Error over plain rounding's, in the mean and at most, and the bits of a weight."""
    content = json.loads((RESULTS / "quantised.json").read_text())
    problems = list(content["problems"].values())
    cells = []
    for name in problems[0]:
        ratios = [rows[name]["relative_error"] / rows["rtn"]["relative_error"] for rows in problems]
        bits = mean([rows[name]["bits"] for rows in problems])
        seconds = mean([rows[name]["seconds"] for rows in problems])
        cells.append([name, f"{bits:.2f}", f"{geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{seconds:.2f}"])
    heads = [f"{content['grid']}; rank {content['rank']}", "bits", "error / rtn's", "most", "CPU seconds"]
    table = markdown(heads, cells)
    compared = []
    for other in ("2:4, then nearest", "2:4, then a second sweep"):
        over = [rows["2:4 in one sweep"]["relative_error"] / rows[other]["relative_error"] for rows in problems]
        compared.append(f"{geometric_mean(over):.3f} (at most {max(over):.3f})")
    return (
        f"{table}\n\nOne sweep over pruning first and rounding then: {compared[0]} of the error; over a second sweep, "
        f"{compared[1]}. Geometric means over {len(problems)} layers, on {where(content)}."
    )


def factors() -> str:
    """What rounding the factors adds to the loss, in the mean, for every way and method."""
    content = json.loads((RESULTS / "factors.json").read_text())
    losses = content["losses"]
    cells = [
        [way, scales, *(f"{100 * (geometric_mean(found[way]) - 1):.1f} %" for found in losses.values())]
        for way, scales in content["ways"].items()
    ]
    count = len(next(iter(next(iter(losses.values())).values())))
    table = markdown(["added to the loss", "scales", *losses], cells)
    return f"{table}\n\nGeometric means over {count} layers, rank {content['rank']}, on {where(content)}."


def widest() -> str:
    """What the widest layer that was measured takes in all."""
    content = json.loads((RESULTS / "workspace.json").read_text())
    row = content["rows"][WIDEST]
    both = 2 * row["out"] * row["in"] + 4 * row["in"] ** 2
    what = f"`{row['method']}` on {row['out']}×{row['in']}, {row['pattern']} + rank {row['rank']}"
    return (
        f"{what}: {row['peak'] / 1e9:.1f} GB at most, beside {both / 1e9:.1f} GB of W (bfloat16) and H. "
        f"On {where(content)}."
    )


def fit(points: list[list[float]], values: list[float]) -> list[float]:
    """a and b of a·x + b·y by least squares."""
    matrix = torch.tensor(points, dtype=torch.float64)
    found: list[float] = torch.linalg.lstsq(matrix, torch.tensor(values, dtype=torch.float64)).solution.tolist()
    return found


def where(content: dict[str, Any]) -> str:
    machine = content["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    return f"{machine['processor']}, {threads}, torch {machine['torch']}, transformers {machine['transformers']}"


# Page → its tables.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "demo": demo,
        "layers": lambda: layers("layers"),
        "reference": reference,
        "gap": gap,
        "efforts": efforts,
        "recorded": recorded,
    },
    "docs/joint.md": {"layers_full": lambda: layers("layers_full"), "growth": growth},
    "docs/levers.md": {
        "levers": lambda: levers("levers"),
        "levers_demo": lambda: levers("levers_demo"),
        "learning_rates": learning_rates,
    },
    "docs/scaling.md": {"scaling": scaling, "streaming": streaming, "faults": faults, "widest": widest},
    "docs/numerics.md": {"workspace": workspace},
    "docs/quantised.md": {"quantised": quantised, "factors": factors},
    "docs/unified.md": {"systems": systems, "rooms": rooms},
    "docs/reproduction.md": {
        f"{table}_{name}": partial(make, name)
        for name in ("embedded", "reference")
        for table, make in {"reproduction": reproduction, "figure1": figure1}.items()
    },
    "docs/inference.md": {"inference": inference, "loaded": loaded},
}


def filled(page: str, text: str) -> str:
    """The text of a page with every table made anew."""
    for name, make in PAGES[page].items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{make()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(page, path.read_text(encoding="utf-8")), encoding="utf-8")
