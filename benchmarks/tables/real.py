"""The tables of a real language model, of families of models, and of a small mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.record import geometric_mean, mean
from tables.engine import Content, Row, Table, load
from tables.models import MODEL, named, over_seeds


def measured(content: Content, names: Iterable[str]) -> Iterable[Row]:
    """These rows of a real model, means over their seeds; times over those of `fast`."""
    results = content["results"]
    dense = next(iter(results["dense"].values()))["perplexity"]
    for name in names:
        seeds = results[name]
        texts = {text: mean(row["perplexity"][text] for row in seeds.values()) for text in dense}
        found: Row = {"name": name, "perplexity": named(texts), "seeds": len(seeds)}
        found |= dict.fromkeys(["gap", "bytes", "seconds", "over_fast"]) | {"spread": ""}
        if name != "dense":
            gaps = [gap_of(row["perplexity"], dense) for row in seeds.values()]
            found |= {"gap": mean(gaps), "bytes": over_seeds(seeds, "bytes_a_weight")}
            found["spread"] = f" ({min(gaps):.3f} to {max(gaps):.3f})" if len(gaps) > 1 else ""
        # Some were measured beside other work: their times mean nothing.
        timed, fast = (
            [row["seconds"] for row in each.values() if "seconds" in row] for each in (seeds, results.get("fast", {}))
        )
        if timed and fast:
            found |= {"seconds": mean(timed), "over_fast": mean(timed) / mean(fast)}
        yield found


def gap_of(perplexity: dict[str, float], dense: dict[str, float]) -> float:
    """The mean over the texts of log(perplexity / dense perplexity)."""
    return mean(math.log(perplexity[text] / dense[text]) for text in dense)


def real_model(content: Content) -> Iterable[Row]:
    """The dense model, layers alone, and the published methods."""
    return measured(content, [name for name in content["results"] if name not in ("balanced", "best")])


def two_four(content: Content) -> Iterable[Row]:
    """The efforts at 2:4, and what lies between them, by the seconds of one thread."""
    results = content["results"]
    for row in measured(content, results):
        if row["name"] == "dense":
            yield row | {"cpu_seconds": None, "over_fast": None}
            continue
        [seconds, fast] = (over_seeds(results[name], "cpu_seconds") for name in (row["name"], "fast"))
        yield row | {"cpu_seconds": seconds, "over_fast": seconds / fast}


def ablations(content: Content) -> Iterable[Row]:
    """Rows of about equal CPU seconds, without and with a part of `best`."""
    for row in measured(content, content["results"]):
        seeds = content["results"][row["name"]]
        seconds = None if row["name"] == "dense" else over_seeds(seeds, "cpu_seconds")
        yield row | {"cpu_seconds": seconds}


def allocations(content: Content) -> Iterable[Row]:
    """Budgets moved by the estimated and by the exact divergence of every layer, against none moved."""
    [dense] = load("real_model")["results"]["dense"].values()
    uniform = content["results"]["uniform"]
    for name, row in content["results"].items():
        cost = None if name == "uniform" else row["allocation_seconds"] / uniform["seconds"]
        gap = gap_of(row["perplexity"], dense["perplexity"])
        yield {"name": name, "perplexity": named(row["perplexity"]), "gap": gap, "cost": cost}


def estimates(content: Content) -> Row:
    """The estimated over the exact divergence of a layer: the geometric mean, and between which it is for 80 %."""
    estimated, exact = (content["results"][name]["sensitivities"] for name in ("estimate", "exact"))
    ratios = sorted(estimated[layer] / exact[layer] for layer in exact)
    tenth = len(ratios) // 10
    return {
        "layers": len(ratios),
        "ratio": geometric_mean(ratios),
        "low": ratios[tenth],
        "high": ratios[-1 - tenth],
        "probed": content["probes"] * content["seqlen"],
    }


def zero_shot(content: Content) -> Iterable[Row]:
    """The accuracy of the rows that were asked, task by task, and on average; and what share of it each loses."""
    results = {name: next(iter(seeds.values())) for name, seeds in content["results"].items()}
    asked = {name: row["tasks"] for name, row in results.items() if "tasks" in row}
    averages = {name: mean(task["value"] for task in tasks.values()) for name, tasks in asked.items()}
    for name, tasks in asked.items():
        errors = [task[f"{task['metric']}_stderr"] for task in tasks.values()]
        yield {
            "name": name,
            "tasks": {task: 100 * found["value"] for task, found in tasks.items()},
            "average": 100 * averages[name],
            "error": 100 * math.hypot(*errors) / len(errors),
            "lost": None if name == "dense" else 100 * (averages["dense"] - averages[name]),
        }


def mixture_methods(content: Content) -> Iterable[Row]:
    """A trained mixture by the method."""
    for name, row in mixture(content):
        yield row | {"name": name}


def mixture(content: Content) -> Iterable[tuple[str, Row]]:
    """Every row of a trained mixture: means over seeds."""
    [dense] = content["results"]["dense"].values()
    for name, seeds in content["results"].items():
        gaps = [gap_of(row["perplexity"], dense["perplexity"]) for row in seeds.values()]
        yield (
            name,
            {
                "perplexity": mean(value for row in seeds.values() for value in row["perplexity"].values()),
                "gap": mean(gaps) if name != "dense" else None,
                "least": min(gaps) if name != "dense" else None,
                "most": max(gaps) if name != "dense" else None,
            },
        )


def experts(content: Content) -> Iterable[Row]:
    """Milliseconds of a block of experts in every way, and the packed ones over transformers' eager ones."""
    for row in content["rows"]:
        found = row["milliseconds"]
        yield row | {"over_eager": found["packed"] / found["eager"]}


