"""The tables of what running takes: memory, time, and the speed of packed layers and of other engines."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tables.engine import Content, Row, Table, load, where
from tables.models import in_percent

# The one layer of a size that is really met; all methods are measured on smaller ones.
WIDEST = "joint 4096x14336 2:4"
WORKSPACE = "python benchmarks/memory.py layer"
INFERENCE = "python benchmarks/inference.py"


def small(content: Content) -> list[Row]:
    return [row for key, row in content["rows"].items() if key != WIDEST]


def workspace(content: Content) -> Iterable[Row]:
    """Peak memory of every method, fitted over shapes: arrays of out × in and of in × in."""
    found: dict[str, list[list[float]]] = {}
    for row in small(content):
        arrays, squares = row["out"] * row["in"] * 4 / 1e6, row["in"] ** 2 * 4 / 1e6
        name = row["method"] + (", unstructured" if row["pattern"] == "unstructured" else "")
        measured = (row[field] / 1e6 for field in ("prepare", "kept", "solve"))
        found.setdefault(name, []).append([arrays, squares, *measured])
    for name, values in found.items():
        prepare, kept = (max(v[field] / v[1] for v in values) for field in (2, 3))
        large, square = fit([v[:2] for v in values], [v[4] for v in values])
        # A rounded −0.0 becomes 0.0.
        yield {"name": name, "prepare": prepare, "kept": kept, "large": large, "square": round(square, 1) + 0.0}


def fit(points: list[list[float]], values: list[float]) -> list[float]:
    """a and b of a·x + b·y by least squares."""
    found: list[float] = np.linalg.lstsq(np.array(points), np.array(values), rcond=None)[0].tolist()
    return found


def widest(content: Content) -> Row:
    """What the widest layer that was measured takes in all."""
    row = content["rows"][WIDEST]
    return {
        "row": row,
        "peak_gb": row["peak"] / 1e9,
        "given_gb": (2 * row["out"] * row["in"] + 4 * row["in"] ** 2) / 1e9,
    }


def inference(content: Content) -> Iterable[Row]:
    """Milliseconds of the packed and of the dense layer, and their ratio at every number of tokens."""
    found: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in content["rows"]:
        found.setdefault((f"{row['out']}×{row['in']}", row["dtype"], row["way"]), {})[row["tokens"]] = row
    for (shape, dtype, way), by_tokens in found.items():
        if way != "dense layer":
            yield {
                "layer": f"{shape}, {dtype}, {way}",
                "dense": found[shape, dtype, "dense layer"][1]["milliseconds"],
                "packed": by_tokens[1]["milliseconds"],
                "rate": by_tokens[1]["gigabytes_a_second"],
                "speed": {tokens: 1 / row["over_dense"] for tokens, row in by_tokens.items()},
            }


# Of each result file, the flags of the folders by their model; {label} is what the file says. Prompts ran otherwise at
# the time of the last one.
WRITERS = {
    "generation_quantised": {
        "SmolLM2-135M-Instruct": "SmolLM2-135M: `--coding fixed`",
        "Qwen2.5-Coder-0.5B-Instruct": "Qwen2.5-Coder-0.5B: `--coding fixed`",
        "random": "Llama-3.2-1B, random: 5 bits everywhere",
    },
    "generation_quantised_two_threads": {"SmolLM2-135M-Instruct": "SmolLM2-135M: `--coding fixed`"},
    "generation_pruned_quantised": {
        "SmolLM2-135M-Instruct": "SmolLM2-135M: `--pattern 2:4 --bits 6 --rank 96 --factor-bits 8`"
    },
    "generation_patterns": {"SmolLM2-135M-Instruct": "SmolLM2-135M: {label}"},
    "generation_avx2": {"SmolLM2-135M-Instruct": "SmolLM2-135M: {label}"},
    "generation_avx2_alone": {"SmolLM2-135M-Instruct": "SmolLM2-135M: {label}"},
    "generation_float32": {"SmolLM2-135M-Instruct": "SmolLM2-135M in float32: {label}"},
    "generation": {"smollm2": "SmolLM2-135M: `--pattern 2:4 --rank 16`"},
    "generation_one_thread": {
        "smollm2": "SmolLM2-135M: `--pattern 2:4 --rank 16`",
        "random": "Llama-3.2-1B, random: `--pattern 2:4 --rank 64`",
    },
    "generation_four_bits": {
        "smollm2": "SmolLM2-135M: `--bits 4 --rank 16`",
        "random": "Llama-3.2-1B, random: `--bits 4 --rank 16`",
    },
}


# Labels in result files, and the flags that make these folders since codes are entropy-coded by default.
FORMER = {
    "`--size 5.2bits`": "`--coding fixed`",
    "`--size 3.54bits --coding entropy`": "`--size 3.54bits`",
}


def generation(_content: Content) -> Iterable[Row]:
    """The compressed models of all files, each next to the dense one of the same run."""
    for file, flags in WRITERS.items():
        found = load(file)
        cpu = f"{found['machine']['processor']}, {found['machine']['threads']}"
        if "instructions" in found:
            cpu += f", only {found['instructions']}"
        for model, (dense, *ways) in found["models"].items():
            folder, _, label = model.partition(", ")
            label = FORMER.get(label, label)
            for way in ways:
                row = {"megabytes": None, **way, "dense": dense, "cpu": cpu, "flags": flags[folder].format(label=label)}
                if way["way"] == "unpacked":
                    row["flags"] += ", unpacked"
                if file == "generation_four_bits":
                    row["prompt_over_dense"] = None
                if "4 blocks" not in model:
                    yield row


def backends(content: Content) -> Iterable[Row]:
    """The dense model, and the compressed one by each backend."""
    for row in content["generate"]:
        setting, _, backend = row["model"].rpartition(", ")
        yield row | {"name": f"{setting}, backend `{backend}`" if setting else backend}


def faster(content: Content) -> Iterable[Row]:
    """The packed way of each model, and our GGUF file, over the dense one."""
    for model, (dense, packed) in content["models"].items():
        memory = packed["megabytes"] / dense["megabytes"]
        flags = WRITERS["generation_quantised"][model.partition(",")[0]]
        yield packed | {"engine": "transformers", "memory": memory, "model": flags.partition(":")[0]}
    own = own_gguf()
    yield {
        "engine": "llama.cpp",
        "model": own["model"].partition("-Instruct")[0],
        "tokens_over_dense": own["over_dense"],
        "prompt_over_dense": None,
        "memory": own["bytes_over_dense"],
    }


def own_gguf() -> Row:
    """The speed of our GGUF file."""
    [row] = [row for row in load("elsewhere")["speed"] if row["file"] == "hasslefree"]
    return row | {"megabytes": row["bytes"] / 1e6}


def written_faster(content: Content) -> Row:
    """The packed model beside the dense one, where the model is a real one."""
    found = {row["way"]: row for row in content["models"]["smollm2"]}
    return found["packed"] | {"dense": found["dense"]["megabytes"]}


def products(file: str) -> Table:
    """The table of products of one layer, from results of one machine."""
    return Table(
        file,
        f"{INFERENCE} products --output benchmarks/results/{file}.json",
        (
            ("out×in", "{layer}"),
            ("dense, ms", "{dense:.2f}"),
            ("packed, ms", "{packed:.2f}"),
            ("GB/s", "{rate:.1f}"),
            ("tokens: *", "{speed[*]:.2f}"),
        ),
        inference,
        note="A plain read reaches {read_gigabytes_a_second:.1f} GB/s; {time}, {preemptions} preemptions, on {where}.",
        facts=lambda content: {"time": "processor time of one thread" if content["clock"] == "cpu" else "wall time"},
    )


def elsewhere(content: Content) -> Iterable[Row]:
    """What every engine made of an export, or why it could not."""
    for row in content["rows"]:
        versions = ", ".join(f"{name} {version}" for name, version in row.get("versions", {}).items())
        if "error" in row:
            yield row | {"same": row["error"], "versions": versions, "gap": None, "apart": None}
        else:
            same = f"{row['same']} of {row['prompts']}, {row['new_tokens']} tokens each"
            apart = row.get("largest_difference")
            yield row | {"same": same, "versions": versions, "gap": row["widest_gap"], "apart": apart}


def gguf(content: Content) -> Iterable[Row]:
    """Each type of GGUF, with the loss over that of the first type, from which it is made."""
    firsts: dict[str, str] = {}
    for row in content["rows"]:
        first = firsts.setdefault(row["model"], row["type"]) == row["type"]
        more = None if first else f"{in_percent(row['loss_increase']):.1f} % ± {100 * row['standard_error']:.1f} %"
        yield row | {"megabytes": row["bytes"] / 1e6, "more": more, "same": None if first else row["same"]}


def profile(content: Content) -> Iterable[Row]:
    """Shares of the time, one token before a prompt."""
    return sorted(content["rows"], key=lambda row: row["what"] != "one token")


def serving(content: Content) -> Iterable[Row]:
    """Every folder that was served; the tensor-parallel size as a number alone."""
    for name, row in content["results"].items():
        yield row | {"name": name.replace(" ranks", "")}


def served(content: Content) -> Row:
    """The versions in vLLM's environment, and what came through the server."""
    rows = content["results"].values()
    asked = [row["served_is_same"] for row in rows if "served_is_same" in row]
    return {
        "versions": next(iter(rows))["versions"],
        "served": f"Through the OpenAI-compatible server, {sum(asked)} of {len(asked)} prompts got the same tokens.",
    }


