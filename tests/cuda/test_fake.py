"""The fake GPU itself: it computes what the CPU does, and refuses what CUDA refuses."""

import pytest
import torch
from torch import nn

from tests.cuda.fake_cuda import CudaTensor, fake_cuda
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


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: there @ here,
        lambda here, there: here[there.long()],
        lambda here, there: torch.equal(here, there),
        lambda here, there: torch.where(there > 0, here, 1.0),
        lambda here, there: here.mul_(there),
        lambda here, there: there + there.to("cuda:1"),
        lambda here, there: there.to("cuda:1") + there[0, 0],
    ],
)
def test_it_refuses_tensors_on_two_devices(mixed):
    here = torch.ones(3, 3)
    with fake_cuda(), pytest.raises(RuntimeError, match="same device"):
        mixed(here, here.cuda())


def test_it_refuses_numpy():
    with fake_cuda(), pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\) first"):
        torch.ones(3, device="cuda").numpy()


def test_numbers_of_the_cpu_and_its_indices_go_with_any_device():
    with fake_cuda():
        x = torch.arange(6.0, device="cuda").view(2, 3)
        assert (x * torch.tensor(2.0))[torch.tensor([1])].tolist() == [[6.0, 8.0, 10.0]]


def test_bytes_are_those_of_living_storages():
    """Oracle: by hand. A view takes nothing, a write in place nothing, what is dropped is given back."""
    with fake_cuda(memory=1000) as gpu:
        x = torch.zeros(10, device="cuda")
        y = x[2:5]
        assert gpu.bytes == 40
        del x
        y += 1
        assert gpu.bytes == 40
        z = y * 2
        assert (gpu.bytes, gpu.peak) == (52, 52)
        del y, z
        assert (gpu.bytes, gpu.peak) == (0, 52)
        assert torch.cuda.mem_get_info() == (1000, 1000)


def test_a_watch_counts_waits_and_float64():
    with fake_cuda() as gpu, watched(gpu) as watch:
        x = torch.zeros(100, 100, device="cuda")
        (x + 1).double()
        assert (sum(watch.waits.values()), sum(watch.doubles.values())) == (0, 1)
        _ = x.sum().item(), bool((x == 0).all()), x[x > 0], x.cpu(), torch.equal(x, x)
        assert sum(watch.waits.values()) == 5


def test_shapes_alone_will_do():
    with fake_cuda("meta") as gpu:
        x = torch.empty(1 << 20, 1 << 20, device="cuda", dtype=torch.bfloat16)
        assert (x @ x).shape == x.shape
        assert gpu.peak == 2 * 2 * (1 << 40)
        assert isinstance(x, CudaTensor)
        assert x[:2, :3].cpu().tolist() == [[0.0] * 3] * 2
