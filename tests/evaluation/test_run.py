"""An evaluation takes what it was asked for."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig

import hasslefree
from hasslefree.demo.run import CALIBRATION, HELD_OUT, MODEL
from hasslefree.errors import ArgumentError, ModelError, NonFiniteError
from hasslefree.evaluation.run import check_causal, evaluate, text_perplexity
from hasslefree.progress import Phases
from hasslefree.texts.hub import Protocol
from hasslefree.texts.sources import calibration_documents
from tests.tiny_models import build, number_tokenizer, segments


def test_an_evaluation_takes_its_dtype_and_window():
    """Oracle: `perplexity` of the model loaded by transformers."""
    found = evaluate(str(MODEL), [f"{CALIBRATION}[:1]"], seqlen=48, max_tokens=200, dtype="float32", device="cpu")
    tokens = AutoTokenizer.from_pretrained(MODEL)(calibration_documents(f"{CALIBRATION}[:1]")[0])["input_ids"][:200]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = hasslefree.perplexity(model, torch.tensor(tokens), 48)
    assert found["dtype"] == "float32"
    row = found["perplexity"][f"{CALIBRATION}[:1]"]
    assert row.pop("protocol") == dataclasses.asdict(Protocol())
    assert row.pop("first_tokens") == []
    expected = dataclasses.asdict(expected)
    assert expected.pop("dense") is expected.pop("kl") is None
    assert row == pytest.approx(expected, rel=1e-5)


def test_a_text_that_is_named_twice_is_measured_once():
    text = f"{CALIBRATION}[:1]"
    seen = []
    evaluate(str(MODEL), [text, text], seqlen=16, max_tokens=32, device="cpu", keep=lambda found: seen.append(1))
    assert len(seen) == 1


def test_a_model_in_the_cache_of_the_hub_has_its_name_there(tmp_path):
    folder = tmp_path / "models--org--tiny" / "snapshots" / "0123abcd"
    shutil.copytree(MODEL, folder)
    found = evaluate(str(folder), [f"{CALIBRATION}[:1]"], seqlen=16, max_tokens=32, device="cpu")
    assert found["model"] == "org/tiny"


FIELDS = {"wikitext2": "text", "ptb": "sentence", "c4": "text"}
JOINED = {"wikitext2": "\n\n", "ptb": " ", "c4": " "}


@pytest.mark.parametrize("name", FIELDS)
def test_public_texts_are_measured_as_published(name, monkeypatch):
    """Oracle: the protocol of SparseGPT's experiments, in words: join; the tokenizer's ids of the whole; as many whole
    windows as there are, of C4 the first 256 of 1,100 documents; exp of the mean of the windows' own mean losses."""
    window = 13
    words = HELD_OUT.read_text().split()
    documents = [" ".join(words[5 * i : 5 * i + 5]) for i in range(1300 if name == "c4" else 100)]
    monkeypatch.setattr("datasets.load_dataset", lambda **_: {FIELDS[name]: documents})
    found = evaluate(str(MODEL), [name], seqlen=window, batch=8, dtype="float32", device="cpu")["perplexity"][name]

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    text = JOINED[name].join(documents[:1100] if name == "c4" else documents)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    count = len(ids) // window
    assert count > 256 if name == "c4" else len(ids) % window, "nothing to drop"
    count = min(count, 256) if name == "c4" else count
    losses = []
    for i in range(count):
        piece = ids[None, i * window : (i + 1) * window]
        with torch.no_grad():
            losses.append(model(input_ids=piece, labels=piece).loss.item())
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / count), rel=1e-5)
    assert (found["tokens"], found["scored"]) == (count * window, count * (window - 1))
    assert found["protocol"]["joiner"] == JOINED[name]


def counted(before):
    """A tokenizer of digits that puts these ids before a text."""

    def tokenizer(text, verbose, add_special_tokens=True):
        return {"input_ids": before * add_special_tokens + [int(c) for c in text]}

    tokenizer.bos_token = None
    return tokenizer


@pytest.mark.parametrize(
    ("before", "protocol", "expected"),
    [
        ([0], Protocol(), [[0, 1, 2, 3], [0, 5, 6, 7]]),
        ([0], Protocol(first_token=False), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0], Protocol(special_tokens=False), [[0, 2, 3, 4], [0, 6, 7, 8]]),
        ([0], Protocol(special_tokens=False, first_token=False), [[1, 2, 3, 4], [5, 6, 7, 8]]),
        ([0, 0], Protocol(), [[0, 0, 1, 2], [0, 0, 5, 6], [0, 0]]),
        ([], Protocol(), [[1, 2, 3, 4], [5, 6, 7, 8]]),
    ],
)
def test_every_window_begins_as_the_tokenizer_begins_a_text(before, protocol, expected, tmp_path):
    """In place of its own first token, as in llama.cpp: the tokens that are scored stay. Oracle: windows by hand."""
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=4))

        def forward(self, input_ids, use_cache):
            seen.extend(input_ids.tolist())
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 9))

    (tmp_path / "t.txt").write_text("12345678")
    row = text_perplexity(Model(), counted(before), str(tmp_path / "t.txt"), protocol, None, None, 1, Phases())
    assert [window for window in seen if len(window) > 1] == expected
    assert row["first_tokens"] == (before if protocol.first_token else [])
    assert row["scored"] == sum(max(len(window) - max(len(row["first_tokens"]), 1), 0) for window in expected)


