"""The calibration text of a run, of several texts."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint.record import command_of, read_record
from hasslefree.demo.run import MODEL
from hasslefree.errors import CalibrationError, CheckpointError, ModelError, OutputError
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.pipeline.text import read_texts
from hasslefree.texts.segments import draw_segments
from hasslefree.texts.sources import calibration_documents
from tests.tiny_models import build, number_tokenizer, segments

SEQLEN = 16


@pytest.fixture
def files(tmp_path):
    """Three texts that have no number in common: of 3 to 22, of 23 to 42, of 43 to 62."""
    made = []
    for index in range(3):
        numbers = 3 + 20 * index + torch.randint(20, (60, 40), generator=torch.Generator().manual_seed(index))
        file = tmp_path / f"{index}.jsonl"
        file.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in numbers.tolist()))
        made.append(str(file))
    return made


def kinds(tokens):
    """Of which of the three texts each segment is."""
    found = (tokens - 3) // 20
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


def drawn(recipe, tokenizer=None):
    model = build("llama")
    tokenizer = tokenizer or number_tokenizer()
    texts = read_texts(model, tokenizer, recipe, model.device)
    return texts.draw(), texts


def test_every_text_has_its_share_among_any_first_segments(files):
    """Oracle: each text drawn alone by the same seed."""
    shares = [50, 30, 20]
    texts = [f"{file}:{share}%" for file, share in zip(files, shares, strict=True)]
    for seed in range(3):
        recipe = Recipe(rank=2, method="eora", calibration=texts, samples=40, seqlen=SEQLEN, seed=seed)
        found, _ = drawn(recipe)
        kind = kinds(found)
        for index, share in enumerate(shares):
            count = 40 * share // 100
            alone = draw_segments(calibration_documents(files[index]), number_ids, count, SEQLEN, seed)
            assert found[[each == index for each in kind]].equal(alone)
            for first in range(41):
                assert abs(kind[:first].count(index) - first * share / 100) <= 1.5
        assert found.equal(drawn(recipe)[0])


def number_ids(text):
    return [int(word) for word in text.split()]


def test_all_that_a_run_reads_is_mixed_and_recorded(files, tmp_path):
    """Calibration, training and held-out text. Oracle: what enters the embedding."""
    calibration = {files[0]: "75%", files[2]: "25%"}
    recipe = Recipe(
        rank=2, method="eora", calibration=calibration, samples=8, seqlen=SEQLEN, match_predictions=320
    )  # fmt: skip
    model = build("llama")
    read = set()
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: read.update(map(tuple, inputs[0].tolist()))
    )
    report = hasslefree.compress(model, tmp_path / "out", recipe, tokenizer=number_tokenizer())
    kind = kinds(torch.tensor([segment for segment in read if len(segment) == SEQLEN]))
    assert 1 not in kind
    assert kind.count(2) / len(kind) == pytest.approx(0.25, abs=0.05)
    assert report.texts == {files[0]: 6 * SEQLEN, files[2]: 2 * SEQLEN}
    assert read_record(tmp_path / "out").texts == report.texts
    assert f"75% {files[0]}, 25% {files[2]}" in (tmp_path / "out" / "README.md").read_text()
    report = hasslefree.compress(str_model(tmp_path), tmp_path / "two", recipe, tokenizer=number_tokenizer())
    assert f"--calibration {files[0]}:75% {files[2]}:25% --" in command_of(report)


def str_model(tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    return str(tmp_path / "dense")


def test_the_command_line_and_a_recipe_say_the_same(files, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"rank: 2\ncalibration:\n  {files[0]}: 60%\n  self: 40%\n")
    made = Recipe.from_yaml(file)
    file.write_text(f"rank: 2\ncalibration: ['{files[0]}:60%', 'self:40%']\n")
    assert made == Recipe.from_yaml(file)
    assert made == Recipe(rank=2, calibration=(f"{files[0]}:60%", "self:40%"))
    assert Recipe(rank=2, calibration=["mixed"]) == Recipe(rank=2)


@pytest.mark.parametrize(("template", "separators"), [("$A", [2]), ("<s> $A", [2, 1]), ("<s> $A </s>", [2, 1])])
def test_rows_that_are_too_short_are_joined(template, separators, tmp_path):
    """Oracle: by hand. Row i has the number 3 + i % 60 five times. Training and the held-out text are joined too."""
    rows = [" ".join(5 * [str(3 + row % 60)]) for row in range(300)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    recipe = Recipe(method="wanda", calibration=str(file), samples=30, seqlen=SEQLEN, first_token=False)
    tokenizer = number_tokenizer(template)
    found, texts = drawn(recipe, tokenizer)
    assert found.shape == (30, SEQLEN)
    whole = [token for row in range(300) for token in (*5 * [3 + row % 60], *separators)]
    places = {tuple(whole[start : start + SEQLEN]) for start in range(len(whole))}
    assert all(tuple(segment) in places for segment in found.tolist())
    assert len({tuple(segment) for segment in found.tolist()}) > 15
    assert found.equal(drawn(recipe, tokenizer)[0])
    held_out = texts.another_part(texts.documents[str(file)], 8, None)
    assert len(held_out) == 8


def test_chats_that_are_too_short_are_joined_as_their_template_ends_them(tmp_path):
    tokenizer = number_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<s> {{ m.content }} {% endfor %}"
    recipe = Recipe(method="wanda", calibration=chats(tmp_path), samples=4, seqlen=40)
    found, _ = drawn(recipe, tokenizer)
    assert not (found == 2).any()
    assert ((found == 1).sum(1) >= 3).all()


def test_rows_that_are_too_few_tokens_even_if_joined(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(10 * ['{"text": "5 6 7"}']))
    recipe = Recipe(method="wanda", calibration=str(tmp_path / "rows.jsonl"), samples=20, seqlen=SEQLEN)
    with pytest.raises(
        CalibrationError, match="is too short: 20 samples × 16 = 320 tokens are needed.* use samples=2,"
    ):
        drawn(recipe)


def test_a_text_that_lacks_its_share_is_named(files):
    texts = [f"{files[0]}:50%", f"{files[1]}[:1]:50%"]
    recipe = Recipe(rank=2, method="eora", calibration=texts, samples=20, seqlen=SEQLEN)
    with pytest.raises(
        CalibrationError, match=r"use samples=4, a smaller seqlen= .*\(text .*1.jsonl\[:1\], 50% of the"
    ):
        drawn(recipe)


def test_a_text_whose_share_is_less_than_a_segment_is_named(files, caplog):
    recipe = Recipe(
        rank=2, method="eora", calibration=[f"{files[0]}:95%", f"{files[1]}:5%"], samples=4, seqlen=SEQLEN
    )  # fmt: skip
    assert kinds(drawn(recipe)[0]) == [0, 0, 0, 0]
    assert f"reads nothing of {files[1]}: 5 % of 4 samples are less than one; use more samples" in caplog.text
    caplog.clear()
    drawn(dataclasses.replace(recipe, samples=40))
    assert not caplog.text


@pytest.mark.parametrize("number", [0, 59])
def test_a_token_that_the_embedding_lacks_is_named_before_the_work(number, files, tmp_path):
    """In the document that is drawn first, and in the one that only the training reads."""
    rows = [json.loads(line)["text"] for line in Path(files[0]).read_text().splitlines()]
    row = int(torch.randperm(60, generator=torch.Generator().manual_seed(0))[number])
    rows[row] = " ".join(40 * ["63"])
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    calibration = str(tmp_path / "text.jsonl")
    recipe = Recipe(
        rank=2, method="eora", calibration=calibration, samples=8, seqlen=SEQLEN, match_predictions=64
    )  # fmt: skip
    with pytest.raises(ModelError, match="token id 63, '63', is outside the model's vocabulary"):
        hasslefree.compress(build("llama", vocab_size=60), tmp_path / "out", recipe, tokenizer=number_tokenizer())


@pytest.fixture
def offline(monkeypatch):
    def fail(**_):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)


def test_without_a_network_the_named_mixture_is_what_is_on_the_machine(offline, tmp_path, caplog):
    recipe = Recipe(
        method="wanda", pattern="2:4", rank=0, calibration="mixed", samples=8, seqlen=32, check=False
    )  # fmt: skip
    report = hasslefree.compress(str(MODEL), tmp_path / "out", recipe)
    assert report.texts == {"python": 4 * 32, "self": 4 * 32}
    assert set(report.left_out) == {"c4", "wikipedia", "code", "chat", "languages"}
    assert "no connection" in report.left_out["c4"]
    assert "the calibration has no text of the kind 'chat'" in caplog.text
    card = (tmp_path / "out" / "README.md").read_text()
    assert "50% python, 50% self (without c4, wikipedia, code, chat, languages, which could not be read)" in card
    assert read_record(tmp_path / "out").left_out == report.left_out


def test_a_resumed_run_names_a_text_that_can_be_had_no_longer(offline, tmp_path, monkeypatch):
    recipe = Recipe(
        method="wanda", pattern="2:4", rank=0, calibration="mixed", samples=8, seqlen=32, check=False
    )  # fmt: skip

    def stop(step):
        if step.layer is not None and step.layer.name.startswith("model.layers.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(str(MODEL), tmp_path / "out", recipe, progress=stop)

    def refuse(*_):
        raise CalibrationError("not enough memory")

    monkeypatch.setattr("hasslefree.pipeline.text.check_writer", refuse)
    with pytest.raises(OutputError, match=r"texts left out was \['c4', [^]]*\] and is \['c4', .*'self', 'wikipedia'\]"):
        hasslefree.compress(str(MODEL), tmp_path / "out", recipe, resume=True)


def test_without_a_network_a_text_that_is_named_is_an_error(offline):
    recipe = Recipe(rank=2, method="eora", calibration=["c4:50%", "python:50%"], samples=2, seqlen=16)
    with pytest.raises(CalibrationError, match="'c4' could not be downloaded"):
        drawn(recipe)


def chats(tmp_path, count=30):
    file = tmp_path / "chats.jsonl"
    rows = []
    for row in segments(count, 24).tolist():
        question, answer = " ".join(map(str, row[:12])), " ".join(map(str, row[12:]))
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}<s> {{ m.content }} {% endfor %}"])
def test_conversations_are_in_the_template_of_the_model(template, tmp_path):
    """Oracle: the template by hand; without one, the messages are paragraphs. What the tokenizer puts before a text
    is not put before the template's own."""
    tokenizer = number_tokenizer("<s> $A")
    tokenizer.chat_template = template
    length = 26 if template else 25
    recipe = Recipe(
        rank=2, method="eora", calibration=chats(tmp_path), samples=4, seqlen=length, first_token=False
    )  # fmt: skip
    found, _ = drawn(recipe, tokenizer)
    assert (found[:, 0] == 1).all()
    assert ((found == 1).sum(1) == (2 if template else 1)).all()
    if template:
        assert (found[:, 13] == 1).all()


def test_a_template_that_fails_is_a_sentence(tmp_path):
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    recipe = Recipe(rank=2, method="eora", calibration=chats(tmp_path), samples=4, seqlen=16)
    with pytest.raises(CheckpointError, match="cannot write messages of user, assistant: no such role"):
        drawn(recipe, tokenizer)
