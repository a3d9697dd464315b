"""Find the tensors of a checkpoint that transformers does not load, such as layers that predict
further tokens.
"""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file

from hasslefree.files import StoredTensor, stored_tensors, weight_files
from hasslefree.models.experts import SplitExperts

# Constants that old checkpoints hold and that models compute today: of rotary embeddings,
# positions, and the masks of GPT-2.
CONSTANTS = re.compile(r"rotary_emb\.inv_freq$|position_ids$|\.attn\.(masked_)?bias$")


def unloaded_tensors(model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Find the tensors in the folder of a model that belong to no parameter or buffer of it, but
    for `CONSTANTS`.

    model: loaded by its name, a folder or a name on the hub. Its experts may be split.

    Returns:
        The tensors by their names in the files.
    """
    config = cached_file(str(model.name_or_path), "config.json")
    assert config is not None  # it raises an error if there is none
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
    for name, tensor in stored_tensors(weight_files(Path(config).parent)).items():
        renamed, _ = rename_source_key(
            name, renamings, converters, model.base_model_prefix, meta_state_dict=names
        )
        loaded = name in names or renamed in names
        if not loaded and not CONSTANTS.search(name):
            unloaded[name] = tensor
    return unloaded