# What the message says where a model is refused because it is no decoder of text alone.
ENCODERS = ("is not a decoder", "when it reads text")


# An outcome in families.json, and on the page.
OUTCOMES = {"compresses": "compresses", "not built": "not tested", "refused": "rejected"}


def families(content: Content) -> Iterable[Row]:
    """By what becomes of them: how many families, and which."""
    found: dict[str, list[str]] = {}
    for name, row in content["results"].items():
        encodes = any(words in row.get("error", "") for words in ENCODERS)
        kind = (
            "rejected: an encoder, or the decoder of one" if encodes else OUTCOMES.get(row["outcome"], row["outcome"])
        )
        found.setdefault(kind, []).append(name)
    for outcome, names in sorted(found.items(), key=lambda item: -len(item[1])):
        yield {"outcome": outcome, "count": len(names), "names": ", ".join(names)}


def family_counts(content: Content) -> Row:
    """How many families there are, how many of them compress, and how many are refused as encoders."""
    outcomes = [row["outcome"] for row in content["results"].values()]
    counts = {words: outcomes.count(kind) for words, kind in (("compress", "compresses"), ("unbuilt", "not built"))}
    refused, others = outcomes.count("refused"), (row for row in families(content) if row["outcome"] == "rejected")
    return counts | {"total": len(outcomes), "refused": refused, "encoders": refused - next(others)["count"]}


REAL_NOTE = (
    "{model}, calibrated on {samples} × {seqlen} tokens of C4; perplexity in windows of {window} tokens, {max_tokens} "
    "tokens per text; on {where}."
)

MIXTURE_NOTE = "Means over three seeds, with the smallest and the largest gap; segments of {seqlen} tokens, on {where}."
MIXTURE = (
    ("perplexity", "{perplexity:.2f}"),
    ("gap", "{gap:.4f}"),
    ("min gap", "{least:.4f}"),
    ("max gap", "{most:.4f}"),
)

