"""The entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes.

A vLLM without the names imported here logs that the plugin cannot be loaded, and still serves other
models.
"""

from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.platforms import current_platform

from hasslefree.checkpoint.entries import QUANT_METHOD, Entry, check_format_version, read_entries
from hasslefree.errors import ServeError
from hasslefree.serve.requirements import DENSE, check_device, check_layers, check_vllm


class ServedConfig(QuantizationConfig):
    """The quantisation of a compressed folder, as vLLM asks for it.

    Args:
        entries: the compressed layers by their full name.
    """

    def __init__(self, entries: dict[str, Entry]):
        super().__init__()
        self.entries = entries

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ServedConfig":
        """Read `quantization_config` of config.json. Raises an error if the model cannot be served,
        before any weights are read.
        """
        check_vllm(vllm.__version__)
        check_device(current_platform.device_name)
        check_format_version(config.get("version"), config.get("layout"))
        entries = read_entries(config.get("modules"))
        check_layers(entries)
        return cls(entries)

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # compute capability 8.0, for which the kernels are compiled

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # the configuration is in config.json

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.entries = hf_to_vllm_mapper.apply_dict(self.entries)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that multiplies a layer; None if the layer is not linear.

        Args:
            layer: a layer of vLLM's model.
            prefix: the layer's name in vLLM. For example, `qkv_proj` stands for three layers of the
                folder.
        """
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from hasslefree.serve.linear import FusedLinearMethod

        if not isinstance(layer, LinearBase):
            if prefix in self.entries:
                raise ServeError(
                    f"{prefix} is compressed, but vLLM runs it as a {type(layer).__name__}, which"
                    f" is not a linear layer: {DENSE}"
                )
            return None
        parent, _, leaf = prefix.rpartition(".")
        entries = {}
        for part in self.packed_modules_mapping.get(leaf, [leaf]):
            name = f"{parent}.{part}" if parent else part
            entries[name] = self.entries.get(name)
        if not any(entries.values()):
            return UnquantizedLinearMethod()
        return FusedLinearMethod(entries)


def register() -> None:
    """Register the format of compressed folders. An unsupported version of vLLM raises an error
    only when such a folder is served.
    """
    if QUANT_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(QUANT_METHOD)(ServedConfig)
