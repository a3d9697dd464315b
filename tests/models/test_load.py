"""Loading a model: its dtype, and the length of its segments."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError
from hasslefree.models.load import load_model, resolve_seqlen
from tests.tiny_models import build, segments


@pytest.mark.parametrize(("asked", "found"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_the_dtype_asked_for_is_the_one_that_is_loaded_and_saved(asked, found, tmp_path):
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    assert load_model(str(tmp_path / "model"), asked, "cpu").dtype == found
    recipe = Recipe(method="wanda", dtype=asked)
    tokenizer = type("Tokenizer", (), {"save_pretrained": lambda self, folder: None})()
    hasslefree.compress(
        str(tmp_path / "model"), tmp_path / "out", recipe, segments=segments(), tokenizer=tokenizer, device="cpu"
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == found


@pytest.mark.parametrize(
    ("most", "asked", "expected"), [(64, None, 64), (4096, None, 2048), (64, 64, 64), (64, 10, 10), (4096, 4000, 4000)]
)
def test_the_segment_length(most, asked, expected):
    """2048 where nothing is said, or what the model takes if that is less; every length up to the most may be asked."""
    assert resolve_seqlen(build("llama", max_position_embeddings=most), asked) == expected
    with pytest.raises(ModelError, match=f"at most {most} tokens at once, asked for {most + 1}"):
        resolve_seqlen(build("llama", max_position_embeddings=most), most + 1)
