"""Write the files of an output folder beside the weights: the record, the configuration, the
tokenizer and the model card.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from hasslefree.checkpoint.card import FIGURE, base_licence, model_card
from hasslefree.checkpoint.originals import (
    CODE_FILES,
    PROCESSOR_FILES,
    TEXT_FILES,
    as_json,
    copy_original_files,
    read_configuration,
    restore_keys,
)
from hasslefree.checkpoint.plugin import HasslefreeConfig
from hasslefree.checkpoint.record import Record, versions
from hasslefree.checkpoint.resume import FinishedPart, Progress
from hasslefree.models.blocks import other_modalities
from hasslefree.models.ends import asked
from hasslefree.models.load import auto_class
from hasslefree.models.names import folder_of
from hasslefree.pipeline.job import Job
from hasslefree.units import significant

logger = logging.getLogger(__name__)


def described(job: Job) -> Record:
    """The record of a compression, without results yet."""
    model = job.walk.model
    record = Record(
        model=job.name,
        recipe=job.resolved.to_dict(),
        method=repr(job.resolved.solver),
        versions=versions(),
        device=job.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        seqlen=job.segments.shape[1],
        tokens=job.segments.numel(),
        seconds=0.0,
        layers=(),
        dense=tuple(job.selection.automatically_dense),
        towers=tuple(other_modalities(model, job.walk.blocks)),
        own_segments=job.texts is None,
        from_memory=job.from_memory,
    )
    if job.texts is None:
        return record
    return dataclasses.replace(
        record,
        first_tokens=tuple(job.texts.first_tokens),
        texts=job.texts.tokens(job.segments),
        left_out=job.texts.left_out,
    )


def configuration(model: PreTrainedModel) -> dict[str, Any]:
    """The configuration of a model as JSON, without names and versions."""
    content = as_json(model.config)
    for name in ("_name_or_path", "transformers_version"):
        content.pop(name, None)
    return content


def recorded(
    description: Record, progress: Progress, sensitivities: dict[str, float] | None
) -> Record:
    """Add the results to the record of a compression.

    Args:
        sensitivities: as for `Allocation`.
    """
    layers = [layer for part in progress.parts for layer in part.layers]
    rounded = None
    if sensitivities is not None:
        rounded = {name: significant(value) for name, value in sensitivities.items()}
    return dataclasses.replace(
        description,
        layers=tuple(layers),
        predictions=progress.predictions,
        held_out=progress.held_out.text,
        held_out_code=progress.held_out.code,
        sensitivities=rounded,
        other_bytes=progress.bytes - sum(layer.bytes for layer in layers),
    )


def write_rest(folder: Path, job: Job, report: Record) -> None:
    """Write the configuration, the tokenizer, compression.json and the model card."""
    model = job.walk.model
    tokenizer = job.tokenizer
    # A model that was created in memory has no files; do not search the hub for them.
    has_files = folder_of(report.model) is not None
    write_configuration(folder, model, job.work.progress.parts, report, has_files)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if has_files:
        patterns = PROCESSOR_FILES
        if getattr(tokenizer, "name_or_path", None) == report.model:
            patterns += TEXT_FILES
        if model.is_remote_code():
            patterns += CODE_FILES
        copy_original_files(report.model, folder, patterns)
    (folder / "compression.json").write_text(report.to_json(), encoding="utf-8")
    write_card(folder, model, report, has_files)


def write_card(folder: Path, model: PreTrainedModel, report: Record, has_files: bool) -> None:
    """Write README.md and its picture. Errors become warnings, because the model is complete.

    Args:
        has_files: the model may have an original card, which names the licence.
    """
    picture = draw_errors(report)
    if picture is not None:
        (folder / FIGURE).write_bytes(picture)
    try:
        licence = base_licence(report.model) if has_files else {}
        loader = auto_class(model.config).__name__
        own_code = model.is_remote_code()
        card = model_card(report, licence, loader, own_code, picture is not None)
    except Exception as error:  # a hub's card may contain anything
        logger.warning("no model card was written (%s: %s)", type(error).__name__, error)
        return
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_configuration(
    folder: Path, model: PreTrainedModel, parts: list[FinishedPart], report: Record, has_files: bool
) -> None:
    """Write config.json with the compressed layers, generation_config.json and the model's code.

    Args:
        has_files: the model may have an original config.json, whose keys are kept.
    """
    config = model.config
    entries = {name: entry.to_dict() for part in parts for name, entry in part.entries.items()}
    original = read_configuration(report.model) if has_files else {}
    if not head_is_tied(model):
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.quantization_config = HasslefreeConfig(entries)
    config.dtype = report.dtype
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    # Not `save_pretrained`, here and below: it refuses inconsistent settings, and all work would be
    # lost.
    if hasattr(config, "transformers_weights"):  # the name of a file that OUT does not have
        del config.transformers_weights
    if config._auto_class is not None:
        custom_object_save(config, folder, config=config)  # type: ignore[arg-type]
    config.to_json_file(folder / "config.json")
    restore_keys(folder / "config.json", original, config)
    if model.can_generate():
        path = folder / "generation_config.json"
        model.generation_config.to_json_file(path, keys_to_pop=["compile_config"])


def head_is_tied(model: PreTrainedModel) -> bool:
    """Return True if the output head shares the matrix of the embeddings.

    It is False if a checkpoint sets `tie_word_embeddings` but contains a separate head.
    """
    name, head = asked(model, "get_output_embeddings")
    if head is None:
        return False
    weight = f"{name}.weight"
    tied = model.all_tied_weights_keys
    return weight in tied or weight in tied.values()


def draw_errors(report: Record) -> bytes | None:
    """Draw the picture of the model card, a PNG. Return None, with a warning, if that fails."""
    try:
        # Imported here because they load the charting library.
        from hasslefree.report.drawing import png
        from hasslefree.report.maps import figures, layer_map

        name = "relative-error"
        return png(layer_map(name, figures(report)[name]).svg())
    except Exception as error:  # the charting library may raise anything
        logger.warning("the model card has no picture: it could not be drawn (%s)", error)
        return None
