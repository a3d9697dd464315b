"""Layers in chunks of rows: feasible, close to all rows at once, and taken where memory runs out."""

import logging
from dataclasses import dataclass

import pytest
import torch

import hasslefree
from hasslefree import Gram, Recipe
from hasslefree.core.budgets import Budget
from hasslefree.core.patterns import Structured
from hasslefree.core.protocols import Method
from hasslefree.errors import MemoryShortError
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods import build_method
from hasslefree.solve.methods.joint import Joint
from hasslefree.solve.row_chunks import InRowChunks
from tests.tiny_models import build, segments

METHODS = ["joint", "3basil", "hassle-free", "oats", "eora"]


def problem(out=24, width=32, tokens=200):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator)
    return torch.randn(out, width, generator=generator), Gram.from_activations(x)


def solved(weight, gram, method, pattern, rank):
    return solve_layer(weight, gram, method, method.prepare(gram), pattern, rank, 0)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("pattern", "sparsity"), [("2:4", None), ("row", 0.6), ("unstructured", 0.7)])
@pytest.mark.parametrize("chunks", [2, 5])
def test_chunks_keep_the_budget_and_most_of_the_quality(name, pattern, sparsity, chunks):
    """Oracles: the count of the pattern; and the pruner alone, which has no L to win with."""
    weight, gram = problem()
    exact, rank = Budget(pattern, 4, sparsity).resolve(*weight.shape)
    method = build_method(name)
    found = solved(weight, gram, InRowChunks(method, chunks, gram), exact, rank)
    assert found.sparse.count_nonzero() <= exact.kept((24, 32))
    assert torch.linalg.matrix_rank(found.low_rank.product()) <= 4
    alone = solved(weight, gram, method, exact, 0)
    assert found.relative_error < 0.9 * alone.relative_error
    assert found.remarks[-1] == f"not enough memory for all rows at once: solved in {chunks} chunks of rows"


def test_without_l_rows_are_independent():
    """Oracle: all rows at once. Each row's S depends on its weight and on H alone, for N:M."""
    weight, gram = problem()
    exact, _ = Budget("2:4").resolve(*weight.shape)
    method = build_method("sparsegpt")
    whole = solved(weight, gram, method, exact, 0)
    parts = solved(weight, gram, InRowChunks(method, 3, gram), exact, 0)
    torch.testing.assert_close(parts.sparse, whole.sparse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "caldera"])
def test_codes_of_chunks_are_those_of_s(name):
    """Oracle: S itself, and for a rank of 0 all rows at once."""
    weight, gram = problem()
    exact, _ = Budget("2:4").resolve(*weight.shape)
    method = build_method(name, group_size=8)
    whole, parts = (solved(weight, gram, way, exact, 0) for way in (method, InRowChunks(method, 3, gram)))
    assert torch.equal(parts.quantised.codes, whole.quantised.codes)
    if name == "caldera":
        parts = solved(weight, gram, InRowChunks(method, 3, gram), exact, 4)
        assert torch.equal(parts.quantised.values(), parts.sparse)


def test_whole_channels_cannot_be_cut():
    weight, gram = problem()
    with pytest.raises(MemoryShortError, match="pattern structured needs all its rows at once"):
        solved(weight, gram, InRowChunks(Joint(), 2, gram), Structured(16), 2)


@dataclass(frozen=True)
class Narrow(Method):
    """A device that has no room for more than so many rows."""

    method: Joint
    rows: int

    def check(self, rank):
        self.method.check(rank)

    def prepare(self, gram):
        return self.method.prepare(gram)

    def solve(self, weight, *rest):
        if len(weight) > self.rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(weight)} rows")
        return self.method.solve(weight, *rest)


def test_memory_that_runs_out_is_logged_and_remarked(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hasslefree.recipe.resolved.method_of", lambda recipe: Narrow(Joint(rounds=5), 20))
    with caplog.at_level(logging.WARNING):
        report = hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2), segments=segments())
    remarks = {layer.name.rpartition(".")[2]: layer.remarks for layer in report.layers}
    cut = {name for name, found in remarks.items() if any("chunks of rows" in remark for remark in found)}
    assert cut == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # of 32, 32, 48, 48 and 32 rows
    assert "not enough memory for all rows at once: solved in 4 chunks of rows" in remarks["gate_proj"]
    assert "not enough memory for a layer (48, 32) in 1 chunk(s) of rows: CUDA out of memory: 48 rows" in caplog.text


def test_a_layer_that_fits_in_no_chunks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hasslefree.recipe.resolved.method_of", lambda recipe: Narrow(Joint(rounds=5), 0))
    with pytest.raises(MemoryShortError, match=r"layer of 32×32, even when .* 16 chunks.*model\.layers\.0"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2), segments=segments())


@dataclass(frozen=True)
class Unprepared(Narrow):
    """A device that has no room to prepare, so many times."""

    times: list[int]

    def prepare(self, gram):
        if self.times:
            self.times.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.method.prepare(gram)


def test_preparing_is_tried_again_and_then_named(tmp_path, monkeypatch, caplog):
    method = Unprepared(Joint(rounds=5), 100, [1])
    monkeypatch.setattr("hasslefree.recipe.resolved.method_of", lambda recipe: method)
    with caplog.at_level(logging.WARNING):
        hasslefree.compress(build("llama"), tmp_path / "one", Recipe(rank=2), segments=segments())
    assert "not enough memory to factorise the Gram matrix of 32 inputs: CUDA out of memory" in caplog.text
    method.times[:] = [1, 1]
    with pytest.raises(MemoryShortError, match=r"factorise the Gram matrix .* 32 inputs(.|\n)*model\.layers\.0"):
        hasslefree.compress(build("llama"), tmp_path / "two", Recipe(rank=2), segments=segments())
