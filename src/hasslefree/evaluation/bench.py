"""Measure how fast models read and write text, in turns, and the memory of their weights."""

import logging
import signal
import statistics
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar

from hasslefree.errors import (
    WENT_WRONG,
    HasslefreeError,
    MemoryShortError,
    ModelError,
    PromptError,
    lacks_memory,
    option,
)
from hasslefree.evaluation.continuation import Writer
from hasslefree.models.load import most_positions
from hasslefree.packed.linear import use_backend

# Tokens of the prompt before the tokens whose generation is timed.
SHORT = 16
TURNS = 5


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark.

    Args:
        new_tokens: number of tokens to generate. prompt: tokens of the prompt to read.
        threads: CPU threads; None for torch's default.
        backend: backend of compressed layers; None to choose one for each layer.
        options: dtype, device and trust_remote_code for `load_model`.
    """

    new_tokens: int
    prompt: int
    threads: int | None
    backend: str | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Speed:
    """Results for one model: medians of `TURNS` turns.

    Args:
        tokens_per_second: rate of generation after a prompt of `SHORT` tokens.
        prompt_seconds: time from a prompt of `Bench.prompt` tokens to the first new token.
        weights: bytes in memory, including what backends hold.
    """

    tokens_per_second: float
    prompt_seconds: float
    weights: int


class Turn(NamedTuple):
    """The seconds in which a model wrote and read text in one turn."""

    writing: float
    reading: float


class Contender:
    """A model in its own process, whose memory and threads do not affect other models."""

    def __init__(self, name: str, bench: Bench) -> None:
        context = get_context("spawn")
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, bench), daemon=True)
        # Ctrl-C in a terminal reaches all processes: the new one ignores it, and this one kills it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()

    def answer(self) -> Any:
        """Receive the next message of the process.

        Raises:
            ModelError: the model cannot be loaded or run as asked, or the process ended.
            MemoryShortError: there is not enough memory.
        """
        try:
            found = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise ModelError(
                f"the process that runs {self.name} ended with code {self.process.exitcode},"
                " probably for lack of memory; measure the compressed model alone with"
                f" {option('dense', 'none')}"
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    def turn(self) -> Turn:
        """Take a turn. Raises a ModelError as `answer` does."""
        with suppress(ConnectionError):  # the process ended meanwhile, which `answer` reports
            self.connection.send("turn")
        seconds: Turn = self.answer()
        return seconds

    def end(self) -> None:
        """Kill the process, which has nothing to clean up."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def serve(connection: Connection, name: str, bench: Bench) -> None:
    """Load a model, send the bytes of its weights, and take turns until the connection closes."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    try:
        if bench.threads is not None:
            torch.set_num_threads(bench.threads)
        runner = Runner(Writer.load(name, **bench.options), bench)
        runner.turn()  # compiles the kernels
        connection.send(runner.writer.bytes)
        while connection.recv():
            connection.send(runner.turn())
    except EOFError:
        return
    except Exception as error:
        connection.send(transferable(name, error))


def transferable(name: str, error: Exception) -> Exception:
    """Convert an exception to one that a pipe can transfer: many exceptions cannot be unpickled."""
    for kind in WENT_WRONG:
        if isinstance(error, kind):
            return kind(error.message)
    if isinstance(error, HasslefreeError):
        return ModelError(error.message)
    cause = str(error).partition("\n")[0]
    if lacks_memory(error):
        return MemoryShortError(
            f"there is not enough memory for {name} ({cause}); lower {option('prompt')}, or measure"
            f" the compressed model alone with {option('dense', 'none')}"
        )
    return RuntimeError(traceback.format_exc())


class Runner:
    """A loaded model that takes turns.

    Raises:
        PromptError: the model takes fewer tokens than requested.
    """

    def __init__(self, writer: Writer, bench: Bench) -> None:
        use_backend(writer.model, bench.backend)
        limit = most_positions(writer.model)
        longest = max(SHORT + bench.new_tokens, bench.prompt + 1)
        if limit is not None and longest > limit:
            raise PromptError(
                f"{writer.name} takes at most {limit} tokens, and {longest} are asked for; lower"
                f" {option('prompt')} or {option('new_tokens')}"
            )
        self.writer = writer
        self.bench = bench
        settings: Any = writer.model.generation_config
        settings.stop_strings = None  # a text that ends early would count as a fast one

    def turn(self) -> Turn:
        """Write and read text once."""
        writing = self.seconds(SHORT, self.bench.new_tokens)
        reading = self.seconds(self.bench.prompt, 1)
        return Turn(writing, reading)

    def seconds(self, prompt: int, new_tokens: int) -> float:
        """Time to read a prompt of `prompt` tokens and generate `new_tokens` more."""
        model: Any = self.writer.model
        ids = (torch.arange(prompt) % model.config.get_text_config().vocab_size)[None]
        ids = ids.to(model.device)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        return time.perf_counter() - start


def run_bench(names: dict[str, str], bench: Bench) -> dict[str, Speed]:
    """Measure models in turns, so that other load on the machine affects all of them.

    Args:
        names: of the models, by role.

    Raises:
        ModelError: a model cannot be loaded, or takes fewer tokens than requested.
    """
    contenders = {role: Contender(name, bench) for role, name in names.items()}
    try:
        weights = {role: contender.answer() for role, contender in contenders.items()}
        turns: dict[str, list[Turn]] = {role: [] for role in names}
        for _ in range(TURNS):
            for role, contender in contenders.items():
                turns[role].append(contender.turn())
    finally:
        for contender in contenders.values():
            contender.end()
    speeds: dict[str, Speed] = {}
    for role, taken in turns.items():
        writing = statistics.median(turn.writing for turn in taken)
        reading = statistics.median(turn.reading for turn in taken)
        speeds[role] = Speed(bench.new_tokens / writing, reading, weights[role])
    return speeds
