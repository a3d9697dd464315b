"""The embedded model and its texts."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hasslefree.demo import run as demo
from hasslefree.demo.run import (
    CALIBRATION,
    HELD_OUT,
    MODEL,
    NEW_TOKENS,
    PROMPT,
    demo_table,
    held_out_perplexity,
    recipes,
    run_demo,
    sample_table,
)
from hasslefree.texts.sources import calibration_documents


@pytest.mark.nightly
def test_the_held_out_perplexity_is_the_one_that_training_recorded():
    """Oracle: what scripts/train_demo_model.py measured in the end."""
    assert held_out_perplexity(MODEL, None) == pytest.approx(31.031, rel=5e-3)


def test_the_held_out_text_is_not_in_the_calibration_text():
    """No run of twelve words of one is in the other."""

    def runs(text):
        words = text.split()
        return {" ".join(words[i : i + 12]) for i in range(len(words) - 11)}

    calibration = set().union(*map(runs, calibration_documents(str(CALIBRATION))))
    assert not calibration & runs(HELD_OUT.read_text())


def test_the_tokenizer_is_lossless():
    tokenizer, text = AutoTokenizer.from_pretrained(MODEL), HELD_OUT.read_text()[:2000]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def continuation(folder):
    """Oracle: transformers' own `generate`."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    given = tokenizer(PROMPT, return_tensors="pt")
    whole = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(whole[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_demo_compares_what_the_readme_says(tmp_path, monkeypatch):
    """Few samples and rounds: the table and the folders, not the figures."""
    quick = {
        name: dataclasses.replace(
            recipe,
            samples=2,
            seqlen=32,
            rounds=None if recipe.method == "sparsegpt" else 1,
            match_predictions=64 if recipe.resolve().match_predictions else None,
        )
        for name, recipe in recipes(1).items()
        if recipe.method in ("sparsegpt", "joint")
    }
    (tmp_path / "short.txt").write_text(HELD_OUT.read_text()[:4000])
    monkeypatch.setattr(demo, "HELD_OUT", tmp_path / "short.txt")
    monkeypatch.setattr(demo, "recipes", lambda rounds: quick)
    rows, samples = run_demo(tmp_path / "out", 1)
    assert [row.method for row in rows] == ["dense", *quick]
    assert demo_table(rows).row_count == len(rows)
    dense, pruned, *_ = rows
    assert pruned.perplexity > dense.perplexity
    assert 0.5 < pruned.parameters / dense.parameters < 0.7
    assert samples == {"dense": continuation(MODEL), list(quick)[-1]: continuation(tmp_path / "out" / "3-joint")}
    assert sample_table(samples).row_count == 1
    methods = [recipe.method for recipe in recipes(7).values()]
    assert methods == ["sparsegpt", "hassle-free", "joint", "joint"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"1-sparsegpt", "2-joint", "3-joint"}
