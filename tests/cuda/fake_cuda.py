"""CUDA without a GPU: tensors that say that they are on one, and are computed by another device.

    with fake_cuda() as gpu:
        x = torch.randn(4, 4, device="cuda")
        x @ torch.eye(4)   # RuntimeError: tensors on two devices

A `CudaTensor` holds another tensor and does what that one does. Within `fake_cuda` torch makes one wherever it would
make a tensor on a GPU. What is held is a tensor on the CPU, with the values that a GPU would compute but for rounding,
or one on "meta": shapes alone, of any size.

- A call that CUDA refuses since its tensors are on different devices is refused here, in torch's words.
- Whoever is among `FakeGpu.listeners` is told of every operation, as the dispatcher sees it, also those of autograd.
- `FakeGpu.bytes` and `.peak` are of the storages that live on the device, without the workspaces of libraries.

torch sees the tensors as those of a CPU, for a build of torch without CUDA cannot guard another device; only Python
sees the device. So code in C++ that chooses by device chooses what it does on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
CPU = torch.device("cpu")
# An operation: its overload, the arguments as they were given, and what came of it.
Listener = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
# Move tensors between devices, or take indices and scalars from the CPU.
_MOVING = {aten.copy_.default, aten._to_copy.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


# Products of matrices, whose factors are the last arguments; and one that only CUDA has.
_PRODUCTS = {aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten.bmm.default}
_CUDA_ONLY: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: lambda one, other, dtype: aten.mm.default(one.to(dtype), other.to(dtype))
}


def as_tf32(value: Any) -> Any:
    """A float32 matrix with 10 bits after the point, as CUDA's products in TF32 read it; anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.is_meta:
        return value
    return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class CudaTensor(Tensor):
    """A tensor that says that it is on a GPU. held: what computes in its place. place: the device that it names."""

    held: Tensor
    place: torch.device
    gone: weakref.finalize[Any, CudaTensor]

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> CudaTensor:
        made: CudaTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=CPU
        )
        made.held, made.place = held, place
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.held!r} on {self.place}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        made = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = common_device(func, args, kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            out = _GPU.compute(func, mapped(unwrapped, args), mapped(unwrapped, kwargs))
        out = mapped(lambda each: CudaTensor(each, place) if isinstance(each, Tensor) else each, out)
        if aliases(func):
            out = return_and_correct_aliasing(func, args, kwargs, out)
        _GPU.note(func, args, kwargs, out)
        return out


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """What comes of the leaves of tuples, lists and dictionaries. Operations have no other containers, which torch's
    `tree_map` would look for, at several times the cost.
    """
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(change, each) for name, each in value.items()}
    return change(value)


