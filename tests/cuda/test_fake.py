"""The fake GPU itself: it computes what the CPU does, and refuses what CUDA refuses."""

import pytest
import torch
from torch import nn

from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.watch import watched

pytestmark = pytest.mark.nightly


def test_it_computes_what_the_cpu_does():
    """Oracle: the CPU, on views, writes through them, indices, autograd and what a module holds."""

    def steps(device):
        generator = torch.Generator(device=device).manual_seed(0)
        x = torch.randn(6, 8, generator=generator, device=device)
        x[1:, ::2] = 3.0
        x.t()[2].mul_(2)
        x[x > 2.5] -= 1
        x[torch.tensor([0, 3])] += torch.tensor(1.0)
        layer = nn.Linear(8, 3).to(device)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
        layer(x).square().sum().backward()
        layer.weight.data = layer.weight.data.double()
        return [x, layer.weight.grad, layer.weight.detach(), torch.linalg.qr(x.double()).R, x.sum().cpu()]

    here = steps("cpu")
    with fake_cuda():
        there = steps("cuda")
        assert all(each.device.type == "cuda" for each in there[:-1])
        assert type(there[-1]) is torch.Tensor
        found = [each.cpu() for each in there]
    for one, other in zip(here, found, strict=True):
        assert torch.equal(one, other)


def test_it_refuses_two_devices_and_numpy():
    here = torch.ones(3, 3)
    with fake_cuda():
        there = here.cuda()
        for mixed in (
            lambda: here + there,
            lambda: here[there.long()],
            lambda: torch.equal(here, there),
            lambda: torch.where(there > 0, here, 1.0),
            lambda: here.mul_(there),
            lambda: there + there.to("cuda:1"),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\) first"):
            there.numpy()
        assert (there * torch.tensor(2.0))[torch.tensor([1])].tolist() == [[2.0] * 3]


def test_a_watch_counts_waits_and_float64():
    with fake_cuda() as gpu, watched(gpu) as watch:
        x = torch.zeros(100, 100, device="cuda")
        (x + 1).double()
        assert (sum(watch.waits.values()), sum(watch.doubles.values())) == (0, 1)
        _ = x.sum().item(), bool((x == 0).all()), x[x > 0], x.cpu(), torch.equal(x, x)
        assert sum(watch.waits.values()) == 5
