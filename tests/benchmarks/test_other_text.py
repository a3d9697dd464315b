"""The errors of layers on texts that they were not fitted on."""

import pytest
import torch
from other_text import errors_by_text

from hasslefree import Gram, decompose


def test_errors_are_those_of_the_outputs_on_each_text():
    """Oracles: the error that `decompose` reports on its own text, and the definition on another one."""
    generator = torch.Generator().manual_seed(0)
    fitted, other = torch.randn(2, 200, 16, generator=generator)
    weight = torch.randn(8, 16, generator=generator)
    grams = {"fitted": Gram.from_activations(fitted), "other": Gram.from_activations(other)}
    solved = decompose(weight, grams["fitted"], "2:4", 2)
    found = errors_by_text(weight, solved.product(), grams)
    outputs = other @ weight.T
    lost = (outputs - other @ solved.product().T).square().sum() / outputs.square().sum()
    assert found["fitted"] == pytest.approx(solved.relative_error, rel=1e-4)
    assert found["other"] == pytest.approx(lost.item(), rel=1e-4)
    assert found["other"] > found["fitted"]