def leaves(value: Any) -> list[Any]:
    """The leaves of tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for each in value for leaf in leaves(each)]


@functools.cache
def aliases(func: Any) -> bool:
    """Whether an operation gives a view of its arguments, or changes them."""
    schema = func._schema
    return any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))


def unwrapped(value: Any) -> Any:
    """What a CudaTensor holds; anything else as it is."""
    return value.held if isinstance(value, CudaTensor) else value


def common_device(func: Any, args: Any, kwargs: Any) -> torch.device:
    """The device on which CUDA would run an operation.

    Raises:
        RuntimeError: its tensors are on different devices, and none of them is a number on the CPU.
    """
    tensors = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
    places = {each.device for each in tensors if isinstance(each, CudaTensor)}
    if func in _INDEXING:
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({CPU})")
        tensors = [args[0], *(each for each in tensors if isinstance(each, CudaTensor))]
    if func not in _MOVING:
        strangers = {each.device for each in tensors if each.ndim or each.device.type == "cuda"}
        if len(strangers) > 1:
            found = " and ".join(sorted(map(str, strangers)))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two: {found} ({func})"
            )
    return args[0].device if func is aten.copy_.default and isinstance(args[0], CudaTensor) else max(places, key=str)


@dataclass
class FakeGpu:
    """What `fake_cuda` gives: the bytes that live on the device, and who listens.

    Args:
        holder: the device of what its tensors hold: "cpu" or "meta". memory: the bytes that it says it has.
        instead: what computes operations in the place of torch's, which only a GPU has, or which depend on values that
            a tensor on "meta" does not have.
    """

    holder: str = "cpu"
    memory: int = 80 << 30
    bytes: int = 0
    peak: int = 0
    listeners: list[Listener] = field(default_factory=list)
    instead: dict[Any, Callable[..., Any]] = field(default_factory=lambda: dict(_CUDA_ONLY))
    # By the storage that is held, its bytes and the tensors that hold it.
    _living: dict[int, list[int]] = field(default_factory=dict)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives for the tensors that are held."""
        if kwargs.get("device") == CPU:  # where C++ sees the tensor
            kwargs = kwargs | {"device": torch.device(self.holder)}
        if func in _PRODUCTS and torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = (*args[:-2], *map(as_tf32, args[-2:]))  # its factors
        return self.instead.get(func, func)(*args, **kwargs)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for each in leaves(out):
            if isinstance(each, CudaTensor):
                self.living(each)
        for listener in self.listeners:
            listener(func, args, kwargs, out)

    def living(self, tensor: CudaTensor) -> None:
        """Count the storage of a tensor for as long as a tensor has it."""
        storage = tensor.held.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            self._living[key] = [storage.nbytes(), 0]
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._living[key][1] += 1
        tensor.gone = weakref.finalize(tensor, self._freed, key)

    def _freed(self, key: int) -> None:
        entry = self._living[key]
        entry[1] -= 1
        if not entry[1]:
            self.bytes -= entry[0]
            del self._living[key]

    def upload(self, source: Tensor, place: torch.device) -> CudaTensor:
        """A copy on the GPU of a tensor from elsewhere."""
        held = torch.empty_like(source, device="meta") if self.holder == "meta" else source.detach().clone()
        return CudaTensor(held, place)

    def download(self, source: CudaTensor) -> Tensor:
        """A copy on the CPU; of shapes alone, zeros."""
        return torch.zeros_like(source.held, device=CPU) if source.held.is_meta else source.held.clone()


class Transfer(torch.autograd.Function):
    """A copy on another device, through which gradients go back."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, place: torch.device) -> Tensor:
        ctx.place = source.device
        if place.type == "cuda":
            source = source.held if isinstance(source, CudaTensor) else source
            out: Tensor = _GPU.upload(source, place)
        else:
            assert isinstance(source, CudaTensor)
            out = _GPU.download(source)
        _GPU.note(aten._to_copy.default, (source,), {"device": place}, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return moved(grads[0], ctx.place), None


def moved(tensor: Tensor, place: torch.device) -> Tensor:
    """The tensor on another device."""
    if tensor.device == place:
        return tensor
    if tensor.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if place.type not in ("cuda", "cpu"):  # to "meta"
        return torch.empty_like(unwrapped(tensor), device=place)
    return Transfer.apply(tensor, place)  # type: ignore[no-any-return]


def real(device: Any) -> torch.device | None:
    """A device as a tensor names it: a GPU with its number."""
    found = torch.device(device) if device is not None else None
    return torch.device("cuda", 0) if found is not None and found.type == "cuda" and found.index is None else found


class _Redirect(TorchFunctionMode):
    """Sends what would make tensors on a GPU, or take them from there, to the fake one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if special := _SPECIAL.get(func):
            return special(*args, **kwargs)
        if "device" not in kwargs or kwargs["device"] is None:
            return func(*args, **kwargs)
        place = real(kwargs["device"])
        assert place is not None
        if place.type != "cuda":  # the operation is asked for tensors elsewhere, from a GPU perhaps
            return mapped(unwrapped, func(*args, **kwargs))
        kwargs["device"] = torch.device(_GPU.holder)
        if func in (torch.tensor, torch.as_tensor):
            return moved(func(*args, **kwargs | {"device": CPU}), place)
        out = func(*mapped(unwrapped, args), **mapped(unwrapped, kwargs))
        requires_grad, out = out.requires_grad, CudaTensor(out.detach(), place)
        _GPU.note(aten.empty.memory_format, (), {}, out)
        return out.requires_grad_(requires_grad)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy = kwargs.pop("copy", False)
    if "other" in kwargs or (args and isinstance(args[0], Tensor)):
        other = kwargs.pop("other", args[0] if args else None)
        args, kwargs = (), kwargs | {"device": other.device, "dtype": other.dtype}
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    place, made = real(device), tensor
    if place is not None and place != tensor.device:
        made = moved(tensor, place)
    changes = {"dtype": dtype} if dtype is not None else {}
    changes |= {"memory_format": layout} if layout is not None else {}
    return made.to(**changes, copy=copy and made is tensor) if changes or copy else made


