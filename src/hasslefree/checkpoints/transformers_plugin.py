"""Teach transformers to load and save compressed folders: `from_pretrained` works after `import hasslefree`."""

from __future__ import annotations

from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hasslefree.errors import CheckpointError
from hasslefree.models.blocks import replace_module
from hasslefree.models.linear import SparseLowRankLinear

QUANT_METHOD = "hasslefree"
VERSION = 1


class HasslefreeConfig(QuantizationConfigMixin):
    """The `quantization_config` entry of config.json.

    Args:
        modules: full layer name → {"pattern": "2:4", "rank": 64}.
        layout: how S is stored; "unpacked" keeps its zeros. version: of this entry.
    """

    def __init__(self, modules: dict[str, Any], layout: str = "unpacked", version: int = VERSION, **_: Any):
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.modules, self.layout, self.version = modules, layout, version
        if version != VERSION or layout != "unpacked":
            raise CheckpointError(
                f"the folder has format version {version}, layout {layout!r}; this hasslefree reads version {VERSION}, "
                "layout 'unpacked': update hasslefree"
            )


class HasslefreeQuantizer(HfQuantizer):
    """Puts `SparseLowRankLinear` in the place of the layers that the config lists, before the weights are read."""

    requires_calibration = True
    quantization_config: HasslefreeConfig

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        stored = _stored_names(checkpoint_files or [])
        for name, spec in self.quantization_config.modules.items():
            try:
                layer = model.get_submodule(name)
            except AttributeError:
                raise CheckpointError(f"config.json lists {name}, which {type(model).__name__} does not have") from None
            replacement = _empty_layer(layer, name, spec)
            if missing := [n for n, _ in replacement.named_parameters() if stored and f"{name}.{n}" not in stored]:
                raise CheckpointError(f"the folder holds no {', '.join(missing)} of {name}: it is not complete")
            replace_module(model, name, replacement)

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _empty_layer(layer: nn.Module, name: str, spec: dict[str, Any]) -> SparseLowRankLinear:
    """The layer to load into, with the shape, dtype and device of the one it replaces."""
    if isinstance(layer, Conv1D):
        width, out = layer.weight.shape
    elif isinstance(layer, nn.Linear):
        out, width = layer.weight.shape
    else:
        raise CheckpointError(f"config.json lists {name}, which is no linear layer but a {type(layer).__name__}")
    weight = layer.weight
    return SparseLowRankLinear(
        width, out, spec["rank"], layer.bias is not None, spec["pattern"], weight.dtype, weight.device
    )


def _stored_names(files: list[str]) -> set[str]:
    """The tensor names in the headers of safetensors files."""
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as handle:
            names.update(handle.keys())
    return names


def register() -> None:
    """Make the quantizer known to transformers. Calling it again does nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(HasslefreeQuantizer)
        register_quantization_config(QUANT_METHOD)(HasslefreeConfig)
