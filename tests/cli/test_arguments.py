"""What the command line hands to the library. Oracle: the values that were typed, none of them a default."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main

from hasslefree.cli.common import app
from hasslefree.demo.run import MODEL
from hasslefree.evaluation.continuation import Sampling

# By command: the function that does the work, its words, and what the function is given.
LOADING = {"device": "cpu", "trust_remote_code": True}
CALLS = {
    f"compress {MODEL} OUT --resume --activations disk --device cpu --trust-remote-code": (
        "hasslefree.pipeline.compress.compress",
        LOADING | {"resume": True, "overwrite": False, "activations": "disk"},
    ),
    f"compress {MODEL} OUT --overwrite": (
        "hasslefree.pipeline.compress.compress",
        {"resume": False, "overwrite": True, "activations": "device", "device": None, "trust_remote_code": False},
    ),
    "export OUT DEST --to gguf --template T --converter C --max-shard-size 1GB --overwrite --trust-remote-code": (
        "hasslefree.exports.export.export",
        {"template": Path("T"), "converter": Path("C"), "max_shard_size": "1GB", "overwrite": True,
         "trust_remote_code": True},
    ),
    "evaluate OUT --dense none --perplexity a b --tasks piqa rte --seqlen 9 --max-tokens 8 --no-first-token --limit 7"
    " --task-data D --cache C --batch-size 6 --dtype float32 --device cpu --trust-remote-code": (
        "hasslefree.evaluation.run.evaluate",
        LOADING | {"texts": ["a", "b"], "tasks": ["piqa", "rte"], "seqlen": 9, "max_tokens": 8, "first_token": False,
                   "limit": 7, "task_data": Path("D"), "cache": Path("C"), "batch": 6, "dtype": "float32",
                   "dense": None},
    ),
}  # fmt: skip


class ReachedError(Exception):
    """The function that does the work was called."""


def call(words):
    with pytest.raises(ReachedError):
        typer.main.get_command(app)(args=shlex.split(words))


@pytest.mark.parametrize("words", CALLS)
def test_options_reach_the_library(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    function, expected = CALLS[words]
    seen = {}

    def work(*_, **options):
        seen.update(options)
        raise ReachedError

    monkeypatch.setattr(function, work)
    call(words)
    del seen["progress"]
    seen.pop("keep", None)
    assert seen == expected


def test_processes_reach_the_plan(monkeypatch):
    def setup_of(model, recipe, device, activations, processes, trust_remote_code):
        assert (model, device.type, activations, processes, trust_remote_code) == (str(MODEL), "cpu", "cpu", 3, True)
        raise ReachedError

    monkeypatch.setattr("hasslefree.planning.setup.setup_of", setup_of)
    call(f"plan {MODEL} --processes 3 --activations cpu --device cpu --trust-remote-code")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_reach_the_models_that_write(command, monkeypatch):
    expected = {"dtype": "float16", "device": "cpu", "trust_remote_code": True}

    def load_writers(folder, dense, backend, threads, options):
        assert (folder, dense, backend, threads, options) == (Path("OUT"), "D", "dense", 1, expected)
        return {"compressed": SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), write=write)}

    def write(text, sampling, on_text):
        assert (text, sampling) == ("Say", Sampling(3, 0.5, 2))
        raise ReachedError

    monkeypatch.setattr("hasslefree.cli.generate.load_writers", load_writers)
    monkeypatch.setattr("hasslefree.cli.generate.writer_table", lambda writers: "")
    monkeypatch.setattr("hasslefree.cli.generate.messages", lambda: iter(["Say"]))
    options = "--dense D --max-new-tokens 3 --temperature 0.5 --seed 2 --threads 1 --dtype float16 --device cpu"
    prompt = "Say" if command == "generate" else ""
    call(f"{command} OUT {prompt} {options} --backend dense --trust-remote-code")
