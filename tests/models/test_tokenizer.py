"""What a tokenizer puts around a text by itself, and the tokens of documents."""

import sys
from datetime import datetime

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hasslefree.demo.run import MODEL
from hasslefree.errors import CheckpointError
from hasslefree.models.tokenizer import (
    begin_with,
    encode_document,
    load_tokenizer,
    rendered,
    surrounding_tokens,
    written,
)
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


def test_a_tokenizer_that_drops_digits():
    made = Tokenizer(BPE({"<s>": 0, "A": 1, "C": 2}, []))
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert surrounding_tokens(PreTrainedTokenizerFast(tokenizer_object=made)) == ([0], [])


def test_a_model_without_such_tokens():
    assert surrounding_tokens(AutoTokenizer.from_pretrained(MODEL)) == ([], [])


def test_a_segment_begins_anew_and_the_given_one_stays():
    segments = torch.arange(3, 15).view(3, 4)
    given = segments.clone()
    assert begin_with(segments, [2, 1]).tolist() == [[2, 1, 5, 6], [2, 1, 9, 10], [2, 1, 13, 14]]
    assert begin_with(segments, []).equal(given)
    assert segments.equal(given)


CHAT = [{"role": "user", "content": "8"}]


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("$A", "3 4", [3, 4]),
        ("<s> $A", "3 4", [1, 3, 4]),
        ("<s> $A", "<s> 3 4", [1, 3, 4]),
        ("$A", CHAT, [1, 8]),
        ("<s> $A", CHAT, [1, 8]),
        ("$A", ("3", CHAT, "4 </s>", "5"), [3, 2, 1, 8, 4, 2, 5, 2]),
        ("$A", (CHAT, "3"), [1, 8, 3, 2]),
        ("<s> $A", ("<s> 3 </s>", "4"), [1, 3, 2, 1, 4, 2]),
        ("$A </s>", ("3", "4"), [3, 2, 4, 2]),
        ("<s> $A </s>", ("<s> 3", "4"), [1, 3, 2, 1, 4, 2]),
    ],
)
def test_each_text_begins_and_ends_once(template, text, expected):
    """Oracle: by hand. Rows that were rendered before hold their special tokens; a chat ends as its template says."""
    tokenizer = number_tokenizer(template)
    tokenizer.chat_template = "{% for m in messages %}<s> {{ m.content }}{% endfor %}"
    assert encode_document(tokenizer, text).tolist() == expected


def test_a_template_that_writes_the_date_writes_the_same_tomorrow():
    tokenizer = number_tokenizer()
    tokenizer.chat_template = """{% set day = strftime_now('%d %b') %}{{ day }} {{ strftime_now("%Y") }} 8"""
    assert written(tokenizer, CHAT) == "26 Jul 2024 8"
    assert rendered(tokenizer, CHAT) == f"{datetime.now():%d %b %Y} 8"


def test_a_template_without_a_role_names_the_roles():
    tokenizer = number_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(CheckpointError, match="cannot write messages of system, user: no system role; give other"):
        written(tokenizer, [{"role": "system", "content": "3"}, *CHAT, *CHAT])


def test_the_package_for_a_sentencepiece_file_is_named(tmp_path, monkeypatch):
    """transformers itself asks for tiktoken, which it tries last."""
    monkeypatch.setattr("hasslefree.models.tokenizer.is_sentencepiece_available", lambda: False)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match="needs a package: `pip install sentencepiece protobuf`"):
        load_tokenizer(str(tmp_path))
