"""The tables of a real language model, of families of models, and of a small mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.record import geometric_mean, mean
from tables.engine import Content, Row, Table, load
from tables.models import MODEL, in_percent, named, over_seeds


def measured(content: Content, names: Iterable[str]) -> Iterable[Row]:
    """These rows of a real model, means over their seeds."""
    results = content["results"]
    dense = next(iter(results["dense"].values()))["perplexity"]
    for name in names:
        seeds = results[name]
        texts = {text: mean(row["perplexity"][text] for row in seeds.values()) for text in dense}
        found: Row = {"name": name, "perplexity": named(texts), "seeds": len(seeds)}
        found |= dict.fromkeys(["gap", "increase", "bytes", "cpu_seconds"]) | {"spread": ""}
        if name != "dense":
            gaps = [gap_of(row["perplexity"], dense) for row in seeds.values()]
            found |= {"gap": mean(gaps), "increase": in_percent(mean(gaps))}
            found["bytes"] = over_seeds(seeds, "bytes_a_weight")
            found["by_text"] = named({text: 100 * (texts[text] / dense[text] - 1) for text in dense})
            if len(gaps) > 1:
                found["spread"] = f" ({in_percent(min(gaps)):.0f} to {in_percent(max(gaps)):.0f})"
        if all("cpu_seconds" in row for row in seeds.values()):
            found["cpu_seconds"] = over_seeds(seeds, "cpu_seconds")
        yield found


def gap_of(perplexity: dict[str, float], dense: dict[str, float]) -> float:
    """The mean over the texts of log(perplexity / dense perplexity)."""
    return mean(math.log(perplexity[text] / dense[text]) for text in dense)


# The flags of rows at 2:4 + rank 16.
FLAGS = {
    "fast": "`--effort fast`",
    "balanced": "`--effort balanced`",
    "best": "`--effort best`",
    "an hour": "`--minutes 60`",
    "an hour, 8-bit factors, mixture": "`--rank 30 --factor-bits 8 --minutes 60`, more text",
    "hassle-free, exact step": "`--method hassle-free --low-rank exact`",
    "sparsegpt": "`--method sparsegpt --rank 0`",
    **{
        f"{effort}, 8-bit factors": f"`--rank 30 --factor-bits 8 --effort {effort}`"
        for effort in ("fast", "balanced", "best")
    },
}
TRUSTED = ", correlations trusted"
# The end of the names of rows by the tokens of prediction matching.
TOKENS = "thousand tokens"


def at_two_four(content: Content) -> Iterable[Row]:
    """The efforts at 2:4 and the published methods, by their loss."""
    names = [name for name in content["results"] if name != "dense" and not name.endswith(TOKENS)]
    for row in sorted(measured(content, names), key=lambda row: row["gap"]):
        flags = FLAGS.get(row["name"], f"`--method {row['name']}`")
        yield row | {"flags": flags, "minutes": row["cpu_seconds"] / 60}


def by_tokens(content: Content) -> Iterable[Row]:
    """What `best` reaches on a mixture of texts, by the tokens that it trained on."""
    names = [name for name in content["results"] if name.endswith((TOKENS, ", mixture"))]
    rows = []
    for row in measured(content, names):
        [found] = content["results"][row["name"]].values()
        flags = "`--minutes 60`" if row["name"].startswith("an hour") else "`--effort best`"
        rows.append(row | {"flags": flags, "tokens": found["training"]["tokens"], "minutes": row["cpu_seconds"] / 60})
    return sorted(rows, key=lambda row: row["minutes"])


def on_few_tokens(content: Content) -> Iterable[Row]:
    """Each effort, with correlations shrunk and with all of them trusted."""
    for row in measured(content, [name for name in content["results"] if name != "dense"]):
        name = row["name"].removesuffix(TRUSTED)
        error = over_seeds(content["results"][row["name"]], "mean_relative_error")
        yield row | {"flags": FLAGS[name], "shrunk": "yes" if name == row["name"] else "no", "error": error}


def ablations(content: Content) -> Iterable[Row]:
    """Rows of about equal CPU seconds, without and with a part of `best`."""
    return measured(content, content["results"])


def allocations(content: Content) -> Iterable[Row]:
    """Budgets moved by the estimated and by the exact divergence of every layer, against none moved."""
    [dense] = load("real_model")["results"]["dense"].values()
    uniform = content["results"]["uniform"]
    for name, row in content["results"].items():
        cost = None if name == "uniform" else row["allocation_seconds"] / uniform["seconds"]
        increase = in_percent(gap_of(row["perplexity"], dense["perplexity"]))
        yield {"name": name, "perplexity": named(row["perplexity"]), "increase": increase, "cost": cost}


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
        perplexity = mean(value for row in seeds.values() for value in row["perplexity"].values())
        found: Row = {"perplexity": perplexity} | dict.fromkeys(["increase", "least", "most"])
        if name != "dense":
            found |= {"increase": in_percent(mean(gaps))}
            found |= {"least": in_percent(min(gaps)), "most": in_percent(max(gaps))}
        yield name, found


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
    "SmolLM2-135M-Instruct, calibrated on {samples} × {seqlen} tokens of C4; perplexity in windows of {window} tokens, "
    "{max_tokens} tokens per text; on {where}."
)

MIXTURE_NOTE = (
    "Means over three seeds, with the smallest and the largest value; segments of {seqlen} tokens, on {where}."
)
MIXTURE = (
    ("perplexity", "{perplexity:.2f}"),
    ("perplexity increase", "{increase:.2f} %"),
    ("smallest", "{least:.2f} %"),
    ("largest", "{most:.2f} %"),
)

TABLES: dict[str, tuple[Table, ...]] = {
    "two_four": (
        Table(
            "two_four",
            f"python benchmarks/real_model.py two-four {MODEL}",
            (
                ("2:4 + rank 16", "{flags}"),
                ("bytes per weight", "{bytes:.3f}"),
                ("perplexity increase: *", "{by_text[*]:.0f} %"),
                ("all three", "{increase:.0f} %{spread}"),
                ("CPU minutes", "{minutes:.1f}"),
            ),
            at_two_four,
            note=REAL_NOTE,
        ),
    ),
    "training_tokens": (
        Table(
            "two_four",
            f"python benchmarks/real_model.py two-four {MODEL} --mixture TEXT:SHARE% …",
            (
                ("2:4 + rank 30 in 8 bits", "{flags}"),
                ("tokens of training", "{tokens:,}"),
                ("perplexity increase: *", "{by_text[*]:.1f} %"),
                ("all three", "{increase:.1f} %"),
                ("CPU minutes", "{minutes:.0f}"),
            ),
            by_tokens,
            note="SmolLM2-135M-Instruct, calibrated on {samples} × {seqlen} tokens of 40 % C4 and 60 % English news, "
            "speeches and web pages, and trained on more of it; perplexity in windows of {window} tokens, {max_tokens} "
            "tokens per text; on {where}.",
        ),
    ),
    "two_four_few": (
        Table(
            "two_four_few",
            f"python benchmarks/real_model.py two-four {MODEL} --samples 8 --output "
            "benchmarks/results/two_four_few.json",
            (
                ("2:4", "{flags}"),
                ("shrunk", "{shrunk}"),
                ("relative error on the calibration text", "{error:.4f}"),
                ("perplexity increase: *", "{by_text[*]:.0f} %"),
            ),
            on_few_tokens,
            note="{model}, calibrated on {samples} × {seqlen} tokens of C4; perplexity in windows of {window} tokens, "
            "{max_tokens} tokens per text; on {where}.",
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
                ("perplexity increase", "{increase:.1f} %{spread}"),
            ),
            ablations,
            note=REAL_NOTE,
        ),
    ),
    "allocations": (
        Table(
            "sensitivity",
            f"python benchmarks/real_model.py sensitivity {MODEL}",
            (
                ("allocation", "{name}"),
                ("*", "{perplexity[*]:.2f}"),
                ("perplexity increase", "{increase:.1f} %"),
                ("seconds of the allocation / `fast`", "{cost:.2f}"),
            ),
            allocations,
            note="Estimated KL divided by the exact KL, over {layers} layers: geometric mean {ratio:.2f}; for four "
            "fifths of the layers between {low:.2f} and {high:.2f}. The exact KL is that of {probed} tokens. "
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
                ("below dense", "{lost:.1f}"),
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
