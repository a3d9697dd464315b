from dataclasses import dataclass

import pytest
import torch

from hasslefree.distributed import ALONE
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import PANEL, MomentSums, with_batching


def test_the_gram_of_bfloat16_inputs_is_that_of_their_values():
    """Oracle: float64. More inputs than a panel, of very different size, and a last segment that is shorter."""
    generator = torch.Generator().manual_seed(0)
    width = PANEL["cpu"] + 40
    rows = (torch.randn(600, width, generator=generator) * torch.logspace(-3, 3, width)).bfloat16()
    sums = MomentSums(256)
    sums.take(rows[:512])
    sums.take(rows[512:])
    gram = sums.gram(ALONE)
    exact = rows.double().T @ rows.double() / 600
    norms = exact.diagonal().sqrt()
    assert gram.tokens == 600
    assert gram.matrix.dtype == torch.float32
    assert ((gram.matrix.double() - exact) / torch.outer(norms, norms)).abs().max() < 1e-6
    torch.testing.assert_close(gram.mean.double(), rows.double().mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("column", "offset"), [(0, 0.0), (0, 9.0), (3, 9.0)])
def test_a_block_takes_batches_where_segments_do_not_change_each_other(column, offset, tmp_path):
    """Oracle: a block that adds to a hidden state, or to the column beside them, what depends on the batch."""
    hidden = Activations((2, 5, 4), torch.float32, torch.device("cpu"), "device", tmp_path)
    for index in range(2):
        hidden[index] = torch.ones(5, 4)

    @dataclass(frozen=True)
    class Call:
        batched: bool = False

        def hidden(self, states):
            return states[..., :3]

        def run(self, block, states):
            output = states.clone()
            output[..., column] += offset * (len(states) if self.batched else 1)
            return output

    assert with_batching(torch.nn.Linear(4, 4), Call(), hidden).batched == (offset == 0)
