"""A loaded compressed model goes wherever a model goes: generation, compilation, casts."""

import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from tests.tiny_models import FAMILIES, build, logits, segments


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        hasslefree.compress(build(family), root / family, Recipe(rank=2, method="eora"), segments=segments())
    return root


@pytest.fixture
def model(folders):
    return AutoModelForCausalLM.from_pretrained(folders / "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_with_the_cache_is_that_without(folders, family):
    """Oracle: the largest logit of whole forward passes, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folders / family)
    prompt = expected = segments(samples=2, seqlen=8)
    for _ in range(12):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    for use_cache in (True, False):
        found = model.generate(
            prompt, max_new_tokens=12, do_sample=False, use_cache=use_cache, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(found, expected), f"use_cache={use_cache}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_model_is_the_one_loaded_in_that_dtype(folders, model, dtype):
    cast, loaded = model.to(dtype), AutoModelForCausalLM.from_pretrained(folders / "llama", dtype=dtype)
    assert {p.dtype for p in cast.parameters()} == {dtype}
    found, expected = cast.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    # The frequencies of the rotary embedding, which no file holds, are cast by to() and not by from_pretrained().
    want = logits(loaded, segments())
    close = 4 * torch.finfo(dtype).eps * want.abs().max().item()
    torch.testing.assert_close(logits(cast, segments()), want, rtol=0, atol=max(close, 1e-7))


def test_saving_and_loading_never_pickle(folders, model, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, segments()), logits(model, segments()))
    names = {path.name for folder in (folders / "llama", tmp_path / "again") for path in folder.iterdir()}
    assert {name.rpartition(".")[2] for name in names} <= {"json", "safetensors", "md", "png"}
