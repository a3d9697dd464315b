"""Loss of a checkpoint in llama.cpp's own quantisations, in an environment that need not hold hasslefree.

    PYTHON benchmarks/harness/gguf_types.py FOLDER WORK < REQUEST > ANSWER

REQUEST is {"texts": [[token id, …], …], "types": [name, …], "converter": folder of llama.cpp's scripts}. A type is one
of llama.cpp's `LLAMA_FTYPE_MOSTLY_…`; the converter writes the first, and the others are quantised from its file.

ANSWER is {"versions": {package: version}, "types": {name: {"bytes": of the file, "tensors": {type: bytes},
"losses": [nats a token, of each text], "same": share of positions whose likeliest token is that of the first type}}}.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy
from engines import converted
from gguf import GGUFReader


def quantised(source: Path, target: Path, name: str) -> Path:
    """Write the weights of a GGUF file in another type."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}"), 1
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp did not write {name}; its reason is above")
    return target


def measured(file: Path, texts: list[list[int]]) -> tuple[list[float], list[Any]]:
    """Of each text, the mean loss in nats a token, and the likeliest next token at each position."""
    length = max(map(len, texts))
    model = llama_cpp.Llama(str(file), n_ctx=length, n_batch=length, n_threads=1, logits_all=True, verbose=False)
    losses, likeliest = [], []
    for text in texts:
        model.reset()
        model.eval(text)
        logits = model.scores[: len(text) - 1].astype(numpy.float64)
        top = logits.max(1, keepdims=True)
        sums = numpy.log(numpy.exp(logits - top).sum(1)) + top[:, 0]
        losses.append(float(numpy.mean(sums - logits[numpy.arange(len(logits)), text[1:]])))
        likeliest.append(logits.argmax(1))
    return losses, likeliest


def tensor_bytes(file: Path) -> dict[str, int]:
    """What the tensors of each type take: a file mixes types, and some do not fit a tensor's width."""
    found: collections.Counter[str] = collections.Counter()
    for tensor in GGUFReader(file).tensors:
        found[tensor.tensor_type.name] += int(tensor.n_bytes)
    return dict(found)


def main() -> None:
    folder, work, request = Path(sys.argv[1]), Path(sys.argv[2]), json.load(sys.stdin)
    first, *others = request["types"]
    plain = Path(converted(folder, work / f"{first}.gguf", request["converter"], "--outtype", first.lower()))
    answer: dict[str, Any] = {}
    likeliest: list[Any] = []
    for name in (first, *others):
        file = plain if name == first else quantised(plain, work / f"{name}.gguf", name)
        losses, found = measured(file, request["texts"])
        likeliest = likeliest or found
        same = numpy.concatenate(found) == numpy.concatenate(likeliest)
        sizes = {"bytes": file.stat().st_size, "tensors": tensor_bytes(file)}
        answer[name] = {**sizes, "losses": losses, "same": float(same.mean())}
    versions = {name: importlib.metadata.version(name) for name in ("llama-cpp-python", "gguf")}
    print(json.dumps({"versions": versions, "types": answer}))


if __name__ == "__main__":
    main()
