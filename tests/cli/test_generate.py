"""The commands `generate` and `chat`. Oracle for texts: transformers' own `generate` on the loaded folder."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hasslefree import use_backend
from hasslefree.cli import run_app as main
from hasslefree.cli.generate import answer
from hasslefree.demo.run import MODEL
from hasslefree.errors import PromptError
from hasslefree.evaluation.continuation import Sampling, Writer
from hasslefree.packed.linear import compressed_layers
from hasslefree.units import size


def run(monkeypatch, capsys, *arguments, stdin=None):
    """The exit code, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["hasslefree", *map(str, arguments)])
    if stdin is not None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out + printed.err


def continued(folder, prompt, count):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    whole = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(whole[0], skip_special_tokens=True)


def test_generate_shows_both_models_with_their_bytes(monkeypatch, capsys, out):
    words = ["generate", out, "Return the", "--max-new-tokens", "12", "--dense", "original"]
    code, text = run(monkeypatch, capsys, *words)
    assert code == 0, text
    before, compressed, dense = text.replace("[compressed]", "[dense]").split("[dense]\n")
    assert before == ""
    assert dense.startswith(continued(MODEL, "Return the", 12))
    assert compressed.startswith(continued(out, "Return the", 12))
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))  # on some processors, kernels keep more than the weights
    held = sum(layer.held_bytes for layer in compressed_layers(model).values())
    for weights, more in ((load_file(MODEL / "model.safetensors").values(), 0), (shards(out), held)):
        assert size(sum(tensor.nbytes for tensor in weights) + more) in text
    assert "tokens/s" in text


def shards(folder):
    return [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]


def test_unpacked_copies_count_as_bytes(out):
    """Oracle: S of every layer, dense and in float32, beside what is packed."""
    found = Writer.load(str(out), device="cpu")
    packed = found.bytes
    use_backend(found.model, "unpacked")
    layers = json.loads((out / "compression.json").read_text())["layers"]
    assert found.bytes - packed == sum(4 * layer["out"] * layer["width"] for layer in layers)


def test_generate_reads_the_prompt_from_a_pipe_and_loads_no_dense_model(monkeypatch, capsys, out):
    arguments = ["generate", out, "--max-new-tokens", "4", "--backend", "dense"]
    code, text = run(monkeypatch, capsys, *arguments, stdin=b"Return the\n")
    assert code == 0, text
    assert text.startswith("[compressed]\n" + continued(out, "Return the", 4))
    assert "[dense]" not in text


def test_a_dense_model_that_is_not_at_hand_is_an_error(monkeypatch, capsys, out, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(out, tmp_path / "out")
    words = ["generate", tmp_path / "out", "Return", "--dense", "original"]
    record = json.loads((out / "compression.json").read_text())
    for name in ("nobody/such-model", str(tmp_path / "gone" / "model")):
        (tmp_path / "out" / "compression.json").write_text(json.dumps(record | {"model": name}))
        code, text = run(monkeypatch, capsys, *words)
        assert code == 2, text
        assert f"the dense model {name} was not found from this folder or in the cache of the hub" in text
    (tmp_path / "out" / "compression.json").unlink()
    code, text = run(monkeypatch, capsys, *words)
    assert code == 2, text
    assert "no compression.json, which would name the dense model" in text


def test_chat_answers_the_lines_of_a_pipe(monkeypatch, capsys, with_template):
    arguments = ["chat", with_template, "--max-new-tokens", "6"]
    code, text = run(monkeypatch, capsys, *arguments, stdin=b"Hello\n\n \nNot \xff UTF-8\n")
    assert code == 0, text
    first = continued(with_template, "<user>Hello\n<assistant>", 6).removeprefix("<user>Hello\n<assistant>")
    assert f"> Hello\n{first}\n6 tokens" in text
    assert "> Not � UTF-8\n" in text
    assert text.count("6 tokens, ") == 2


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("generate OUT", 2, "the prompt is empty; give some text to continue\n"),
        ("chat OUT", 0, "\n> \n"),
        ("plan OUT --recipe -", 2, "the recipe - must contain fields, such as 'pattern: 2:4'\n"),
    ],
)
def test_a_standard_input_that_was_closed_is_empty(command, code, message, monkeypatch, capsys, out):
    monkeypatch.setattr(sys, "stdin", None)
    ended, text = run(monkeypatch, capsys, *command.replace("OUT", str(out)).split())
    assert ended == code
    assert text.endswith(message), text


