import pytest
import torch

import hasslefree
from hasslefree import DSNoT, Gram, Magnitude, Row, SemiStructured, SparseGPT, Structured, Unstructured, Wanda
from hasslefree.errors import MomentError, ShapeError
from tests import oracles

PATTERNS = [SemiStructured(2, 4), SemiStructured(2, 8), Row(6), Unstructured(60), Structured(5)]


def layer(seed, out=9, width=16):
    """A layer whose inputs have means of their own, and the Gram of 200 of them."""
    weight, _ = oracles.problem(out, width, seed=seed, dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(200, width, generator=random, dtype=torch.float64)
    x = (x + torch.randn(width, generator=random, dtype=torch.float64)) * torch.rand(width, generator=random).double()
    return weight, Gram.from_activations(x)


def prune(pruner, weight, gram, pattern):
    return pruner.prune(weight, pruner.prepare(gram), pattern).sparse


def swapped(weight, mean, variance, kept, group, cycles):
    """DSNoT in words, entry by entry: the support of one row. weight, kept: lists."""
    width = len(weight)
    kept = list(kept)

    def expected(kept):
        lost = [k for k in range(width) if not kept[k]]
        return sum(weight[k] * mean[k] for k in lost) ** 2 + sum(weight[k] ** 2 * variance[k] for k in lost)

    for _ in range(cycles):
        error = sum(weight[k] * mean[k] for k in range(width) if not kept[k])
        gone = [k for k in range(width) if not kept[k]]
        if not gone:
            break
        back = max(gone, key=lambda k: error * weight[k] * mean[k] / variance[k])
        found = {}
        for out in range(width):
            if kept[out] and out // group == back // group:
                after = list(kept)
                after[back], after[out] = True, False
                found[out] = expected(after)
        if not found or min(found.values()) >= expected(kept) * (1 - 1e-12):
            break
        kept[back], kept[min(found, key=found.get)] = True, False
    return kept


@pytest.mark.parametrize(("pattern", "group"), [(SemiStructured(2, 4), 4), (SemiStructured(3, 8), 8), (Row(6), 16)])
@pytest.mark.parametrize("start", [Wanda(), Magnitude(), SparseGPT()], ids=lambda start: type(start).__name__)
@pytest.mark.parametrize("cycles", [1, 50])
def test_each_row_is_swapped_as_the_words_say(pattern, group, start, cycles):
    """Oracle: the definition, one entry at a time; and that the weights that stay are left as they are."""
    moved = False
    for seed in range(4):
        weight, gram = layer(seed)
        variance = (gram.diagonal - gram.mean**2).tolist()
        first = prune(start, weight, gram, pattern) != 0
        rows = zip(weight.tolist(), first.tolist(), strict=True)
        expected = [swapped(w, gram.mean.tolist(), variance, kept, group, cycles) for w, kept in rows]
        found = prune(DSNoT(start, cycles), weight, gram, pattern)
        assert torch.equal(found, weight * torch.tensor(expected))
        moved |= not torch.equal(found != 0, first)
    assert moved, "nothing was swapped: the problems cannot tell"


def test_whole_channels_are_swapped_by_the_sum_over_rows():
    """Oracle: the expected squared error of all rows, by definition: of one swap of channels, the best one out."""
    for seed in range(6):
        weight, gram = layer(seed)
        variance = gram.diagonal - gram.mean**2
        first = (prune(Wanda(), weight, gram, Structured(7)) != 0).any(0)

        def expected(kept, weight=weight, gram=gram, variance=variance):
            lost = weight * ~kept
            return float((lost @ gram.mean).square().sum() + (lost.square() * variance).sum())

        error = (weight * ~first) @ gram.mean
        score = (error @ weight) * gram.mean / variance
        back = max((k for k in range(16) if not first[k]), key=lambda k: float(score[k]))
        swaps = [first.clone() for k in range(16) if first[k]]
        for kept, out in zip(swaps, [k for k in range(16) if first[k]], strict=True):
            kept[back], kept[out] = True, False
        best = min([first, *swaps], key=expected)
        found = prune(DSNoT(cycles=1), weight, gram, Structured(7))
        assert torch.equal(found, weight * best)


def test_inputs_that_never_vary_are_no_trouble():
    """σ² = 0 and μ = 0, σ² = 0 and μ ≠ 0."""
    weight, gram = layer(0)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, [1, 5]], x[:, [2, 9]] = 0.0, 3.0
    gram = Gram.from_activations(x)
    result = hasslefree.decompose(weight, gram, "2:4", method="dsnot")
    assert torch.isfinite(result.sparse).all()
    assert not result.sparse[:, [1, 5]].any()


def test_without_a_mean_there_is_an_error_that_says_how_to_get_one():
    weight, h = oracles.problem(4, 8)
    with pytest.raises(MomentError, match="needs the mean of the inputs; .*Gram.from_activations"):
        hasslefree.decompose(weight, Gram(h, 9), "2:4", method="dsnot")
    with pytest.raises(ShapeError, match="shape \\(8,\\), got \\(4,\\)"):
        Gram(h, 9, torch.zeros(4))
