"""The tables of what running takes: memory, time, large models, faults, and the packed layer's speed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tables.engine import Content, Row, Table, where

# The one layer of a size that is really met; all methods are measured on smaller ones.
WIDEST = "joint 4096x14336 2:4"
WORKSPACE = "python benchmarks/memory.py layer"
INFERENCE = "python benchmarks/inference.py"

# The commands of the fault benchmark; python stands for calls of the library.
HOSTILE_COMMANDS = (
    "compress", "plan", "inspect", "evaluate", "generate", "chat", "export", "report", "methods", "demo", "python"
)  # fmt: skip


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


def scaling(content: Content) -> Iterable[Row]:
    """Hours in all, and those of the simulation, where there is one."""
    for row in content["rows"]:
        simulated = row["simulated_solving"]
        hours = f"{sum(simulated.values()):.2f}" if simulated else ""
        yield row | {"total": sum(row["hours"].values()), "simulated": hours}


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


def generation(content: Content) -> Iterable[Row]:
    """The ways of each model; memory was not measured where a model is loaded twice."""
    for model, rows in content["models"].items():
        for row in rows:
            yield {"megabytes": None, **row, "model": model}


def backends(content: Content) -> Iterable[Row]:
    """The dense model, and the compressed one by each backend."""
    for row in content["generate"]:
        setting, _, backend = row["model"].rpartition(", ")
        yield row | {"name": f"{setting}, backend `{backend}`" if setting else backend}


def written_faster(content: Content) -> Row:
    """The packed model beside the dense one, where the model is a real one."""
    found = {row["way"]: row for row in content["models"]["smollm2"]}
    return found["packed"] | {"dense": found["dense"]["megabytes"]}


def writing(file: str) -> Table:
    """The table of what models write and read, from results of one machine."""
    return Table(
        file,
        f"{INFERENCE} generate --output benchmarks/results/{file}.json",
        (
            ("{model}", "{way}"),
            ("tokens per second", "{tokens_a_second:.1f}"),
            ("decode speed vs dense", "{tokens_over_dense:.2f}"),
            ("seconds for a prompt", "{prompt_seconds:.2f}"),
            ("prompt speed vs dense", "{prompt_over_dense:.2f}"),
            ("MB loaded", "{megabytes:.0f}"),
        ),
        generation,
        split="model",
        note="One text at a time, in bfloat16; prompts of {prompt} tokens; {clock} clock. On {where}.",
    )


def faults(content: Content) -> Row:
    """How many ways to end a compression were tried."""
    others = [name for name in content["results"] if not name.startswith("SIGKILL")]
    return {"kills": len(content["results"]) - len(others), "others": ", ".join(others)}


FAULTY = {
    "traceback": "a traceback",
    "killed": "a process that was killed",
    "bounds": "no end, or too much memory",
    "file": "a file lost or changed",
    "lost": "work that cannot be resumed",
    "control": "control characters",
    "exit": "another exit code than promised",
    "message": "a message that is too long or missing",
}


def hostile_cells(content: Content, label: str) -> Iterable[tuple[str, str, list[str]]]:
    """Kind, command and what did not hold, for every cell that ran both before and after."""
    before = content["cells"]["before"]
    for kind, rows in content["cells"]["after"].items():
        for what, row in rows.items():
            for command in row.keys() & before.get(kind, {}).get(what, {}).keys():
                yield kind, command, content["cells"][label][kind][what][command]


def hostile(content: Content) -> Iterable[Row]:
    """By kind and command, how many cells held before and after, and of how many."""
    held: dict[str, dict[str, dict[str, list[bool]]]] = {}
    for label in ("before", "after"):
        for kind, command, wrong in hostile_cells(content, label):
            for row in (kind, "all"):
                for column in (command, "all"):
                    cell = held.setdefault(row, {}).setdefault(column, {"before": [], "after": []})
                    cell[label].append(not wrong)
    commands = [command for command in (*HOSTILE_COMMANDS, "all") if command in held["all"]]
    for kind in [*(kind for kind in held if kind != "all"), "all"]:
        cells = {command: held[kind].get(command) for command in commands}
        yield {
            "kind": kind,
            "held": {
                command: cell and f"{sum(cell['before'])} → {sum(cell['after'])} of {len(cell['after'])}"
                for command, cell in cells.items()
            },
        }


def failures(content: Content) -> Iterable[Row]:
    """How many cells showed each failure, before and after."""
    found = {label: list(hostile_cells(content, label)) for label in ("before", "after")}
    for word, name in FAULTY.items():
        counts = {
            label: sum(any(text.startswith(word) for text in wrong) for _, _, wrong in cells)
            for label, cells in found.items()
        }
        yield {"failure": name, **counts}


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
            ("* tokens", "{speed[*]:.2f}"),
        ),
        inference,
        note="A plain read reaches {read_gigabytes_a_second:.1f} GB/s; {time}, {preemptions} preemptions, on {where}.",
        facts=lambda content: {"time": "processor time of one thread" if content["clock"] == "cpu" else "wall time"},
    )


def simulated(content: Content) -> Iterable[Row]:
    """By effort, the minutes of each kind of work."""
    for effort, found in content["results"].items():
        minutes = {work: sum(kinds.values()) / 60 for work, kinds in found["seconds"].items()}
        rest = sum(minutes.get(work, 0.0) for work in ("forward passes", "packing and writing", "first look"))
        named = ("Grams", "solving", "allocation", "prediction matching")
        works = {"forward passes": rest} | {
            work.replace("Grams", "Gram matrices"): minutes.get(work, 0.0) for work in named
        }
        yield {"effort": effort, "minutes": found["minutes"], "works": works, "peak": found["peak_over_estimate"]}


def dropped(content: Content) -> Row:
    """What a simulated effort contains that is no longer part of it."""
    seconds = {effort: found["seconds"].get("block matching", {}) for effort, found in content["results"].items()}
    gone = {effort: sum(kinds.values()) / 60 for effort, kinds in seconds.items() if kinds}
    words = " `{}` includes {:.1f} minutes of block matching, which is no longer part of it."
    return {"dropped": "".join(words.format(*item) for item in gone.items())}


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
        more = None if first else f"{row['loss_increase']:+.3f} ± {row['standard_error']:.3f}"
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
    "gpu_simulated": (
        Table(
            "gpu_simulated",
            "python benchmarks/gpu_simulated.py",
            (
                ("effort", "{effort}"),
                ("minutes", "{minutes:.1f}"),
                ("*", "{works[*]:.2f}"),
                ("peak memory / estimate of `plan`", "{peak:.2f}"),
            ),
            simulated,
            note="Simulated with torch {machine[torch]}; nothing ran on a GPU.{dropped}",
            facts=dropped,
        ),
    ),
    "gpu_kernels": (
        Table(
            "gpu_kernels",
            "python benchmarks/gpu_kernels.py",
            (
                ("", "{architecture}"),
                ("pattern", "{pattern}"),
                ("tokens", "{tokens}"),
                ("registers", "{registers}"),
                ("spilled bytes", "{spilled_bytes}"),
                ("packed bytes per instruction", "{bytes_an_instruction:.2f}"),
            ),
            note="Triton {triton}; compiled, not run.",
        ),
    ),
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
    "scaling": (
        Table(
            "scaling",
            "python benchmarks/memory.py large",
            (
                ("model, order", "{size}, {order}"),
                ("GPUs", "{processes}"),
                ("GB per GPU", "{gpu_gb:.0f}"),
                ("GB of RAM", "{ram_gb:.0f}"),
                ("GB sent per block", "{network_gb_a_block:.1f}"),
                ("hours: solving, 20 rounds", "{hours[solving]:.2f}"),
                ("solving, simulated", "{simulated}"),
                ("solving, 100 rounds", "{solving_longer:.2f}"),
                ("forward, Gram matrices", "{hours[forward and Grams]:.2f}"),
                ("network", "{hours[network]:.2f}"),
                ("disk", "{hours[disk]:.2f}"),
                ("all", "{total:.1f}"),
            ),
            scaling,
            note="Assumed: {tera[float32]:.0f} TFLOP/s for all products of solvers and {tera[bfloat16]:.0f} for those "
            "of forward passes, {giga[network]:.0f} GB/s between processes, {giga[disk]:.0f} GB/s from the disk. "
            "Simulated: the real solver with the rates of the simulation above, and up to eight GPUs connected by "
            "NVLink ({link[nvlink]:.0f} GB/s, {wait[nvlink]:.0f} µs per exchange), and more than eight by a network "
            "({link[network]:.0f} GB/s, {wait[network]:.0f} µs). Arithmetic, not measured on a GPU.",
            facts=lambda content: {
                "tera": {name: rate / 1e12 for name, rate in content["assumed"].items()},
                "giga": {name: rate / 1e9 for name, rate in content["assumed"].items()},
                "link": {name: rate / 1e9 for name, rate in content["links"].items()},
                "wait": {name: seconds * 1e6 for name, seconds in content["latency"].items()},
            },
        ),
    ),
    "faults": (
        Table(
            "faults",
            "python benchmarks/faults.py endings",
            note="{faults} faults, {survived} survived, seed {seed}: {kills} × SIGKILL at random moments, {others}. "
            "On {where}.",
            facts=faults,
        ),
    ),
    "hostile": (
        Table(
            "faults",
            "python benchmarks/faults.py cells",
            (("", "{kind}"), ("*", "{held[*]}")),
            hostile,
        ),
    ),
    "hostile_failures": (
        Table(
            "faults",
            "python benchmarks/faults.py cells",
            (("cells with", "{failure}"), ("before", "{before}"), ("after", "{after}")),
            failures,
        ),
    ),
    "hostile_cost": (
        Table(
            "faults",
            "python benchmarks/faults.py cost",
            (("processor seconds", "{command}"), ("before", "{before:.2f}"), ("after", "{after:.2f}")),
            lambda content: [{"command": name, **content["seconds"][name]} for name in ("--help", "compress")],
            note="Medians of {seconds[times]} processes each, in turn, on {where}.",
        ),
    ),
    "inference": (products("inference"),),
    "inference_amx": (products("inference_amx"),),
    "generation": (writing("generation"),),
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
    "generation_one_thread": (writing("generation_one_thread"),),
    "generation_four_bits": (writing("generation_four_bits"),),
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
            "python benchmarks/elsewhere.py speed NAME=FOLDER… --template FILE --python PYTHON",
            (
                ("{model}", "{file}"),
                ("MB", "{megabytes:.0f}"),
                ("tokens per second", "{tokens_per_second:.1f}"),
                ("speed / {rival}'s", "{over_rival:.2f}"),
            ),
            lambda content: [row | {"megabytes": row["bytes"] / 1e6} for row in content["speed"]],
            split="model",
            note="On {date}, llama-cpp-python {versions[llama-cpp-python]}, {turns} turns of {new_tokens} tokens, seed "
            "{seed}; processor time. On {where}.",
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
                ("loss over BF16, nats per token", "{more}"),
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
