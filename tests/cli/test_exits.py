"""How commands end: each error as one sentence and an exit code, and no control characters from names."""

import errno
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import unicodedata

import pytest
from rich.control import strip_control_codes
from rich.text import Text

import hasslefree
from hasslefree.checkpoint.card import export_card
from hasslefree.cli import run_app
from hasslefree.cli.common import Console
from hasslefree.demo.run import MODEL
from hasslefree.errors import (
    CheckpointError,
    HasslefreeError,
    OutputError,
    UnknownNameError,
)
from hasslefree.escaping import escaped, escaped_within
from hasslefree.evaluation.run import evaluate
from hasslefree.units import table

REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN"}  # BN: also all without a width
HOSTILE = "q\x1b]0;title\x07\x9b31m\u202e\u2066\u200b\ud800\x00\rproj"

# What is raised in a command → the exit code, and what the sentence must hold.
ENDS = {
    "typed wrong": (OutputError("OUT is a file; give a folder"), 2, "OUT is a file; give a folder"),
    "damaged": (CheckpointError("M is damaged; copy it again"), 1, "M is damaged"),
    "full disk": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/x"), 1, "out/x cannot be used: No space left"),
    "loop of links": (OSError(errno.ELOOP, os.strerror(errno.ELOOP), "a"), 1, "a cannot be used: Too many levels"),
    "not UTF-8": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 1, "is not UTF-8"),
    "nesting": (RecursionError(), 1, "nested too deeply"),
    "numbers": (OverflowError("int too large to convert to float"), 1, "a number is too large"),
    "memory": (MemoryError(), 1, "not enough memory"),
    "memory of torch": (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 1, "not enough memory"),
    "a hostile name": (CheckpointError(f"{HOSTILE} is damaged\nerror: none"), 1, "\\nerror: none"),
    "a defect": (KeyError("x"), 1, "this is a defect of hasslefree"),
}


def end(monkeypatch, capsys, error, *flags):
    """The exit code and the output of `hasslefree inspect` if reading the folder raises an error."""

    def raising(*_):
        raise error

    monkeypatch.setattr(importlib.import_module("hasslefree.checkpoint.inspect"), "inspect_folder", raising)
    monkeypatch.setattr(sys, "argv", ["hasslefree", "inspect", "out", *flags])
    with pytest.raises(SystemExit) as caught:
        run_app()
    printed = capsys.readouterr()
    return caught.value.code, printed.out + printed.err


@pytest.mark.parametrize(("error", "code", "words"), ENDS.values(), ids=ENDS)
def test_every_error_is_one_sentence(monkeypatch, capsys, error, code, words):
    ended, text = end(monkeypatch, capsys, error)
    assert ended == code
    assert words in text
    assert ("in raising" in text) == ("defect" in words), "the traceback of a defect alone"
    assert not any(unicodedata.category(letter) == "Cc" for letter in text if letter != "\n")


def test_verbose_shows_the_traceback(monkeypatch, capsys):
    assert "in raising" in end(monkeypatch, capsys, OutputError("no"), "--verbose")[1]


def test_a_usage_error_is_one_sentence(monkeypatch, capsys):
    code, text = end(monkeypatch, capsys, None, "--nope\x1b[31m")
    assert (code, text.count("\n")) == (2, 1)
    assert "No such option" in text
    assert "`hasslefree inspect --help`" in text
    assert "\x1b[31" not in text


def test_what_is_escaped():
    """Oracle: the categories and the bidirectional classes of Unicode."""
    for letter in map(chr, range(sys.maxunicode + 1)):
        kind, order = unicodedata.category(letter), unicodedata.bidirectional(letter)
        if kind in ("Cc", "Cs", "Zl", "Zp") or order in REORDERING:
            assert escaped(letter).isascii(), hex(ord(letter))
        elif kind not in ("Cf", "Cn"):
            assert escaped(letter) == letter, hex(ord(letter))
    assert escaped("a\tb\n", "\n\t") == "a\tb\n"
    for joined in ("می\u200cروم", "👨\u200d👩"):  # a joiner between letters belongs to the text
        assert escaped(joined) == joined
    assert escaped_within({"a": [HOSTILE, 1]}) == {"a": [escaped(HOSTILE), 1]}


def test_text_is_escaped_and_styles_stay():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=80)
    console.print(Text(HOSTILE, style="red"))
    assert file.getvalue() == f"\x1b[31m{escaped(strip_control_codes(HOSTILE))}\x1b[0m\n"
    rows = table(["kind", HOSTILE])
    rows.add_row("[link=file:///]x[/link]", HOSTILE)
    file.truncate(0)
    console.print(rows)
    assert "[link=file:///]x[/link]" in file.getvalue()
    assert "\x1b]" not in file.getvalue()


def test_errors_and_cards_are_escaped_in_python():
    assert HOSTILE not in str(UnknownNameError("layer", HOSTILE, ["a"]))
    assert str(HasslefreeError(HOSTILE)) == escaped(HOSTILE)
    assert escaped(HOSTILE) in export_card("dense", HOSTILE, True, "AutoModel")


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.nightly)])
def test_a_terminal_without_utf_8(encoding):
    """`methods joint` holds characters that are not ASCII."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "hasslefree", "inspect", "ŵ\udcff"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"does not exist" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_standard_output():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hasslefree", "methods"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hasslefree.compress(3, "OUT"), "model must be str .* got 3"),
        (lambda: hasslefree.compress("M", 3), "out must be str .* got 3"),
        (lambda: hasslefree.compress("M", "OUT", {"rank": 2}), "recipe must be .*Recipe .* got {'rank': 2}"),
        (lambda: hasslefree.export("C", "E", max_shard_size=5), "max_shard_size must be str, got 5"),
        (lambda: hasslefree.advise("M", 3), "recipe must be .*Recipe, got 3"),
        (lambda: hasslefree.push(None, "me/it"), "folder must be str .* got None"),
    ],
)
def test_arguments_of_another_type(call, message):
    with pytest.raises(hasslefree.HasslefreeError, match=message) as raised:
        call()
    assert isinstance(raised.value, TypeError)


def test_a_tokenizer_of_another_model(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {word: number + 2048 * (number > 300) for word, number in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "t.txt").write_text("import this, and then import that " * 20)
    with pytest.raises(hasslefree.HasslefreeError, match="is outside the model's vocabulary"):
        evaluate(str(model), [str(tmp_path / "t.txt")])
