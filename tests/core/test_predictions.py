"""KL divergence of predictions, by the definition in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hasslefree.checkpoint.record import kl_record
from hasslefree.core.predictions import Comparison, kl_by_token, quantile
from hasslefree.errors import ModelError


def logits(seed, tokens=37, vocabulary=11, scale=3.0):
    return scale * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("entries", [1, 30, 2**20])
def test_kl_is_that_of_torch_in_float64(entries, monkeypatch):
    """Oracle: torch.nn.functional.kl_div. A few rows at a time give the same as all at once."""
    monkeypatch.setattr("hasslefree.core.predictions.ENTRIES", entries)
    dense, compressed = logits(0), logits(1)
    p, q = dense.double().log_softmax(-1), compressed.double().log_softmax(-1)
    expected = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl_by_token(dense, compressed).double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(kl_by_token(compressed, dense).double(), expected, rtol=0.1)


def test_a_token_that_both_rule_out_has_no_part_in_it():
    dense, compressed = logits(0), logits(1)
    expected = kl_by_token(dense[:, 1:], compressed[:, 1:])
    dense[:, 0] = compressed[:, 0] = -math.inf
    torch.testing.assert_close(kl_by_token(dense, compressed), expected)


def test_a_token_that_one_rules_out_leaves_finite_figures():
    dense, compressed = logits(0), logits(1)
    compressed[3, 0] = -math.inf
    comparison = Comparison()
    comparison.add(dense, compressed)
    assert kl_record(comparison)["mean"] > 1e30


class OnAppleGPU(torch.Tensor):
    """A tensor that refuses float64 until it is brought to the CPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.double:
            raise TypeError("MPS has no float64")
        if function is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        return super().__torch_function__(function, types, args, kwargs)


def test_divergences_are_sorted_where_the_gpu_has_no_float64():
    comparison = Comparison()
    comparison.kl = [torch.tensor([2.0, 1.0]).as_subclass(OnAppleGPU), torch.tensor([0.5]).as_subclass(OnAppleGPU)]
    assert comparison.sorted().tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("count", [1, 2, 37, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_quantiles_are_those_of_numpy(count, share):
    ascending = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count)).sort().values
    assert quantile(ascending, share) == pytest.approx(np.quantile(ascending.numpy(), share), rel=1e-12)


def test_a_record_summarises_all_tokens_of_all_calls():
    """Oracle: numpy on the definition in float64."""
    dense, compressed = logits(0, 200), logits(1, 200)
    comparison = Comparison()
    for rows in (slice(0, 50), slice(50, 51), slice(51, 200)):
        comparison.add(dense[rows], compressed[rows])
    p, q = (torch.softmax(each.double(), -1).numpy() for each in (dense, compressed))
    kl = (p * np.log(p / q)).sum(-1)
    assert kl_record(comparison) == {
        "mean": pytest.approx(kl.mean(), rel=1e-5),
        "median": pytest.approx(np.median(kl), rel=1e-5),
        "percentile_99": pytest.approx(np.percentile(kl, 99), rel=1e-5),
        "same_top_token": (p.argmax(-1) == q.argmax(-1)).mean(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_and_itself_differ_by_nothing(dtype):
    dense = logits(0).to(dtype)
    comparison = Comparison()
    comparison.add(dense, dense.clone())
    assert kl_record(comparison) == {"mean": 0, "median": 0, "percentile_99": 0, "same_top_token": 1}


def test_rounding_makes_no_kl_negative():
    """A record holds no negative divergence. Without the floor, half of these are below zero by rounding."""
    dense = logits(0, tokens=500, vocabulary=200)
    assert kl_by_token(dense, dense + 1e-6 * logits(1, 500, 200)).min() >= 0


def test_there_is_no_record_of_nothing_and_of_nan():
    assert kl_record(Comparison()) is None
    comparison = Comparison()
    comparison.add(logits(0), logits(1) * math.nan)
    assert kl_record(comparison) is None


def test_vocabularies_of_different_sizes_are_refused():
    with pytest.raises(ModelError, match=r"predicts one of 11 tokens and the other model one of 12, .* dense="):
        Comparison().add(logits(0), logits(1, vocabulary=12))
