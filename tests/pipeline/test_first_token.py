"""Every segment begins as the model's texts begin."""

import dataclasses
import json

import pytest
import torch

import hasslefree
from hasslefree import Recipe
from hasslefree.pipeline.text import beginning, read_texts, written_segments
from tests.tiny_models import build, number_tokenizer, tensors_of

SEQLEN = 16
# What a tokenizer may put before a text, and the ids.
TEMPLATES = {"<s> $A": [1], "</s> <s> $A </s>": [2, 1]}


@pytest.fixture
def recipe(tmp_path):
    numbers = torch.randint(3, 64, (60, 3 * SEQLEN), generator=torch.Generator().manual_seed(1)).tolist()
    lines = [json.dumps({"text": " ".join(map(str, document))}) + "\n" for document in numbers]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(lines))
    return Recipe(
        rank=2, method="eora", calibration=str(file), samples=8, seqlen=SEQLEN, match_predictions=64
    )  # fmt: skip


def drawn(recipe):
    model, tokenizer = build("llama"), number_tokenizer("<s> $A")
    return read_texts(model, tokenizer, recipe, model.device).draw()


def ids_read(model):
    """The ids of every sequence that the embedding is given from now on."""
    read = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.extend(inputs[0].tolist()))
    return read


@pytest.mark.parametrize("template", TEMPLATES)
def test_all_that_a_compression_reads(template, recipe, tmp_path):
    """Calibration, training, held-out text. Oracle: what enters the embedding."""
    model = build("llama")
    read = ids_read(model)
    report = hasslefree.compress(model, tmp_path / "out", recipe, tokenizer=number_tokenizer(template))
    first = TEMPLATES[template]
    assert len({tuple(segment) for segment in read}) > 8 + 4 + 30
    assert {tuple(segment[: len(first)]) for segment in read} == {tuple(first)}
    assert {len(segment) for segment in read} == {SEQLEN}
    assert report.first_tokens == tuple(first)
    assert "each of which begins with what the tokenizer puts before a text" in (tmp_path / "out/README.md").read_text()


def test_the_flag_gives_the_segments_of_sparsegpt(recipe, tmp_path):
    """Oracle: a tokenizer that puts nothing before a text, with which all is as it was."""
    plain = dataclasses.replace(recipe, first_token=False)
    reports = {}
    for name, tokenizer, settings in [
        ("bare", number_tokenizer(), recipe),
        ("off", number_tokenizer("<s> $A"), plain),
        ("on", number_tokenizer("<s> $A"), recipe),
    ]:
        reports[name] = hasslefree.compress(build("llama"), tmp_path / name, settings, tokenizer=tokenizer)
    assert [report.first_tokens for report in reports.values()] == [(), (), (1,)]
    assert reports["bare"].recipe["first_token"] is True
    bare, on = tensors_of(tmp_path / "bare"), tensors_of(tmp_path / "on")
    assert any(not torch.equal(bare[name], tensor) for name, tensor in on.items())
    # A document has a token more with the tokenizer's own before it, so that other windows are drawn.
    off = drawn(plain)
    on = drawn(recipe)
    assert on[:, 1:].equal(off[:, 1:])
    assert on[:, 0].tolist() == [1] * 8
    assert set(off[:, 0].tolist()) != {1}


@pytest.mark.parametrize(
    ("template", "begins"),
    [(None, [1]), ("{% for m in messages %}<s> 5 6 {{ m.content }}{% endfor %}", [1, 5, 6]),
     ("{% for m in messages %}5 6 {{ m.content }}{% endfor %}", [1, 5, 6])],
)  # fmt: skip
def test_text_that_a_model_writes_begins_with_it_once(template, begins):
    """Whether or not the chat template writes it."""
    tokenizer = number_tokenizer("<s> $A")
    tokenizer.chat_template = template
    assert beginning(tokenizer) == begins
    if template is None:
        text = written_segments(build("llama"), tokenizer, 3, SEQLEN, seed=0)
        assert text[:, 0].tolist() == [1, 1, 1]
