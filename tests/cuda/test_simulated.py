"""Seconds by a roofline. Oracle: by hand."""

import importlib

import pytest
import torch
from harness.fake_cuda import fake_cuda
from harness.guesses import Guesses
from harness.roofline import BANDWIDTH, LAUNCH, LINK, RATES, Roofline
from harness.sharing import LATENCY, LINKS, FakeRows, block_seconds

from hasslefree import SemiStructured
from hasslefree.planning.plan import LayerPlan
from hasslefree.solve.methods.joint import Joint

pytestmark = pytest.mark.nightly


def seconds(operation):
    """Of an operation on shapes alone."""
    with fake_cuda("meta") as gpu:
        x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
        roofline = Roofline()
        gpu.listeners.append(roofline)
        operation(x)
    return sum(roofline.total().values())


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: x @ x, 2 * 4096**3 / RATES["bfloat16"]),
        (lambda x: torch.mm(x, x, out_dtype=torch.float32), 2 * 4096**3 / RATES["bfloat16"]),
        (lambda x: x[:1] @ x, (4096**2 + 2 * 4096) * 2 / BANDWIDTH),
        (lambda x: x + x, 2 * 4096**2 * 2 / BANDWIDTH),
        (lambda x: x.t()[:2].unsqueeze(0), 0),
        (lambda x: x[0, :8] * 2, LAUNCH),
        (lambda x: x.cpu(), 2 * 4096**2 / LINK[False]),
    ],
)
def test_an_operation_takes_as_long_as_its_flops_or_its_bytes(operation, expected):
    assert seconds(operation) == pytest.approx(expected, rel=1e-6)


def test_what_is_read_of_shapes_says_that_all_is_well():
    with fake_cuda("meta") as gpu:
        gpu.instead |= Guesses().operations()
        x = torch.empty(8, 8, device="cuda")
        assert torch.isfinite(x).all()
        assert not (x < 0).any()
        assert torch.count_nonzero(x) > 3
        first, second = x.sum().item(), x.sum().item()
        assert 0 < second < first < 1
        assert x[x > 0].shape == (32,)


def test_an_exchange_takes_its_latency_and_its_bytes():
    """Oracle: a ring of four GPUs, by hand: each sends three quarters of a tensor, twice if it is added up."""
    roofline = Roofline()
    rows = FakeRows(10, 4, roofline)
    tensor = torch.empty(1000)
    rows.sum(tensor)
    assert roofline.total()["solving"] == pytest.approx(LATENCY["nvlink"] + 2 * 3000 / LINKS["nvlink"])
    rows.broadcast(tensor, 1)
    assert roofline.total()["solving"] == pytest.approx(2 * LATENCY["nvlink"] + 3 * 3000 / LINKS["nvlink"])
    assert (rows.count, rows.shape(tensor.view(2, 500))) == (3, (10, 500))


def test_gpus_that_share_a_layer_take_less_each():
    """Oracle: one GPU. Of its products of 256 rows two GPUs have one half each; those of H alone are not shared."""
    layer = LayerPlan.of((256, 64), SemiStructured(2, 4), 8, torch.bfloat16)
    method = Joint(rounds=10)
    one, two = (block_seconds(method, [{"down": layer}], processes) for processes in (1, 2))
    assert two["exchanges"] > one["exchanges"] == 0
    assert two["products, tf32"] <= one["products, tf32"]


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_a_compression_of_shapes_goes_through(effort, monkeypatch):
    """And takes no more memory than is planned."""
    simulation = importlib.import_module("gpu_simulated")
    monkeypatch.setattr(simulation, "SEGMENTS", (4, 64))
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(simulation, "SHAPES", simulation.SHAPES | small | {"vocab_size": 512})
    found = simulation.simulated(effort, 2)
    kinds = {"Grams", "solving", "forward passes"} | ({"allocation"} if effort == "best" else set())
    assert kinds <= found["seconds"].keys()
    assert 0 < found["peak_over_estimate"] <= 1
