"""The `quantization_config` of a compressed folder as vLLM reads it: which layer gets which linear method."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from hasslefree.errors import ServeError
from hasslefree.folder.entries import QUANT_METHOD, Entry, check_version, read_entries
from hasslefree.serve import versions

logger = logging.getLogger(__name__)

# (major, minor) of the least compute capability: that of torch's 2:4 tensors, for which the kernels are compiled too.
LEAST_CAPABILITY = (8, 0)
EXPERT = re.compile(r"\.experts\.\d+\.")


class ServedConfig(QuantizationConfig):
    """What vLLM asks of a quantisation.

    Args:
        entries: of the compressed layers, by their full name.
    """

    def __init__(self, entries: dict[str, Entry]):
        super().__init__()
        self.entries = entries

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServedConfig:
        """Read the entry of config.json, and refuse what cannot be served before any weight is read.

        Raises:
            CheckpointError: the entry is malformed, or of another version of the format.
            ServeError: vLLM has another version, the device has no kernels, or the model is a mixture of experts.
        """
        versions.check_version(vllm.__version__)
        check_device()
        check_version(config.get("version"), config.get("layout"))
        entries = read_entries(config.get("modules"))
        if expert := next((name for name in entries if EXPERT.search(name)), None):
            raise ServeError(
                f"{expert} is a compressed expert, and compressed experts cannot be served; "
                "write a dense model with `hasslefree export FOLDER --to dense DEST` and serve DEST"
            )
        return cls(entries)

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        major, minor = LEAST_CAPABILITY
        return 10 * major + minor

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM's model does."""
        self.entries = hf_to_vllm_mapper.apply_dict(self.entries)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from hasslefree.serve.linear import StackedLinearMethod

        if not isinstance(layer, LinearBase):
            if prefix in self.entries:
                raise ServeError(
                    f"{prefix} is compressed, and vLLM has no linear layer but a {type(layer).__name__} there"
                )
            return None
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{name}" if parent else name for name in self.packed_modules_mapping.get(leaf, [leaf])]
        entries = {name: self.entries.get(name) for name in names}
        if not any(entries.values()):
            return UnquantizedLinearMethod()
        return StackedLinearMethod(entries)


def check_device() -> None:
    """Raise ServeError where vLLM runs on a device without kernels."""
    if current_platform.is_cpu():
        return
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None:
        raise ServeError(
            f"compressed folders are served on a CPU or an NVIDIA GPU, not on {current_platform.device_name}; "
            "write a dense model with `hasslefree export FOLDER --to dense DEST` and serve DEST"
        )
    if tuple(capability) < LEAST_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, tuple(capability)))
        raise ServeError(
            f"compressed folders need a GPU of compute capability {least}, and this one has {found}; "
            "write a dense model with `hasslefree export FOLDER --to dense DEST` and serve DEST"
        )
