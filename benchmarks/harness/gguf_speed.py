"""Tokens per second of GGUF files in llama.cpp's library, in turns. llama-cpp-py-sync declares it for cffi."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp_py_sync._cffi_bindings import get_ffi

from harness.llama import LlamaCpp


@dataclass(frozen=True)
class Library:
    """llama.cpp's library as cffi has it."""

    ffi: Any
    functions: Any

    @classmethod
    def of(cls, program: LlamaCpp) -> Library:
        program.opened()
        ffi = get_ffi()
        return cls(ffi, ffi.dlopen(str(next(program.folder.glob("libllama.v*.so")))))

    def context(self, file: Path, length: int, threads: int) -> Any:
        """A file, ready to evaluate `length` tokens."""
        functions = self.functions
        model = functions.llama_model_load_from_file(str(file).encode(), functions.llama_model_default_params())
        if model == self.ffi.NULL:
            raise SystemExit(f"llama.cpp cannot load {file}")
        settings = functions.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = length, threads, threads
        return functions.llama_init_from_model(model, settings)

    def evaluate(self, context: Any, tokens: list[int]) -> int:
        """Evaluate tokens. Returns the likeliest next one."""
        functions = self.functions
        held = self.ffi.new("llama_token[]", tokens)  # the batch only points to them
        if functions.llama_decode(context, functions.llama_batch_get_one(held, len(tokens))):
            raise SystemExit("llama.cpp cannot evaluate these tokens")
        count = functions.llama_vocab_n_tokens(functions.llama_model_get_vocab(functions.llama_get_model(context)))
        logits = list(functions.llama_get_logits_ith(context, -1)[0:count])
        return max(range(count), key=logits.__getitem__)

    def seconds(self, context: Any, prompt: list[int], count: int) -> float:
        """Of `count` tokens after a prompt, which does not count, in processor time; the choice of the likeliest token
        does not count either.
        """
        self.functions.llama_memory_clear(self.functions.llama_get_memory(context), True)
        token = self.evaluate(context, prompt)
        total = 0.0
        for _ in range(count):
            held = self.ffi.new("llama_token[]", [token])
            batch = self.functions.llama_batch_get_one(held, 1)
            start = time.process_time()
            failed = self.functions.llama_decode(context, batch)
            total += time.process_time() - start
            if failed:
                raise SystemExit("llama.cpp cannot evaluate a token")
        return total


def seconds_by_file(
    program: LlamaCpp, files: dict[str, Path], prompt: list[int], count: int, turns: int, threads: int
) -> dict[str, list[float]]:
    """The seconds of each turn. Every turn evaluates the same token `count` times; the order of the files is reversed
    from turn to turn.
    """
    library = Library.of(program)
    contexts = {name: library.context(file, len(prompt) + count + 1, threads) for name, file in files.items()}
    for context in contexts.values():  # once, to fill the caches
        library.seconds(context, prompt, 2)
    found: dict[str, list[float]] = {name: [] for name in files}
    for turn in range(turns):
        for name in list(contexts)[:: -1 if turn % 2 else 1]:
            found[name].append(library.seconds(contexts[name], prompt, count))
    return found