TABLES: dict[str, tuple[Table, ...]] = {
    "real_model": (
        Table(
            "real_model",
            f"python benchmarks/real_model.py rows {MODEL}",
            (
                ("2:4 + rank 16", "{name}"),
                ("*", "{perplexity[*]:.2f}"),
                ("gap", "{gap:.3f}{spread}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("seconds", "{seconds:.0f}"),
                ("seconds / `fast`", "{over_fast:.1f}"),
            ),
            real_model,
            note=REAL_NOTE,
        ),
    ),
    "two_four": (
        Table(
            "two_four",
            f"python benchmarks/real_model.py two-four {MODEL}",
            (
                ("2:4 + rank 16", "{name}"),
                ("*", "{perplexity[*]:.2f}"),
                ("gap", "{gap:.3f}{spread}"),
                ("CPU seconds", "{cpu_seconds:.0f}"),
                ("seconds / `fast`", "{over_fast:.2f}"),
            ),
            two_four,
            note=REAL_NOTE,
        ),
    ),
    "ablations": (
        Table(
            "ablations",
            f"python benchmarks/real_model.py ablations {MODEL}",
            (
                ("2:4 + rank 16", "{name}"),
                ("CPU seconds", "{cpu_seconds:.0f}"),
                ("*", "{perplexity[*]:.2f}"),
                ("gap", "{gap:.3f}{spread}"),
            ),
            ablations,
            note="SmolLM2-135M-Instruct, calibrated on {samples} × {seqlen} tokens of C4; perplexity in windows of "
            "{window} tokens, {max_tokens} tokens per text; on {where}.",
        ),
    ),
    "allocations": (
        Table(
            "sensitivity",
            f"python benchmarks/real_model.py sensitivity {MODEL}",
            (
                ("allocation", "{name}"),
                ("*", "{perplexity[*]:.2f}"),
                ("gap", "{gap:.3f}"),
                ("seconds of the allocation / `fast`", "{cost:.2f}"),
            ),
            allocations,
            note="Estimate divided by the exact divergence, over {layers} layers: geometric mean {ratio:.2f}; for four "
            "fifths of the layers between {low:.2f} and {high:.2f}. The exact divergence is that of {probed} tokens. "
            + REAL_NOTE,
            facts=estimates,
        ),
    ),
    "families_counted": (
        Table(
            "families",
            "python benchmarks/families.py",
            note="Of the {total} families that transformers {machine[transformers]} lists for causal language models, "
            "{compress} passed this test: a tiny model with random weights was compressed, saved and loaded again, and "
            "gave the same output as before. {refused} were rejected, {encoders} of them as encoders, and "
            "{unbuilt} could not be tested, because the test script cannot build a small version of them "
            "([the list](docs/results/appendix.md#families-of-models)).",
            facts=family_counts,
        ),
    ),
    "families": (
        Table(
            "families",
            "python benchmarks/families.py",
            (("outcome", "{outcome}"), ("families", "{count}"), ("", "{names}")),
            families,
            note="On {where}.",
        ),
    ),
    "zero_shot": (
        Table(
            "real_model",
            f"python benchmarks/real_model.py rows {MODEL} --tasks FOLDER",
            (
                ("2:4 + rank 16", "{name}"),
                ("*", "{tasks[*]:.1f}"),
                ("average", "{average:.1f}"),
                ("standard error", "{error:.1f}"),
                ("lost", "{lost:.1f}"),
            ),
            zero_shot,
            note="Per cent correct of the first 200 questions of each task, zero-shot, with lm-evaluation-harness; on "
            "{where}.",
        ),
    ),
    "experts": (
        Table(
            "experts",
            "python benchmarks/experts.py",
            (
                ("tokens", "{tokens}"),
                ("*", "{milliseconds[*]:.1f}"),
                ("packed / eager", "{over_eager:.2f}"),
            ),
            experts,
            note="Milliseconds of {experts} experts, {chosen} per token, in bfloat16, 2:4 + rank 64; on {where}.",
        ),
    ),
    "mixture_methods": (
        Table(
            "mixture",
            f"python benchmarks/models.py mixture {MODEL}",
            (("", "{name}"), *MIXTURE),
            mixture_methods,
            note=MIXTURE_NOTE,
        ),
    ),
}
