"""Seconds that the solvers of a block would take on H100s that share the rows of its layers: by `harness.roofline`.

The real solver runs once, for the GPU with most rows, on a fake GPU with shapes alone. An exchange with the other GPUs
takes its latency and as long as its bytes do: an all-reduce sends everything about twice around a ring, a broadcast
once. Nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.fake_cuda import fake_cuda
from harness.guesses import Guesses
from harness.roofline import Roofline
from hasslefree import Gram
from hasslefree.core.patterns import of_rows
from hasslefree.core.protocols import Method
from hasslefree.core.rows import WHOLE, Rows
from hasslefree.distributed import World
from hasslefree.pipeline.layers import assign_layers, shared_layers
from hasslefree.planning.plan import LayerPlan
from hasslefree.solve.decompose import gathered, solve_layer

# GPUs that NVLink connects; bytes a second that an H100 sends over it, and over the network between nodes; and seconds
# that an exchange takes at least.
NODE = 8
LINKS = {"nvlink": 350e9, "network": 50e9}
LATENCY = {"nvlink": 30e-6, "network": 100e-6}


class FakeRows(Rows):
    """The first of `size` shares of `out` rows, with its exchanges noted as work of a roofline."""

    def __init__(self, out: int, size: int, roofline: Roofline):
        super().__init__(World(0, size), out)
        self.roofline = roofline
        self.link = "nvlink" if size <= NODE else "network"

    @property
    def count(self) -> int:
        """Rows of the largest share."""
        return -(-self.out // self.size)

    def local(self, whole: Tensor) -> Tensor:
        return whole[: self.count]

    def sum(self, tensor: Tensor) -> Tensor:
        return self._sent(tensor, 2 * tensor.nbytes)

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        return self._sent(tensor, tensor.nbytes)

    def gather(self, local: Tensor) -> Tensor:
        whole = local.new_empty(self.out, *local.shape[1:])
        return self._sent(whole, whole.nbytes)

    def _sent(self, tensor: Tensor, nbytes: int) -> Tensor:
        took = LATENCY[self.link] + nbytes * (self.size - 1) / self.size / LINKS[self.link]
        self.roofline.seconds["solving"]["exchanges"] += took
        return tensor


def block_seconds(method: Method, groups: list[Mapping[str, LayerPlan]], processes: int) -> Counter[str]:
    """Seconds by kind of operation for layers of a block, group after group, on the GPU that has most to do.

    Args:
        groups: the layers with one input each, that are solved before the next ones.
    """
    found: Counter[str] = Counter()
    for plans in groups:
        shared = shared_layers(method, plans, processes)
        loads: list[Counter[str]] = [Counter() for _ in range(processes)]
        for name, owner in assign_layers(plans, shared, processes).items():
            if owner is not None:
                loads[owner] += layers_seconds(method, [plans[name]], 1)
        together = layers_seconds(method, [plans[name] for name in sorted(shared)], processes)
        found += together + max(loads, key=lambda load: load.total())
    return found


def layers_seconds(method: Method, layers: list[LayerPlan], processes: int) -> Counter[str]:
    """Seconds by kind of operation for layers with one input, which so many processes share."""
    if not layers:
        return Counter()
    roofline, width = Roofline(), layers[0].spec.shape[1]
    with fake_cuda("meta", memory=1 << 50, capability=(9, 0)) as gpu:
        gpu.instead |= Guesses().operations()
        gpu.listeners.append(roofline)
        gram = Gram(torch.empty(width, width, device="cuda"), 1 << 18)
        prepared = method.prepare(gram)
        for layer in layers:
            rows = FakeRows(layer.spec.shape[0], processes, roofline) if processes > 1 else WHOLE
            weight = rows.local(torch.empty(layer.spec.shape, dtype=layer.dtype, device="cuda"))
            pattern = of_rows(layer.pattern, rows)
            gathered(solve_layer(weight, gram, method, prepared, pattern, layer.spec.rank, 0, rows=rows), rows)
    return sum(roofline.seconds.values(), Counter())
