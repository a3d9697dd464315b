from types import SimpleNamespace

import pytest
import torch

from hasslefree.models.activations import Activations
from hasslefree.models.moments import PANEL, Sums, takes_batches


def test_the_gram_of_bfloat16_inputs_is_that_of_their_values():
    """Oracle: float64. More inputs than a panel, of very different size, and a last segment that is shorter."""
    generator = torch.Generator().manual_seed(0)
    width = PANEL["cpu"] + 40
    rows = (torch.randn(600, width, generator=generator) * torch.logspace(-3, 3, width)).bfloat16()
    sums = Sums(256)
    sums.take(rows[:512], None)
    sums.take(rows[512:], None)
    gram = sums.moments(lambda tensor: None).gram
    exact = rows.double().T @ rows.double() / 600
    norms = exact.diagonal().sqrt()
    assert gram.tokens == 600
    assert gram.matrix.dtype == torch.float32
    assert ((gram.matrix.double() - exact) / torch.outer(norms, norms)).abs().max() < 1e-6
    torch.testing.assert_close(gram.mean.double(), rows.double().mean(0), rtol=1e-5, atol=1e-6)


def test_the_drift_is_between_the_values_of_two_streams():
    """Oracle: float64."""
    generator = torch.Generator().manual_seed(0)
    here = torch.randn(300, 24, generator=generator).bfloat16()
    there = (here.float() + 0.05 * torch.randn(300, 24, generator=generator)).bfloat16()
    sums = Sums(128)
    sums.take(here, there)
    drift = sums.moments(lambda tensor: None).drift
    exact = here.double().T @ (there.double() - here.double()) / 300
    torch.testing.assert_close(drift.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("column", "offset"), [(0, 0.0), (0, 9.0), (3, 9.0)])
def test_a_block_takes_batches_where_segments_do_not_change_each_other(column, offset, tmp_path):
    """Oracle: a block that adds to a hidden state, or to the column beside them, what depends on the batch."""
    hidden = Activations((2, 5, 4), torch.float32, torch.device("cpu"), "device", tmp_path)
    for index in range(2):
        hidden[index] = torch.ones(5, 4)

    def run(block, states):
        found = states.clone()
        found[..., column] += offset * len(states)
        return found

    call = SimpleNamespace(run=run, hidden=lambda states: states[..., :3])
    assert takes_batches(torch.nn.Linear(4, 4), call, hidden) == (offset == 0)
