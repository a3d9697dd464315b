"""Advice on patterns and ranks within a budget of bytes."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import hasslefree
from hasslefree import Recipe
from hasslefree.core.patterns import SemiStructured
from hasslefree.errors import BudgetError, HasslefreeError, RecipeError
from hasslefree.levers.sensitivity import ProbedLayer
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calls import hooks
from hasslefree.models.sites import find_sites
from hasslefree.models.streaming import Weights
from hasslefree.recipe.plan import weights_on_disk
from hasslefree.run.advise import PATTERNS, STEP, advise, candidates, costs
from hasslefree.run.preflight import preflight
from hasslefree.units import parse_size
from tests.tiny_models import build, segments, tensors_of

RESOLVED = Recipe(rank=0, effort="fast").resolve(with_text=False)


def within(model, budget):
    return candidates(model, find_blocks(model), RESOLVED, budget)


@pytest.mark.parametrize("budget", [28_000, 32_000, 36_000])
def test_each_pattern_has_the_largest_rank_that_the_budget_allows(budget, tmp_path):
    """Oracle: the tensors of a compression with it, and of one with eight ranks more."""
    model = build("llama", torch.bfloat16)
    found = within(model, budget)
    assert 1 <= len(found) <= len(PATTERNS)
    assert [PATTERNS.index(each.pattern) for each in found] == sorted({PATTERNS.index(each.pattern) for each in found})

    def stored(pattern, rank):
        out = tmp_path / f"{pattern}-{rank}"
        recipe = Recipe(pattern=pattern, rank=rank, method="eora" if rank else "magnitude")
        hasslefree.compress(build("llama", torch.bfloat16), out, recipe, segments=segments())
        return sum(tensor.nbytes for tensor in tensors_of(out).values())

    for each in found:
        assert each.rank % STEP == 0
        assert stored(each.pattern, each.rank) == each.bytes <= budget
        assert each.rank + STEP > 32 // 2 or stored(each.pattern, each.rank + STEP) > budget


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_a_choice_costs_is_the_sum_over_layers(family, tmp_path, monkeypatch):
    """Oracle: ½ mean (g_tᵀ ΔW x_t)² of every layer, with g by autograd through the whole model at once, in float64."""
    labels = torch.arange(16) * 3 % 64
    monkeypatch.setattr("hasslefree.levers.sensitivity.sample_labels", lambda logits, generator: labels[: len(logits)])

    def solved(self, pattern, rank, seed):
        kept = torch.where(pattern.mask(self.weight.abs()), self.weight, 0)
        return kept + 0.01 * rank * self.weight

    monkeypatch.setattr(ProbedLayer, "solved", solved)
    model, tokens = build(family), segments(2, 16)
    chosen = within(model, weights_on_disk(model, []) - 1000)
    assert len(chosen) > 2
    blocks = find_blocks(model)
    options = {"storage": "device", "folder": tmp_path}
    walk, _ = preflight(model, blocks, Weights(model, model.device), chosen[0].plan, tokens[:1], options)
    found = list(costs(walk, chosen, tokens, 0))
    sites = {f"{blocks.prefix(i)}.{n}": s for i, b in enumerate(blocks.modules) for n, s in find_sites(b).items()}
    x, y = {}, {}
    handles = [site.on_input(lambda rows, name=name: x.setdefault(name, rows)) for name, site in sites.items()]
    handles += [site.on_output(lambda rows, name=name: y.setdefault(name, rows)) for name, site in sites.items()]
    with hooks(handles):
        predicted = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(predicted.flatten(0, 1), labels.repeat(2), reduction="sum")
    slopes = dict(zip(y, torch.autograd.grad(loss, list(y.values())), strict=True))
    for candidate, given in zip(chosen, found, strict=True):
        assert (given.pattern, given.rank, given.bytes) == (candidate.pattern, candidate.rank, candidate.bytes)
        total = 0.0
        for name, site in sites.items():
            n, m = map(int, candidate.pattern.split(":"))
            weight = site.weight().double()
            kept = torch.where(SemiStructured(n, m).mask(site.weight().abs()), weight, 0)
            change = weight - kept - 0.01 * candidate.rank * weight
            moved = (slopes[name].flatten(0, -2).double() @ change * x[name].flatten(0, -2).double()).sum(-1)
            total += float(moved.square().mean()) / 2
        assert given.divergence == pytest.approx(total, rel=1e-3)


def test_more_bytes_lose_less(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(str(3 + (7 * i * i) % 61) for i in range(500)))
    recipe = Recipe(calibration=str(tmp_path / "text.txt"), samples=4, seqlen=16)
    best = [advise(build("llama"), budget, recipe, tokenizer=words)[0] for budget in (50_000, 60_000, 70_000)]
    for less, more in itertools.pairwise(best):
        assert more.divergence < less.divergence


def words(text, verbose=False):
    """A tokenizer of numbers."""
    return {"input_ids": [int(word) for word in text.split()]}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1000, r"1\.0 kB is too small: .* takes \d+\.\d kB \(uncompressed: \d+\.\d kB\). Give a larger budget"),
        (33_000, r"33\.0 kB is too small"),
        (10**9, r"the uncompressed model takes .* the budget of 1\.0 GB: give a smaller budget"),
    ],
)
def test_a_budget_that_means_nothing(budget, message):
    with pytest.raises(BudgetError, match=message):
        within(build("llama"), budget)


def test_a_layer_that_is_not_there_is_said_to_be_that():
    resolved = Recipe(rank=0, effort="fast", leave_dense=("*.none",)).resolve(with_text=False)
    with pytest.raises(HasslefreeError, match="none"):
        candidates(build("llama"), find_blocks(build("llama")), resolved, 50_000)


@pytest.mark.parametrize("fields", [{"rank": 4}, {"effort": "best"}, {"pattern": "2:4", "method": "3basil"}])
def test_what_is_to_be_found_is_not_to_be_given(fields):
    with pytest.raises(RecipeError, match=f"leave out {', '.join(fields)}; only calibration, samples"):
        advise(build("llama"), 70_000, Recipe(**fields))


@pytest.mark.parametrize(("text", "size"), [("150MB", 150 * 10**6), ("1.5 gb", 15 * 10**8), ("20000", 20000)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-3MB", "1.5.2", "3 MiB"])
def test_what_is_no_size(text):
    with pytest.raises(BudgetError, match="such as advise='150MB'"):
        parse_size(text)