def test_a_first_token_raises_no_other_loss():
    """Oracle: transformers' loss of each window with its first token replaced, the mean over all scored tokens."""
    model = build("llama")
    model.get_output_embeddings().weight.data *= 30
    tokens = segments(1, 40)[0]
    losses = []
    for start in (0, 16, 32):
        window = tokens[start : start + 16].clone()
        window[0] = 1
        loss = model(input_ids=window[None], labels=window[None]).loss.item()
        losses += [loss] * (len(window) - 1)
    before = tokens.clone()
    found = hasslefree.perplexity(model, tokens, 16, 2, first=[1])
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert found.perplexity != pytest.approx(hasslefree.perplexity(model, tokens, 16, 2).perplexity, rel=1e-3)
    assert found.scored == len(losses)
    assert tokens.equal(before)


def test_the_flag_gives_the_windows_of_sparsegpt(tmp_path):
    build("llama").save_pretrained(tmp_path)
    number_tokenizer("<s> $A").save_pretrained(tmp_path)
    text = tmp_path / "numbers.txt"
    text.write_text(" ".join(map(str, segments(1, 64)[0].tolist())))
    rows = []
    for wanted in (True, False):
        results = evaluate(str(tmp_path), [str(text)], seqlen=16, first_token=wanted, device="cpu")
        rows.append(results["perplexity"][str(text)])
    assert [row["first_tokens"] for row in rows] == [[1], []]
    assert [row["protocol"]["first_token"] for row in rows] == [True, False]
    assert rows[0]["scored"] == rows[1]["scored"]
    assert rows[0]["perplexity"] != rows[1]["perplexity"]


@pytest.fixture
def pair(tmp_path):
    """A model, one with a little noise in its weights, and a text whose last window is shorter."""
    model = build("llama")
    model.get_output_embeddings().weight.data *= 30  # else all predictions are nearly uniform
    for name in ("dense", "changed"):
        model.save_pretrained(tmp_path / name)
        number_tokenizer("<s> $A").save_pretrained(tmp_path / name)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    (tmp_path / "t.txt").write_text(" ".join(map(str, segments(1, 103)[0].tolist())))
    return str(tmp_path / "changed"), str(tmp_path / "dense"), str(tmp_path / "t.txt")


def options(**more):
    return {"seqlen": 16, "device": "cpu", "dtype": "float32"} | more


def test_kl_is_measured_on_the_tokens_of_the_perplexity(pair):
    """Oracle: both models in float64 from transformers, the windows by hand, the definition by numpy."""
    changed, dense, text = pair
    found = evaluate(changed, [text], dense=dense, batch=3, **options())
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in (dense, changed)]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(dense)(Path(text).read_text())["input_ids"])
    kl, same = [], []
    for window in tokens.split(16):
        window[0] = 1
        with torch.no_grad():
            p, q = (model(input_ids=window[None]).logits[0, :-1].softmax(-1).numpy() for model in models)
        kl += (p * np.log(p / q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    row = found["perplexity"][text]
    assert row["scored"] == len(kl)
    assert row["kl"] == {
        "mean": pytest.approx(np.mean(kl), rel=1e-4),
        "median": pytest.approx(np.median(kl), rel=1e-4),
        "percentile_99": pytest.approx(np.percentile(kl, 99), rel=1e-4),
        "same_top_token": pytest.approx(np.mean(same)),
    }
    assert 0.1 < np.mean(same) < 1


def test_models_side_by_side_have_their_own_perplexities(pair):
    changed, dense, text = pair
    found = evaluate(changed, [text], dense=dense, **options())
    alone = [evaluate(name, [text], **options()) for name in (changed, dense)]
    found["perplexity"][text].pop("kl")
    assert found.pop("dense") == alone[1]
    assert found == alone[0]


def test_a_model_does_not_diverge_from_itself(pair):
    changed, _, text = pair
    row = evaluate(changed, [text], dense=changed, **options())["perplexity"][text]
    assert row["kl"] == {"mean": 0, "median": 0, "percentile_99": 0, "same_top_token": 1}


def test_models_of_different_vocabularies_are_not_compared(pair, monkeypatch):
    """By the tokens of the tokenizers, before any weights are read."""
    changed, _, text = pair
    monkeypatch.setattr("hasslefree.evaluation.run.load_model", None)
    with pytest.raises(ModelError, match="the vocabularies of .*changed and .* differ.*--no-kl"):
        evaluate(changed, [text], dense=MODEL)


def test_an_error_says_which_model_gives_nan(pair):
    changed, dense, text = pair
    model = AutoModelForCausalLM.from_pretrained(dense)
    model.get_output_embeddings().weight.data[5] = math.nan
    model.save_pretrained(dense)
    with pytest.raises(NonFiniteError, match="the dense model gives NaN"):
        evaluate(changed, [text], dense=dense, **options())


def test_results_are_handed_over_as_they_come(tmp_path):
    texts = []
    for name in ("a", "b"):
        texts.append(str(tmp_path / f"{name}.txt"))
        (tmp_path / f"{name}.txt").write_text("def f(x): return x")
    kept = []
    found = evaluate(str(MODEL), texts, keep=lambda results: kept.append(json.loads(json.dumps(results))))
    assert [list(results["perplexity"]) for results in kept] == [texts[:1], texts]
    assert kept[-1] == found
    assert "tasks" not in found


def test_a_model_that_sees_the_next_token_is_refused():
    """A BERT is loaded as a causal language model, and reads from both sides all the same."""
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(ModelError, match="BertLMHeadModel is not a decoder"):
        check_causal(AutoModelForCausalLM.from_config(config).eval())
    config.is_decoder = True
    check_causal(AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.parametrize("name", ["seqlen", "max_tokens", "batch", "limit"])
@pytest.mark.parametrize("value", [0, -5])
def test_counts_are_at_least_one(name, value):
    with pytest.raises(ArgumentError, match=rf"{name} must be at least 1, got {value}"):
        evaluate(str(MODEL), [str(HELD_OUT)], **{name: value})
