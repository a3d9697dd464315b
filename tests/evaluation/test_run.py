"""An evaluation takes what it was asked for."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.evaluation.run import evaluate_perplexity
from hasslefree.texts import calibration_documents


def test_an_evaluation_takes_its_dtype_and_window():
    """Oracle: `perplexity` of the model loaded by transformers."""
    found = evaluate_perplexity(str(MODEL), [f"{CALIBRATION}[:1]"], 48, 200, dtype="float32", device="cpu")
    tokens = AutoTokenizer.from_pretrained(MODEL)(calibration_documents(f"{CALIBRATION}[:1]")[0])["input_ids"][:200]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = hasslefree.perplexity(model, torch.tensor(tokens), 48)
    assert found["dtype"] == "float32"
    assert found["perplexity"][f"{CALIBRATION}[:1]"] == pytest.approx(dataclasses.asdict(expected), rel=1e-5)