def test_chat_goes_on_after_a_message_that_is_too_long(monkeypatch, capsys, out):
    arguments = ["chat", out, "--max-new-tokens", "2"]
    code, text = run(monkeypatch, capsys, *arguments, stdin=b"words " * 600 + b"\nReturn\n")
    assert code == 0, text
    assert "the model takes at most 512" in text
    assert "lower --max-new-tokens, or start a new chat" in text.replace("\n", " ")
    assert text.count("2 tokens, ") == 1


@pytest.mark.parametrize(("end", "expected"), [(EOFError, 0), (KeyboardInterrupt, 130)])
def test_ctrl_d_and_ctrl_c_end_a_chat(monkeypatch, capsys, out, end, expected):
    typed = iter(["Return"])

    def answer(_prompt):
        for line in typed:
            return line
        raise end

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    code, text = run(monkeypatch, capsys, "chat", out, "--max-new-tokens", "2")
    assert code == expected
    assert "2 tokens, " in text
    assert "Traceback" not in text


def test_mistakes_are_one_message_and_exit_code_2(monkeypatch, capsys, out, tmp_path):
    for arguments, message in [
        (["generate", out, ""], "the prompt is empty"),
        (["generate", out, "x", "--max-new-tokens", "512"], "takes at most 512 in total"),
        (["generate", tmp_path / "none", "x"], "none does not exist"),
        (["generate", out, "x", "--dense", tmp_path / "gone"], "gone does not exist"),
        (["generate", out, "x", "--backend", "numbr"], "Did you mean 'numba'"),
        (["generate", MODEL, "x"], "has no compressed layers"),
        (["chat", out, "--backend", "int4"], "quantised codes"),
        (["chat", out, "--dtype", "float23"], "unknown dtype 'float23'. Did you mean 'float32'"),
        (["chat", out, "--device", "gpu"], "device 'gpu' cannot be used"),
        (["chat", out, "--temperature", "-1"], "--temperature"),
    ]:
        code, text = run(monkeypatch, capsys, *arguments)
        assert code == 2, text
        assert message in text.replace("\n", " "), text
        assert "\nerror: " in f"\n{text}"
        assert "Traceback" not in text


# Conversations through a chat template. Oracle: the text of the prompt, written out by hand.


def test_an_answer_continues_the_whole_conversation(with_template):
    writer, history = Writer.load(str(with_template), device="cpu"), []
    first = answer(writer, history, "Hello", Sampling(8)).text
    assert first == writer.write("<user>Hello\n<assistant>", Sampling(8)).text
    second = answer(writer, history, "And?", Sampling(8)).text
    spoken = f"<user>Hello\n<assistant>{first}\n<user>And?\n<assistant>"
    assert second == writer.write(spoken, Sampling(8)).text
    assert [message["content"] for message in history] == ["Hello", first, "And?", second]


def test_a_message_without_an_answer_is_not_kept(with_template):
    writer, history = Writer.load(str(with_template), device="cpu"), []
    with pytest.raises(PromptError, match="the prompt has .*takes at most 512"):
        answer(writer, history, "words " * 600, Sampling(8))
    assert not history


def test_without_a_template_every_message_is_continued_by_itself(out):
    writer, history = Writer.load(str(out), device="cpu"), []
    first = answer(writer, history, "Return the", Sampling(8)).text
    answer(writer, history, "class", Sampling(8))
    assert answer(writer, history, "Return the", Sampling(8)).text == first
    assert first == writer.write("Return the", Sampling(8)).text
