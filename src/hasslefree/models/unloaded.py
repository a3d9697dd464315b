"""Find the tensors of a checkpoint that transformers does not load, such as layers that predict
further tokens.
"""

import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hasslefree.errors import CheckpointError
from hasslefree.files import StoredTensor, stored_tensors, weight_files
from hasslefree.models.experts import SplitExperts

# What a checkpoint in fp8 or mxfp4 holds of a weight that is dequantised as it is loaded.
DEQUANTISED = (
    (re.compile(r"_(scale_inv|blocks|scales)$"), ""),
    (re.compile(r"\.(activation|input)_scale$"), ".weight"),
)
# Constants that old checkpoints hold and that models compute today: of rotary embeddings,
# positions, and the masks of GPT-2.
CONSTANTS = re.compile(r"rotary_emb\.inv_freq$|position_ids$|\.attn\.(masked_)?bias$")
# What `copied_bytes` found: a plan asks several times, and large checkpoints have 100,000 tensors.
_COPIED: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def weight_of(name: str) -> str:
    """The name of the weight to which a tensor of a quantised checkpoint belongs; others stay."""
    for pattern, end in DEQUANTISED:
        name = pattern.sub(end, name)
    return name


def is_on_disk(model: PreTrainedModel) -> bool:
    """Say whether weights of a model are not in memory."""
    return any(parameter.is_meta for parameter in model.parameters())


def copied_bytes(model: PreTrainedModel) -> int:
    """The size of the tensors that are copied from the files of a model; 0 if it is in memory, or
    its files cannot be read.
    """
    if not is_on_disk(model):
        return 0
    if model not in _COPIED:
        try:
            copied = without_codes(unloaded_tensors(model))
        except CheckpointError:  # `plan` needs no files
            copied = {}
        _COPIED[model] = sum(tensor.meta.nbytes for tensor in copied.values())
    return _COPIED[model]


def unloaded_tensors(model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Find the tensors in the folder of a model that belong to no parameter or buffer of it, but
    for `CONSTANTS`.

    Args:
        model: its `name_or_path` is the folder. Its experts may be split.

    Returns:
        The tensors by their names in the files.
    """
    names: dict[str, Any] = dict(model.state_dict())
    names.update(model.named_buffers())  # also those that are computed, not stored
    for path, module in model.named_modules():
        if isinstance(module, SplitExperts):
            for source, shape in module.sources.items():
                names[f"{path}.{source}"] = shape
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    unloaded = {}
    for name, tensor in stored_tensors(weight_files(Path(str(model.name_or_path)))).items():
        weight = weight_of(name)
        renamed, _ = rename_source_key(
            weight, renamings, converters, model.base_model_prefix, meta_state_dict=names
        )
        loaded = name in names or weight in names or renamed in names
        if not loaded and not CONSTANTS.search(name):
            unloaded[name] = tensor
    return unloaded


def without_codes(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors but for weights in fp8 or mxfp4 and their scales: a folder that is written is not
    in these formats.
    """
    coded = {weight_of(name) for name in tensors if weight_of(name) != name}
    return {name: tensor for name, tensor in tensors.items() if weight_of(name) not in coded}
