"""The command `bench`: what it times, and what it says of models that cannot be measured."""

import dataclasses
import json
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hasslefree.cli import run_app as main
from hasslefree.cli.bench import speed_table
from hasslefree.demo.run import MODEL
from hasslefree.errors import CheckpointError, MemoryShortError, ModelError, PromptError
from hasslefree.evaluation import bench
from hasslefree.evaluation.bench import SHORT, TURNS, Bench, Contender, Runner, Speed, run_bench, serve, transferable
from hasslefree.evaluation.continuation import Writer

ALONE = Bench(new_tokens=6, prompt=40, threads=1, backend=None, options={})


def run(monkeypatch, capsys, *arguments):
    """The exit code, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["hasslefree", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out + printed.err


def test_both_models_are_measured(monkeypatch, capsys, out):
    """Oracle for the memory: the bytes of the dense model's parameters and buffers."""
    words = ["bench", out, "--dense", MODEL, "--new-tokens", 4, "--prompt", 8, "--threads", 1, "--json"]
    code, printed = run(monkeypatch, capsys, *words)
    assert code == 0
    found = json.loads(printed)
    dense = AutoModelForCausalLM.from_pretrained(MODEL)
    assert found["dense"]["weights"] == sum(t.nbytes for t in (*dense.parameters(), *dense.buffers()))
    assert found["compressed"]["weights"] != found["dense"]["weights"]
    assert all(speed["tokens_per_second"] > 0 < speed["prompt_seconds"] for speed in found.values())


def test_a_turn_writes_after_a_short_prompt_and_reads_a_long_one(monkeypatch):
    """Oracle: the lengths of what the model was given and gave, an end of text notwithstanding."""
    writer = Writer.load(str(MODEL))
    lengths, generate = [], writer.model.generate

    def watched(ids, **settings):
        whole = generate(ids, **settings)
        lengths.append((ids.shape[1], whole.shape[1] - ids.shape[1]))
        return whole

    monkeypatch.setattr(writer.model, "generate", watched)
    writer.model.generation_config.stop_strings = ["a", "e", " "]
    writer.model.generation_config.eos_token_id = list(range(writer.model.config.vocab_size // 2))
    Runner(writer, ALONE).turn()
    assert lengths == [(SHORT, ALONE.new_tokens), (ALONE.prompt, 1)]


def test_models_take_turns_and_medians_count(monkeypatch):
    order = []

    class Timed:
        def __init__(self, name, settings):
            seconds = [(9.0, 90.0), (1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (0.5, 5.0)]
            self.name, self.turns = name, iter([bench.Turn(*pair) for pair in seconds])

        def answer(self):
            return 1000

        def turn(self):
            order.append(self.name)
            return next(self.turns)

        def end(self):
            order.append(f"end of {self.name}")

    monkeypatch.setattr(bench, "Contender", Timed)
    found = run_bench({"compressed": "a", "dense": "b"}, ALONE)
    assert found == dict.fromkeys(("compressed", "dense"), Speed(6 / 2.0, 20.0, 1000))
    assert order == ["a", "b"] * TURNS + ["end of a", "end of b"]


def test_the_compressed_model_is_shown_over_the_dense_one():
    speeds = {"compressed": Speed(30.0, 0.5, 250), "dense": Speed(20.0, 0.4, 1000)}
    cells = [[str(cell) for cell in column.cells] for column in speed_table(speeds, 256).columns]
    assert cells == [["compressed", "dense"], ["30.0 (1.50 ×)", "20.0"], ["0.50 (1.25 ×)", "0.40"],
                     ["250 bytes (0.25 ×)", "1.0 kB"]]  # fmt: skip


def test_too_long_a_prompt_is_refused():
    writer = SimpleNamespace(name="m", model=AutoModelForCausalLM.from_pretrained(MODEL))
    with pytest.raises(PromptError, match=r"m takes at most 512 tokens, and 601 are asked for; lower"):
        Runner(writer, Bench(6, 600, None, None, {}))


def test_an_error_of_the_process_is_a_sentence(monkeypatch, out):
    """What the process runs, in this one."""
    monkeypatch.setattr(bench.logging, "disable", lambda level: None)
    waiting = object.__new__(Contender)
    waiting.connection, theirs = torch.multiprocessing.Pipe()
    serve(theirs, str(out), dataclasses.replace(ALONE, threads=None, backend="foo"))
    with pytest.raises(ModelError, match="unknown backend 'foo'"):
        waiting.answer()


def test_a_process_that_ends_without_an_answer_is_said_to_lack_memory():
    dead = object.__new__(Contender)
    ours, theirs = torch.multiprocessing.Pipe()
    theirs.close()
    dead.name, dead.connection = "m", ours
    dead.process = SimpleNamespace(join=lambda: None, exitcode=-9)
    with pytest.raises(ModelError, match="the process that runs m ended with code -9, probably for lack of memory"):
        dead.answer()


def test_a_process_that_ends_while_the_other_works_is_said_to_lack_memory():
    dead = object.__new__(Contender)
    ours, theirs = torch.multiprocessing.Pipe()
    theirs.close()
    dead.name, dead.connection = "m", ours
    dead.process = SimpleNamespace(join=lambda: None, exitcode=-9)
    with pytest.raises(ModelError, match="the process that runs m ended with code -9"):
        dead.turn()


def test_ctrl_c_is_left_to_the_process_that_ends_the_others(monkeypatch):
    """Oracle: a process inherits which signals are ignored."""
    handlers = []
    process = SimpleNamespace(start=lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    context = SimpleNamespace(Pipe=torch.multiprocessing.Pipe, Process=lambda **_: process)
    monkeypatch.setattr(bench, "get_context", lambda _: context)
    before = signal.getsignal(signal.SIGINT)
    Contender("m", ALONE)
    assert handlers == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    ],
)
def test_memory_that_is_short_in_the_process_is_no_defect(error):
    found = object.__new__(Contender)
    found.connection, theirs = torch.multiprocessing.Pipe()
    theirs.send(transferable("m", error))
    with pytest.raises(MemoryShortError, match=r"not enough memory for m \(.*allocate.*dense='none'"):
        found.answer()


def test_a_damaged_file_is_still_one_after_the_pipe():
    """The command line ends with exit code 1 for it, and with 2 for a mistake in what was typed."""
    found = object.__new__(Contender)
    found.connection, theirs = torch.multiprocessing.Pipe()
    theirs.send(transferable("m", CheckpointError("model.safetensors is truncated")))
    with pytest.raises(CheckpointError, match="model.safetensors is truncated"):
        found.answer()
