"""What a tokenizer puts around a text by itself."""

import sys

import pytest
import torch
from transformers import AutoTokenizer

from hasslefree.demo.run import MODEL
from hasslefree.errors import CheckpointError
from hasslefree.models.tokenizer import begin_with, load_tokenizer, surrounding_tokens
from tests.tiny_models import number_tokenizer


@pytest.mark.parametrize(
    ("template", "settings", "before", "after"),
    [
        ("$A", {}, [], []),
        ("<s> $A", {}, [1], []),
        ("<s> $A </s>", {}, [1], [2]),
        ("</s> <s> $A", {}, [2, 1], []),
        ("$A </s>", {}, [], [2]),
        ("$A", {"add_bos_token": True}, [1], []),
        ("$A", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ("<s> $A", {"add_bos_token": False}, [], []),
    ],
)
def test_the_tokenizer_itself_says_so(template, settings, before, after, tmp_path):
    """Oracle: the template by hand; `add_bos_token` is one of the settings that change it. The same from files."""
    tokenizer = number_tokenizer(template, **settings)
    assert surrounding_tokens(tokenizer) == (before, after)
    tokenizer.save_pretrained(tmp_path)
    assert surrounding_tokens(load_tokenizer(str(tmp_path))) == (before, after)


def test_a_model_without_such_tokens():
    assert surrounding_tokens(AutoTokenizer.from_pretrained(MODEL)) == ([], [])


def test_a_segment_begins_anew_and_the_given_one_stays():
    segments = torch.arange(3, 15).view(3, 4)
    given = segments.clone()
    assert begin_with(segments, [2, 1]).tolist() == [[2, 1, 5, 6], [2, 1, 9, 10], [2, 1, 13, 14]]
    assert begin_with(segments, []).equal(given)
    assert segments.equal(given)


def test_the_package_for_a_sentencepiece_file_is_named(tmp_path, monkeypatch):
    """transformers itself asks for tiktoken, which it tries last."""
    monkeypatch.setattr("hasslefree.models.tokenizer.is_sentencepiece_available", lambda: False)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match="needs a package: `pip install sentencepiece protobuf`"):
        load_tokenizer(str(tmp_path))
