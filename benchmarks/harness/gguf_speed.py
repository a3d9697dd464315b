"""Tokens per second of GGUF files in llama.cpp, in turns, in an environment that need not hold hasslefree.

    PYTHON benchmarks/harness/gguf_speed.py EXPORT DENSE WORK < REQUEST > ANSWER

EXPORT has model.gguf and, with a rank, adapter.gguf; DENSE is a GGUF file in bfloat16, of which llama.cpp makes its own
`type`. REQUEST is {"type": name, "prompt": [token id, …], "count": tokens of a turn, "turns": …, "threads": …}, and
ANSWER {"versions": {package: version}, "files": {name: {"bytes": …, "seconds": [of each turn]}}}.

Each turn evaluates the prompt, which does not count, and then `count` tokens, the likeliest ones. The seconds are those
of the processor, summed over the threads. The order of the files is reversed from turn to turn.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy
from engines import without_repacking
from gguf_types import quantised


def opened(file: Path, adapter: Path | None, request: dict[str, Any]) -> llama_cpp.Llama:
    threads = {"n_threads": request["threads"], "n_threads_batch": request["threads"]}
    length = len(request["prompt"]) + request["count"] + 1
    return llama_cpp.Llama(str(file), lora_path=adapter and str(adapter), n_ctx=length, verbose=False, **threads)


def seconds(model: llama_cpp.Llama, request: dict[str, Any]) -> float:
    """Of one turn."""
    model.reset()
    model.eval(request["prompt"])
    start = time.process_time()
    for _ in range(request["count"]):
        logits = numpy.ctypeslib.as_array(model._ctx.get_logits_ith(-1), (model.n_vocab(),))
        model.eval([int(logits.argmax())])
    return time.process_time() - start


def main() -> None:
    # llama.cpp 0.3.36 of llama-cpp-python fails with Q4_1 and with Q4_K_M where it repacks weights for AMX.
    module = llama_cpp.llama_cpp
    module.llama_model_default_params = without_repacking(module.llama_model_default_params)
    export, dense, work, request = *map(Path, sys.argv[1:4]), json.load(sys.stdin)
    base, adapter, kind = export / "model.gguf", export / "adapter.gguf", request["type"]
    own = quantised(dense, work / f"{kind}.gguf", kind)
    files: dict[str, tuple[Path, Path | None]] = {"base": (base, None), kind: (own, None)}
    if adapter.exists():
        files = {"base + adapter": (base, adapter), **files}
    models = {name: opened(*each, request) for name, each in files.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():  # once, to fill the caches
        seconds(model, request | {"count": 2})
    for turn in range(request["turns"]):
        for name in list(models)[:: -1 if turn % 2 else 1]:
            found[name].append(seconds(models[name], request))
    sizes = {name: sum(file.stat().st_size for file in each if file) for name, each in files.items()}
    answer = {name: {"bytes": sizes[name], "seconds": found[name]} for name in files}
    versions = {name: importlib.metadata.version(name) for name in ("llama-cpp-python", "gguf")}
    print(json.dumps({"versions": versions, "files": answer}))


if __name__ == "__main__":
    main()
