"""Find the tensors of a checkpoint that transformers does not load, such as layers for multi-token
prediction.
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

# Tensors of a quantised weight in fp8 or mxfp4: the ends of their names, and what replaces them.
DEQUANTISED = (
    (re.compile(r"_(scale_inv|blocks|scales)$"), ""),
    (re.compile(r"\.(activation|input)_scale$"), ".weight"),
)
# Constants in old checkpoints that models compute today: rotary frequencies, positions, and the
# masks of GPT-2.
CONSTANTS = re.compile(r"rotary_emb\.inv_freq$|position_ids$|\.attn\.(masked_)?bias$")
# Results of `copied_bytes`: a plan calls it several times, and files list up to 100,000 tensors.
_COPIED: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def weight_of(name: str) -> str:
    """Name of the weight to which a tensor of a quantised checkpoint belongs; other names stay."""
    for pattern, end in DEQUANTISED:
        name = pattern.sub(end, name)
    return name


def is_on_disk(model: PreTrainedModel) -> bool:
    """Return True if some weights of a model are not in memory."""
    return any(parameter.is_meta for parameter in model.parameters())


def copied_bytes(model: PreTrainedModel) -> int:
    """Size of the tensors that are copied from the files of a model, in bytes; 0 if the model is in
    memory or its files cannot be read.
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
    """Find the tensors in the folder of a model that belong to none of its parameters or buffers,
    without `CONSTANTS`.

    Args:
        model: a model whose `name_or_path` is the folder. Its experts may be split.

    Returns:
        The tensors by name in the files.
    """
    names: dict[str, Any] = dict(model.state_dict())
    names.update(model.named_buffers())  # including buffers that are not stored
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
    """Leave out weights in fp8 or mxfp4 and their scales, formats that are not written."""
    coded = {weight_of(name) for name in tensors if weight_of(name) != name}
    return {name: tensor for name, tensor in tensors.items() if weight_of(name) not in coded}
