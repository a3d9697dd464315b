"""Turn a compressed folder into one that needs no hasslefree: a dense checkpoint, or a PEFT adapter on a sparse one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from hasslefree.errors import ModelError, OutputError, UnknownNameError
from hasslefree.exports.dense import write_dense
from hasslefree.exports.narrow import write_narrow
from hasslefree.exports.peft import write_adapter
from hasslefree.exports.rotary import write_older_rotary
from hasslefree.folder.card import export_card
from hasslefree.folder.output import check_output, check_shard_size, replaced_whole
from hasslefree.folder.processor import copy_processor
from hasslefree.folder.read import QUANT_METHOD
from hasslefree.models.load import auto_class, load_config, load_model, load_tokenizer
from hasslefree.packed.linear import compressed_layers
from hasslefree.phases import LOADING, WRITING, Listener, Phases

# (the model, changed in place; the folder to fill; its final path; the shard size) → the folders with a model
# card, by its kind
Write = Callable[[PreTrainedModel, Path, Path, str], dict[str, Path]]
EXPORTS: dict[str, Write] = {"dense": write_dense, "peft": write_adapter, "narrow": write_narrow}


def export(
    folder: str | Path,
    destination: str | Path,
    to: str = "dense",
    *,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
    progress: Listener | None = None,
) -> None:
    """Write a compressed model for readers that do not know hasslefree.

    Args:
        folder: a compressed model. destination: the folder to write.
        to: "dense" (S + u v as plain weights), "peft" (an adapter with u v, and S as its base model in base/) or
            "narrow" (dense, without the heads and neurons that nothing reads).
        overwrite: replace a destination that is not empty, once the new one is complete.
        progress: as for `hasslefree.compress`.

    Raises:
        HasslefreeError: an unknown `to`, a folder that is not compressed, a destination that cannot be written.
    """
    if to not in EXPORTS:
        raise UnknownNameError("export format", to, EXPORTS)
    source, target = Path(folder).resolve(), Path(destination).resolve()
    check_shard_size(max_shard_size)
    check_folders(source, target, overwrite)
    phases = Phases(progress)
    with phases.phase(LOADING):
        model = load_model(str(source), device="cpu")
    auto = auto_class(model.config).__name__
    # Compressed folders have transformers' own names; the export has those that checkpoints of the family have.
    model._weight_conversions = None  # type: ignore[assignment]
    check_output(target, overwrite, bytes_needed(model))
    with phases.phase(WRITING), replaced_whole(target) as part:
        folders = EXPORTS[to](model, part, target, max_shard_size)
        copy_rest(source, part, folders, auto)


def check_folders(source: Path, target: Path, overwrite: bool) -> None:
    """Raise where the source is no compressed folder, or writing the target would touch it. Both are resolved."""
    if not source.is_dir():
        raise ModelError(f"the model folder {source} does not exist; export takes a folder that compress wrote")
    if (getattr(load_config(str(source)), "quantization_config", None) or {}).get("quant_method") != QUANT_METHOD:
        raise ModelError(f"{source} is not compressed by hasslefree, so there is nothing to export; compress it first")
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise OutputError(
            f"the output folder {target} and the model folder {source} must be apart, neither inside the other; give "
            "another output folder"
        )
    check_output(target, overwrite)


def bytes_needed(model: PreTrainedModel) -> int:
    """The size of either export: S with its zeros, the factors, all else as it is, and room for the tokenizer."""
    layers = compressed_layers(model).values()
    inside = {id(p) for layer in layers for p in layer.parameters()}
    entries = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    for layer in layers:
        spec = layer.spec
        entries += spec.dense_parameters + spec.rank * sum(spec.shape) + (0 if layer.bias is None else spec.shape[0])
    return entries * model.dtype.itemsize + 50_000_000


def copy_rest(source: Path, part: Path, folders: dict[str, Path], auto: str) -> None:
    """Beside the weights: the tokenizer, a model card for every folder, and the record of the compression.

    auto: the name of the class that loads the model.
    """
    tokenizer = load_tokenizer(str(source)) if (source / "tokenizer_config.json").exists() else None
    recorded = (source / "compression.json").exists()
    if recorded:
        shutil.copyfile(source / "compression.json", part / "compression.json")
    for kind, folder in folders.items():
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        copy_processor(str(source), folder)
        if (folder / "config.json").exists():  # an adapter has none
            write_older_rotary(folder / "config.json")
        (folder / "README.md").write_text(export_card(kind, source.name, recorded, auto), encoding="utf-8")
