"""Keep one part of a model in memory at a time, and read the others when they are needed."""

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import get_module_from_name

from hasslefree.errors import ModelError
from hasslefree.files import read_tensor, run_in_background
from hasslefree.models.blocks import Blocks
from hasslefree.models.experts import SplitExperts
from hasslefree.packed.linear import SparseLowRankLinear

# Lists the current modules of a part of a model.
Modules = Callable[[], Iterable[nn.Module]]


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint.

    Args:
        name: name in the model.
        file: path of the file.
        stored_name: name in the file.
        dtype, shape: dtype and shape in the model.
    """

    name: str
    file: Path
    stored_name: str
    dtype: torch.dtype
    shape: torch.Size

    def read(self) -> Tensor:
        """Read the tensor to the CPU. Raises a CheckpointError if its file is damaged."""
        return read_tensor(self.file, self.stored_name).to(self.dtype)


def prescribed_dtype(plan: Mapping[str, torch.dtype], name: str) -> torch.dtype | None:
    """Return the dtype that a model family prescribes for a parameter; None if the parameter has
    the dtype of the model.

    plan: dtypes by pattern of names, from transformers (`_keep_in_fp32_modules_strict`).
    """
    for pattern, dtype in plan.items():
        if re.search(pattern.replace("*", ".*"), name):
            return dtype
    return None


def sources_of(module: nn.Module, dtype_plan: Mapping[str, torch.dtype]) -> dict[str, Source]:
    """Return the tensors of a module that are in files, by name in the module; none if accelerate
    has no files for it.

    dtype_plan: as for `prescribed_dtype`.
    """
    holder = module
    shapes = {name: value.shape for name, value in module.named_parameters(recurse=False)}
    if isinstance(module, SplitExperts):
        holder = module.fused
        shapes = module.sources
    # accelerate keeps the file of each parameter in a hook.
    stored: Any = getattr(getattr(holder, "_hf_hook", None), "weights_map", None)
    sources: dict[str, Source] = {}
    if stored is None:
        return sources
    for name, shape in shapes.items():
        full_name = f"{stored.prefix}{name}"
        entry = stored.dataset.index.get(full_name)
        if entry is not None:
            dtype = prescribed_dtype(dtype_plan, full_name) or getattr(torch, entry["dtype"])
            file = Path(entry["safetensors_file"])
            sources[name] = Source(full_name, file, entry["weight_name"], dtype, shape)
    return sources


class Weights:
    """The parameters of a model; `present` brings those of one part to `device`.

    Parameters that accelerate left on the disk (`device_map={"": "disk"}`) are in memory only
    within `present`; parameters in memory stay there. If there are any on the disk, accelerate's
    hooks are removed from the model, and its buffers are moved to `device`.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.device = device
        # Read the next part in the background, which takes the memory of one more part.
        self.prefetch = True
        # Tensors that are being read ahead, by name.
        self._reads: dict[str, Future[Tensor]] = {}
        # The tensors of each module in files, by name. Weak, to free layers that were replaced.
        self._sources: WeakKeyDictionary[nn.Module, dict[str, Source]] = WeakKeyDictionary()
        # accelerate ignores these dtypes for tensors on the disk.
        dtype_plan = model._get_dtype_plan(model.dtype)
        for module in model.modules():
            sources = sources_of(module, dtype_plan)
            if sources:
                self._sources[module] = sources
        self.streamed = bool(self._sources)
        if self.streamed:
            self._share_tied(model)
            self._remove_hooks(model)

    def _share_tied(self, model: PreTrainedModel) -> None:
        """Give tied parameters one source: a checkpoint stores them under one or both names."""
        for name, source in list(model.all_tied_weights_keys.items()):
            tied, tied_leaf = get_module_from_name(model, name)
            other, leaf = get_module_from_name(model, source)
            own = self._sources.setdefault(tied, {})
            others = self._sources.setdefault(other, {})
            if tied_leaf not in own:
                own[tied_leaf] = others[leaf]
            elif leaf not in others:
                others[leaf] = own[tied_leaf]
            elif torch.equal(own[tied_leaf].read(), others[leaf].read()):
                own[tied_leaf] = others[leaf]
            else:  # as in transformers, different weights are not tied
                del model.all_tied_weights_keys[name]

    def _remove_hooks(self, model: PreTrainedModel) -> None:
        from accelerate.hooks import remove_hook_from_module

        buffers = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                buffers.append((module, name, buffer))
        remove_hook_from_module(model, recurse=True)
        # accelerate read the buffers again, and rounded them to the dtype of the model.
        for module, name, buffer in buffers:
            setattr(module, name, buffer.to(self.device))
        for module in model.modules():
            # accelerate puts a bound method back: a cycle, which would keep replaced layers alive.
            forward = module.__dict__.get("forward")
            if getattr(forward, "__func__", None) is type(module).forward:
                del module.forward

    @contextmanager
    def present(self, part: Modules, then: Modules | None = None) -> Iterator[None]:
        """Bring the parameters of a part of the model to the device.

        Afterwards, they are freed, and so are compressed layers that were put into the part. A part
        that was already in memory stays there.

        Args:
            then: the next part, which is read in the background if `prefetch`.
        """
        if not self._missing(part):
            yield
            return
        try:
            self._bring(part)
            if then is not None and self.prefetch and self._missing(then):
                self._read_ahead(then)
            yield
        except BaseException:
            self._drop_reads()
            raise
        finally:
            for module in part():
                if isinstance(module, SparseLowRankLinear):
                    module.to("meta")
                for name, parameter in module.named_parameters(recurse=False):
                    empty = torch.empty_like(parameter, device="meta")
                    module.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def _missing(self, part: Modules) -> bool:
        parameters = (p for module in part() for p in module.parameters(recurse=False))
        return self.streamed and any(parameter.is_meta for parameter in parameters)

    def _wanted(self, part: Modules) -> Iterator[tuple[nn.Module, str, Source]]:
        """Yield module, name and source of each tensor to read for a part."""
        for module in part():
            for name, source in self._sources.get(module, {}).items():
                if isinstance(module, SplitExperts) or module.get_parameter(name).is_meta:
                    yield module, name, source

    def _bring(self, part: Modules) -> None:
        """Put the parameters of a part on the device.

        A function of its own, so that no local variable keeps a replaced layer alive.
        """
        brought: dict[str, nn.Parameter] = {}  # tied parameters are one object
        for module, name, source in self._wanted(part):
            if isinstance(module, SplitExperts):
                module.fill(name, self._read(source))
                continue
            if source.name not in brought:
                brought[source.name] = nn.Parameter(self._read(source), requires_grad=False)
            module.register_parameter(name, brought[source.name])

    def _read_ahead(self, part: Modules) -> None:
        """Start to read a part in a thread, and drop what was read for an earlier part."""
        self._drop_reads()
        calls = {source.name: partial(self._pinned, source) for _, _, source in self._wanted(part)}
        reads = run_in_background("read ahead", *calls.values())
        self._reads = dict(zip(calls, reads, strict=True))

    def _pinned(self, source: Source) -> Tensor:
        tensor = source.read()
        if self.device.type == "cuda":  # copies from pinned memory are faster
            return tensor.pin_memory()
        return tensor

    def _drop_reads(self) -> None:
        """Drop tensors that were read ahead, and wait for reads that are running."""
        for read in self._reads.values():
            read.cancel()
        wait(self._reads.values())
        self._reads.clear()

    def _read(self, source: Source) -> Tensor:
        """Return the tensor on the device, read ahead or now."""
        if source.name in self._reads:
            tensor = self._reads[source.name].result()
            del self._reads[source.name]  # after an error `_drop_reads` still sees it
        else:
            tensor = source.read()
        if tensor.shape != source.shape:
            raise ModelError(
                f"{source.name} has the shape {list(tensor.shape)} in the checkpoint, but"
                f" {list(source.shape)} in the model that its config.json describes; download or"
                " copy the checkpoint again"
            )
        # On CUDA, the order of the stream is enough synchronisation.
        return tensor.to(self.device, non_blocking=self.device.type == "cuda")


def trim() -> None:
    """Return freed memory to the system; glibc would keep arrays below 32 MB."""
    with suppress(AttributeError, OSError):  # another C library, or system
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def outside(model: nn.Module, blocks: Blocks) -> Modules:
    """Return a function that lists the modules outside the blocks: embeddings, last norm, head."""
    inside = {module for block in blocks.modules for module in block.modules()}
    return lambda: (module for module in model.modules() if module not in inside)
