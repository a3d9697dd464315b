"""Register the format with transformers, so that `from_pretrained` loads compressed folders."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hasslefree.checkpoint.entries import (
    LAYOUT,
    QUANT_METHOD,
    VERSION,
    Entry,
    check_format_version,
    check_stored,
    read_entries,
)
from hasslefree.errors import CheckpointError, GridError
from hasslefree.files import stored_tensors
from hasslefree.models.ends import End, asked, find_ends
from hasslefree.models.experts import SplitExperts, split_experts
from hasslefree.models.sites import Site, find_sites
from hasslefree.packed.decoding import decode_layers
from hasslefree.packed.linear import SparseLowRankLinear, layers_without_numba
from hasslefree.packed.spec import LayerSpec

logger = logging.getLogger(__name__)


class HasslefreeConfig(QuantizationConfigMixin):
    """The `quantization_config` entry of config.json. modules: full layer name → its entry
    (`Entry`).
    """

    def __init__(self, modules: Any = None, layout: str = LAYOUT, version: int = VERSION, **_: Any):
        check_format_version(version, layout)
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.modules = modules
        self.layout = layout
        self.version = version


class HasslefreeQuantizer(HfQuantizer):
    """Replaces the layers that the config lists with `SparseLowRankLinear`, before weights are
    read.
    """

    requires_calibration = True
    quantization_config: HasslefreeConfig

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        entries = read_entries(self.quantization_config.modules)
        split_experts(model)
        biased = set()
        modules = {}
        used: dict[str, Entry] = {}
        sites = find_sites(model)
        ends = {end.name: end for end in find_ends(model)}
        names = sites.keys() | ends.keys()
        for listed, entry in entries.items():
            name = name_in_model(listed, model, names)
            if name in ends:
                layer = empty_end(ends[name], model, entry.spec)
                ends[name].replace(model, layer)
            elif name in sites:
                layer = empty_layer(sites[name], name, entry.spec)
                sites[name].replace(layer)
            elif is_unused_head(entry.spec, model):
                continue
            else:
                raise CheckpointError(
                    f"config.json lists {listed}, but {type(model).__name__} has no linear layer or"
                    " embedding of that name; download or copy config.json again, or use the"
                    " version of transformers that compression.json names"
                )
            used[listed] = entry
            modules[name] = entry.to_dict()
            if layer.bias is not None:
                biased.add(listed)
        self.quantization_config.modules = modules
        if checkpoint_files:  # none if the caller gave a state dict
            stored = stored_tensors([Path(file) for file in checkpoint_files])
            check_stored(used, stored, biased, indices=True)

    def update_weight_conversions(self, weight_conversions: Any, model: nn.Module) -> Any:
        """Leave out the conversions that fuse experts, which are separate layers here."""
        fused: set[str] = set()
        for module in model.modules():
            if isinstance(module, SplitExperts):
                fused.update(module.sources)
        kept = [each for each in weight_conversions if not converts(each, fused)]
        return super().update_weight_conversions(kept, model)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        # If True, transformers would forbid .half(), .float() and training.
        model.is_quantized = False  # type: ignore[assignment]
        # `save_pretrained` must keep transformers' names, which the configuration lists.
        model._weight_conversions = []  # type: ignore[assignment]
        decode_layers(model)
        slow = layers_without_numba(model)
        if slow:
            logger.warning(
                "Numba is not installed, so %d layers (the first is %s) unpack their weights at"
                ' every call, which is slow on a CPU; pip install "hasslefree[fast]", or, if memory'
                ' allows, call hasslefree.use_backend(model, "unpacked")',
                len(slow),
                slow[0],
            )

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def converts(conversion: Any, names: Collection[str]) -> bool:
    """Return True if a conversion of transformers writes a tensor with one of these last names."""
    if not isinstance(conversion, WeightConverter):
        return False
    return any(target.rpartition(".")[2] in names for target in conversion.target_patterns)


def name_in_model(listed: str, model: Any, names: Collection[str]) -> str:
    """The name that a layer listed in config.json has in a model.

    Models of `AutoModel` lack the prefix that names have in models with a head.

    Args:
        names: of the layers of the model.

    Returns:
        One of the names; `listed` if none matches.
    """
    prefix = f"{model.base_model_prefix}."
    for name in (listed, listed.removeprefix(prefix), prefix + listed):
        if name in names:
            return name
    return listed


def is_unused_head(spec: LayerSpec, model: Any) -> bool:
    """Return True if a layer is an output head, judging by its shape, and the model has none."""
    if asked(model, "get_output_embeddings")[1] is not None:
        return False
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    return spec.shape[0] == vocabulary


def empty_layer(site: Site, name: str, spec: LayerSpec) -> SparseLowRankLinear:
    """A layer without values, with the dtype and device of the dense layer. name: in the model."""
    check_shape(name, spec, site.shape)
    weight = site.parameter
    return SparseLowRankLinear(spec, site.bias is not None, weight.dtype, weight.device)


def empty_end(end: End, model: nn.Module, spec: LayerSpec) -> SparseLowRankLinear:
    """A layer without values for the matrix of the embedding or the head."""
    check_shape(end.name, spec, end.shape)
    try:
        return end.empty_layer(model, spec)
    except GridError as error:
        raise CheckpointError(
            f"config.json, entry {end.name}: {error.message}. Download or copy config.json again"
        ) from None


def check_shape(name: str, spec: LayerSpec, shape: tuple[int, int]) -> None:
    """Raise a CheckpointError unless the entry of a layer has the shape of the model's weight."""
    if spec.shape != shape:
        raise CheckpointError(
            f"{name} has the shape {list(spec.shape)} in the quantization_config of"
            f" config.json, but {list(shape)} in the model; download or copy config.json again"
        )


def register_format() -> None:
    """Register the quantizer with transformers, unless it is registered already."""
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(HasslefreeQuantizer)
        register_quantization_config(QUANT_METHOD)(HasslefreeConfig)


register_format()