def _numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, CudaTensor):
        raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() first.")
    return Tensor.numpy(tensor, *args, **kwargs)


def _tolist(tensor: Tensor) -> Any:
    return Tensor.tolist(moved(tensor.detach(), CPU) if isinstance(tensor, CudaTensor) else tensor)


def _device_index(tensor: Tensor) -> int:
    return tensor.device.index if isinstance(tensor, CudaTensor) else -1


def _may_be_data(tensor: Tensor, value: Tensor) -> bool:
    fakes = isinstance(tensor, CudaTensor), isinstance(value, CudaTensor)
    return all(fakes) or (not any(fakes) and torch._has_compatible_shallow_copy_type(tensor, value))


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if not _may_be_data(tensor, value):
        raise RuntimeError("`variable` and `tensor` have incompatible tensor type.")
    Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(tensor, CudaTensor) and isinstance(value, CudaTensor):
        tensor.gone()
        tensor.held, tensor.place = value.held, value.place
        _GPU.living(tensor)


def _pinned(tensor: Tensor, *args: Any) -> Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, *args, **kwargs: moved(tensor, CPU),
    Tensor.cuda: lambda tensor, device=None, *args, **kwargs: moved(tensor, real(device or "cuda") or CPU),
    Tensor.data.__get__: lambda tensor: tensor.detach(),  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch._has_compatible_shallow_copy_type: _may_be_data,
    torch.get_autocast_dtype: lambda kind: torch.get_autocast_dtype("cpu"),
    torch.is_autocast_enabled: lambda kind: torch.is_autocast_enabled("cpu"),
    Tensor.type_as: lambda tensor, other: _to(tensor, other),
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.tolist: _tolist,
    Tensor.get_device: _device_index,
    Tensor.untyped_storage: lambda tensor: Tensor.untyped_storage(unwrapped(tensor)),
    Tensor.data_ptr: lambda tensor: Tensor.data_ptr(unwrapped(tensor)),
}


class _Generator(torch.Generator):
    """One of the CPU, whatever device is asked for."""

    def __new__(cls, device: Any = CPU) -> _Generator:
        return super().__new__(cls, CPU)


class _Autocast(torch.autocast):
    """That of the CPU: torch sees the tensors there."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any):
        super().__init__("cpu", *args, **kwargs)


_GPU = FakeGpu()


@contextmanager
def fake_cuda(holder: str = "cpu", memory: int = 80 << 30, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeGpu]:
    """Within it, torch has a GPU with `memory` bytes. holder: as in `FakeGpu`."""
    global _GPU
    before, _GPU = _GPU, FakeGpu(holder, memory)
    gpu = _GPU
    properties = mock.Mock(total_memory=memory, major=capability[0], minor=capability[1], multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (memory - gpu.bytes, memory),
        "memory_reserved": lambda device=None: gpu.bytes,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "a fake GPU",
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch, "autocast", _Autocast))
        # Not among `_SPECIAL`: these hold in one thread, and others pin memory too.
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pinned))
        stack.enter_context(_Redirect())
        try:
            yield gpu
        finally:
            _GPU = before