TABLES: dict[str, tuple[Table, ...]] = {
    "workspace": (
        Table(
            "workspace",
            WORKSPACE,
            (
                ("2:4 unless the row names a pattern", "{name}"),
                ("prepare: in×in", "{prepare:.1f}"),
                ("kept: in×in", "{kept:.1f}"),
                ("solve: out×in", "{large:.1f}"),
                ("in×in", "{square:.1f}"),
            ),
            workspace,
            note="{shapes}; rank {rank} where there is one; on {where}.",
            facts=lambda content: {
                "shapes": ", ".join(dict.fromkeys(f"{row['out']}×{row['in']}" for row in small(content)))
            },
        ),
    ),
    "widest": (
        Table(
            "workspace",
            f"{WORKSPACE} --methods joint --shapes 4096x14336",
            note="`{row[method]}` on {row[out]}×{row[in]}, {row[pattern]} + rank {row[rank]}: {peak_gb:.1f} GB at "
            "most, in addition to {given_gb:.1f} GB of W (bfloat16) and H. On {where}.",
            facts=widest,
        ),
    ),
    "streaming": (
        Table(
            "streaming",
            "python benchmarks/memory.py compression",
            (
                ("blocks", "{blocks}"),
                ("processes", "{processes}"),
                ("peak MB", "{peak_mb:,}"),
                ("as planned", "{planned_mb:,}"),
                ("planned / peak", "{planned_over_peak:.2f}"),
                ("seconds", "{seconds:.0f}"),
            ),
            note="An idle process has {idle_mb:,} MB. On {where}.",
        ),
    ),
    "inference": (products("inference"),),
    "inference_amx": (products("inference_amx"),),
    "generation": (
        Table(
            "generation",
            f"{INFERENCE} generate --output benchmarks/results/generation.json",
            (
                ("model: flags", "{flags}"),
                ("CPU, threads", "{cpu}"),
                ("tokens per second", "{tokens_a_second:.1f}"),
                ("of the dense model", "{dense[tokens_a_second]:.1f}"),
                ("decode speed / dense", "{tokens_over_dense:.2f}"),
                ("prompt speed / dense", "{prompt_over_dense:.2f}"),
                ("MB loaded", "{megabytes:.0f}"),
                ("of the dense model", "{dense[megabytes]:.0f}"),
            ),
            generation,
            note="One text at a time, in bfloat16 unless the row names float32; prompts of {prompt} tokens; "
            "torch {machine[torch]}, transformers "
            "{machine[transformers]}. One thread: processor time; two threads: wall time.",
        ),
    ),
    "written_faster": (
        Table(
            "generation",
            f"{INFERENCE} generate --output benchmarks/results/generation.json",
            note="SmolLM2-135M at 2:4 + rank 16 generates text {tokens_over_dense:.2f} times as fast as the dense "
            "model, processes prompts at {prompt_over_dense:.2f} times the dense model's speed, and uses "
            "{megabytes:.0f} MB of memory instead of {dense:.0f} MB. We measured this in bfloat16 on a CPU without AMX "
            "({where}).",
            facts=written_faster,
        ),
    ),
    "quantised_faster": (
        Table(
            "generation_quantised",
            f"{INFERENCE} generate --output benchmarks/results/generation_quantised.json",
            (
                ("engine", "{engine}"),
                ("model", "{model}"),
                ("tokens per second / dense", "{tokens_over_dense:.2f}"),
                ("prompt speed / dense", "{prompt_over_dense:.2f}"),
                ("memory / dense", "{memory:.2f}"),
            ),
            faster,
            note="Each next to the dense model in bfloat16 in the same engine. In transformers, the real models have "
            "5.2 bits and `--coding fixed`, and the random one the shapes of Llama-3.2-1B and 5 bits; prompts have "
            "{prompt} tokens. The GGUF file has {gguf[megabytes]:.0f} MB, which are counted as memory, and generates "
            "text at {gguf[over_rival]:.2f} times the speed of llama.cpp's Q4_K_M. On {where}, a CPU without AMX.",
            facts=lambda _content: {"gguf": own_gguf()},
        ),
    ),
    "loaded": (
        Table(
            "loaded",
            f"{INFERENCE} models",
            (
                ("the demo model, one text at a time", "{name}"),
                ("tokens per second", "{tokens_a_second:.0f}"),
                ("time / dense model's", "{time_over_dense:.2f}"),
            ),
            backends,
            lead="{memory[blocks]} blocks of Llama-3-8B's shapes in bfloat16, loaded and used once, take "
            "{memory[dense]:.0f} MB dense and {memory[packed]:.0f} MB with 2:4 + rank {rank}: "
            "{memory[packed_over_dense]:.3f} of it.",
            note="On {where}.",
        ),
    ),
    "elsewhere": (
        Table(
            "elsewhere",
            "python benchmarks/elsewhere.py tokens NAME=FOLDER… --engines ENGINE=PYTHON…",
            (
                ("model", "{model}"),
                ("engine", "{engine}"),
                ("export", "{form}"),
                ("the same text", "{same}"),
                ("widest logit margin", "{gap:.4f}"),
                ("log-probabilities differ by", "{apart:.1g}"),
                ("versions", "{versions}"),
            ),
            elsewhere,
            note="On {date}, by the compressed model on {where}. Widest logit margin: between the two "
            "largest logits of the compressed model, at the first token that differs. Log-probabilities: the largest "
            "difference over the 20 likeliest tokens after each prompt, if it was measured.",
        ),
    ),
    "gguf_speed": (
        Table(
            "elsewhere",
            "python benchmarks/elsewhere.py speed NAME=FOLDER… --dense FOLDER --llama FOLDER --converter FOLDER",
            (
                ("{model}", "{file}"),
                ("MB", "{megabytes:.0f}"),
                ("tokens per second", "{tokens_per_second:.1f}"),
                ("speed / {rival}'s", "{over_rival:.2f}"),
            ),
            lambda content: [row | {"megabytes": row["bytes"] / 1e6} for row in content["speed"]],
            split="model",
            note="On {date}, {turns} turns of {new_tokens} tokens, seed {seed}; processor time. On {where}.",
            facts=lambda content: {**content["speed"][0], "where": where(content["speed"][0])},
        ),
    ),
    "gguf": (
        Table(
            "gguf",
            "python benchmarks/elsewhere.py gguf NAME=FOLDER… --python PYTHON --converter FOLDER",
            (
                ("model", "{model}"),
                ("type", "{type}"),
                ("MB", "{megabytes:.0f}"),
                ("perplexity", "{perplexity:.2f}"),
                ("perplexity increase over BF16", "{more}"),
                ("same likeliest token as BF16", "{same:.1%}"),
            ),
            gguf,
            note="On {date}, with llama-cpp-python {versions[llama-cpp-python]}, {texts} texts of 256 tokens; ± is the "
            "standard error over the texts.",
            facts=lambda content: {key: content["rows"][0][key] for key in ("versions", "texts")},
        ),
    ),
    "profile": (
        Table(
            "profile",
            f"{INFERENCE} profile MODEL FOLDER",
            (
                ("{model}", "{what}, {way}"),
                ("ms", "{milliseconds:.1f}"),
                ("*", "{share[*]:.0%}"),
            ),
            profile,
            note="By `generate`, in bfloat16; processor time of one thread. On {where}.",
        ),
    ),
    "served": (
        Table(
            "vllm",
            "python benchmarks/vllm_tokens.py FOLDER… --vllm PYTHON",
            (
                ("folder, tensor-parallel size, dtype", "{name}"),
                ("prompts with the same tokens", "{same} of {prompts}"),
                ("other tokens", "{other_tokens} of {tokens}"),
                ("largest logit deficit", "{largest_gap:.2g}"),
            ),
            serving,
            note="{prompt_tokens} tokens per prompt, {new_tokens} new ones; vLLM {versions[vllm]} with transformers "
            "{versions[transformers]}. {served} On {where}.",
            facts=served,
        ),
    ),
}
