"""Where the time of a model goes on one thread of a CPU: calls of torch and of Numba's kernels by part, and Python."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from numba.core.dispatcher import Dispatcher
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hasslefree.packed.kernels import masks, nibbles, tables
from hasslefree.packed.linear import SparseLowRankLinear

LAYERS, HEAD, ATTENTION, OTHER, PYTHON = "layers", "output layer", "attention", "other operations", "Python"
REPEATS = 7


class Timed(TorchFunctionMode):
    """Adds up the time of this thread on the processor in calls of torch and of Numba's kernels, while it is entered.

    `part` is what calls are counted for; where it is None, the product of queries, keys and values is `ATTENTION` and
    everything else `OTHER`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part: str | None = None
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # shape, dtype and the like: Python's own time
            return func(*args, **(kwargs or {}))
        return self.timed(func, *args, **(kwargs or {}))

    def timed(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        part = self.part or (ATTENTION if run is F.scaled_dot_product_attention else OTHER)
        start = time.thread_time()
        result = run(*args, **kwargs)
        self.seconds[part] += time.thread_time() - start
        self.calls[part] += 1
        return result

    def net(self) -> Counter[str]:
        """Seconds of each part, less what reading the clock takes."""
        empty = Timed()
        for _ in range(1000):
            empty.timed(lambda: None)
        return Counter(
            {part: total - self.calls[part] * empty.seconds[OTHER] / 1000 for part, total in self.seconds.items()}
        )


@contextlib.contextmanager
def timing(model: PreTrainedModel) -> Iterator[Timed]:
    """Count the time of the block, in which the model is called. Its kernels must have been compiled before."""
    timed, head = Timed(), model.get_output_embeddings()
    linear = {head, *(each for each in model.modules() if isinstance(each, (nn.Linear, SparseLowRankLinear)))}

    def enter(module: nn.Module, _: Any) -> None:
        timed.part = HEAD if module is head else LAYERS

    def leave(*_: Any) -> None:
        timed.part = None

    hooks = [
        hook
        for module in linear
        for hook in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    ]
    try:
        with contextlib.ExitStack() as stack:
            for module in (masks, nibbles, tables):
                for name, kernel in vars(module).copy().items():
                    if isinstance(kernel, Dispatcher):
                        call = functools.partial(timed.timed, kernel)
                        stack.enter_context(mock.patch.object(module, name, call))
            stack.enter_context(timed)
            yield timed
    finally:
        for hook in hooks:
            hook.remove()


def seconds_by_part(model: PreTrainedModel, run: Callable[[], Any]) -> dict[str, float]:
    """Medians of what `run` takes in each part. Python is what is left of the time of a run that is not watched."""
    found: list[dict[str, float]] = []
    for repeat in range(REPEATS + 1):
        start = time.thread_time()
        run()
        whole = time.thread_time() - start
        if repeat:  # the first warms up
            with timing(model) as timed:
                run()
            parts = timed.net()
            found.append(dict(parts) | {PYTHON: whole - parts.total()})
    return {part: statistics.median(each[part] for each in found) for part in (LAYERS, HEAD, ATTENTION, OTHER, PYTHON)}
