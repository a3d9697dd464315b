"""What a compression writes beside the weights: its record, the configuration, the tokenizer and
the model card.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from hasslefree.checkpoint.card import FIGURE, base_licence, copy_processor, model_card
from hasslefree.checkpoint.plugin import HasslefreeConfig
from hasslefree.checkpoint.record import LayerRecord, Record, versions
from hasslefree.checkpoint.resume import FinishedPart
from hasslefree.models.load import auto_class
from hasslefree.recipe.resolve import Resolved
from hasslefree.units import significant


def described(
    name: str, model: PreTrainedModel, resolved: Resolved, segments: Tensor
) -> dict[str, Any]:
    """The model, recipe, method and text of a compression, as in `Record` and the journal."""
    text = {"seqlen": segments.shape[1], "tokens": segments.numel()}
    how = {"recipe": resolved.to_dict(), "method": repr(resolved.solver), "versions": versions()}
    return {"model": name, **how, "dtype": str(model.dtype).removeprefix("torch."), **text}


def configuration(model: PreTrainedModel) -> dict[str, Any]:
    """The configuration of a model, as JSON: what it computes, apart from its weights."""
    content: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    return {
        name: value
        for name, value in content.items()
        if name not in ("_name_or_path", "transformers_version")
    }


def recorded(
    about: dict[str, Any], parts: list[FinishedPart], sensitivities: dict[str, float] | None
) -> Record:
    """The record of a compression. about: its other fields. sensitivities: of an `Allocation`."""
    layers = tuple(LayerRecord.from_dict(layer) for part in parts for layer in part.layers)
    total = sum(size for part in parts for size in part.tensors.values())
    rest = about | {name: tuple(about[name]) for name in ("dense", "towers")}
    rest["other_bytes"] = total - sum(layer.bytes for layer in layers)
    if sensitivities is not None:
        rest["sensitivities"] = {name: significant(value) for name, value in sensitivities.items()}
    return Record(**rest, layers=layers)


def write_rest(
    folder: Path, model: PreTrainedModel, tokenizer: Any, parts: list[FinishedPart], report: Record
) -> None:
    """All of the output folder but the weights: configuration, tokenizer, compression.json and the
    model card.
    """
    entries = {name: entry for part in parts for name, entry in part.entries.items()}
    model.config.quantization_config = HasslefreeConfig(entries)
    model.config.dtype, model.config.architectures = report.dtype, [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)  # type: ignore[arg-type]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # A model that was created in memory has no files, and the hub is not searched for them.
    known = Path(report.model).is_dir() or getattr(model.config, "_commit_hash", None)
    if known and report.towers:
        copy_processor(report.model, folder)
    (folder / "compression.json").write_text(report.to_json(), encoding="utf-8")
    from hasslefree.report.drawing import png  # loads the charting library
    from hasslefree.report.maps import heat_map

    (folder / FIGURE).write_bytes(png(heat_map(report.layers).svg()))
    licence = base_licence(report.model) if known else {}
    card = model_card(report, licence, auto_class(model.config).__name__, model.is_remote_code())
    (folder / "README.md").write_text(card, encoding="utf-8")
