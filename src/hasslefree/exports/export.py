"""Export a compressed folder for programs without hasslefree."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from hasslefree.bar import with_bar
from hasslefree.checkpoint.card import export_card
from hasslefree.checkpoint.entries import QUANT_METHOD
from hasslefree.checkpoint.originals import (
    CODE_FILES,
    PROCESSOR_FILES,
    TEXT_FILES,
    copy_original_files,
    read_configuration,
    restore_keys,
)
from hasslefree.checkpoint.output import (
    check_files,
    check_output,
    replaced_files,
    replaced_whole,
)
from hasslefree.errors import ModelError, OutputError, UnknownNameError, option
from hasslefree.exports.codes import check_held
from hasslefree.exports.converter import dense_template
from hasslefree.exports.formats import (
    Folders,
    Target,
    dense_shapes,
    write_adapter,
    write_dense,
    write_narrow,
)
from hasslefree.exports.gguf import SUFFIX, Files, write_gguf
from hasslefree.exports.quantised import write_compressed_tensors, write_mlx
from hasslefree.files import edited_json, read_json
from hasslefree.models.load import auto_class, load_config, load_model, quantization
from hasslefree.models.rules import by_kind
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.models.unloaded import unloaded_tensors, without_codes
from hasslefree.packed.linear import compressed_layers
from hasslefree.progress import LOADING, WRITING, Listener, Phases
from hasslefree.validation import typed

logger = logging.getLogger(__name__)

# Each function takes the model, which it may change in place, and writes it into the target.
EXPORTS: dict[str, Callable[[PreTrainedModel, Target], Folders]] = {
    "dense": write_dense,
    "peft": write_adapter,
    "narrow": write_narrow,
    "compressed-tensors": write_compressed_tensors,
    "mlx": write_mlx,
    "gguf": write_gguf,
}
# Exports that contain the tensors that transformers does not load. A GGUF file has those that
# llama.cpp's converter reads.
COPYING = ("dense", "gguf")
# The engine whose files an export writes.
ENGINE_OF = {"compressed-tensors": "vllm", "mlx": "mlx", "gguf": "llama.cpp"}
# A size such as 5GB, but not 0GB.
SIZE = re.compile(r"(?=.*[1-9])\d{1,12}(\.\d{1,6})?\s?[KMGT]B", re.IGNORECASE)


@typed
@with_bar
def export(
    folder: str | Path,
    destination: str | Path,
    to: str = "dense",
    *,
    template: str | Path | None = None,
    converter: str | Path | None = None,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> None:
    """Write a compressed model for programs without hasslefree.

    Args:
        folder: a compressed model.
        destination: the folder to write; for "gguf", a file if its name ends with .gguf.
        to: "dense" (S + u v as plain weights), "peft" (an adapter with u v, and S as its base model
            in base/), "narrow" (dense, without the heads and neurons that no layer reads), or a
            format that keeps the codes of a quantised S: "gguf" (model.gguf and adapter.gguf for
            llama.cpp), "mlx" (an adapter, and base/) or "compressed-tensors" (a PEFT adapter, and
            base/ for vLLM and transformers).
        template: for "gguf": the dense model that was compressed, as llama.cpp's converter writes
            it (bf16, f16, f32); if None, the converter is run on the model that the record names.
        converter: for "gguf": llama.cpp's convert_hf_to_gguf.py, or its folder; if None, the one on
            the PATH or beside the interpreter.
        overwrite: replace a destination that is not empty, once the new one is complete.
        trust_remote_code, progress: as for `hasslefree.compress`.

    Raises:
        HasslefreeError: `to` is unknown, the folder is not compressed, the destination cannot be
            written, the format cannot hold the grid, the template is of another model, or the
            converter is missing or fails.
    """
    check_options(to, max_shard_size, {"template": template, "converter": converter})
    source = Path(folder).resolve()
    target = Path(destination).resolve()
    config = compressed_config(source, trust_remote_code)
    if to in ENGINE_OF:
        check_held(config, ENGINE_OF[to])
    files = None
    if to == "gguf" and target.suffix == SUFFIX:
        files = Files.of(target).starts
        check_files(files, overwrite)
    else:
        check_output(target, overwrite, source=source)
    phases = Phases(progress)
    dense = None
    with phases.phase(LOADING):
        if to == "gguf":
            workspace = next(parent for parent in target.parents if parent.exists())
            dense = dense_template(source, template, converter, workspace, config.dtype)
        model = load_model(str(source), "auto", "cpu", trust_remote_code)
        warn_of_left_out(model, to)
    # Compressed folders have transformers' names of tensors; an export has those of the family's
    # checkpoints.
    model._weight_conversions = None  # type: ignore[assignment]
    if files is None:
        check_output(target, overwrite, bytes_needed(model))
        writing = replaced_whole(target, overwrite)
    else:
        writing = replaced_files(list(files))
    with phases.phase(WRITING), writing as part:
        # An adapter refers to its base by the path that was given. A GGUF file may be a link.
        final = target if to == "gguf" else Path(destination)
        folders = EXPORTS[to](model, Target(part, final, max_shard_size, dense))
        if files is None:
            copy_rest(source, part, folders, model.config, trust_remote_code)


def warn_of_left_out(model: PreTrainedModel, to: str) -> None:
    """Warn of tensors that the export leaves out because transformers does not load them, such as
    layers that predict further tokens.
    """
    if to in COPYING:
        return
    if left_out := by_kind(without_codes(unloaded_tensors(model))):
        logger.warning(
            "left out of %s, since transformers does not load them: %s; the dense export has them",
            to,
            ", ".join(left_out),
        )


def check_options(to: str, max_shard_size: str, options: Mapping[str, object]) -> None:
    """Raise an error for arguments of `export` that are wrong for every model.

    options: the options for GGUF alone, by name; None for those that are not given.
    """
    if to not in EXPORTS:
        raise UnknownNameError("export format", to, EXPORTS)
    if not SIZE.fullmatch(max_shard_size):
        raise OutputError(
            f"{option('max_shard_size')} must be a number with a unit, such as 5GB or 500MB, got"
            f" {max_shard_size!r}"
        )
    for name, value in options.items():
        if value is not None and to != "gguf":
            raise OutputError(f"{option(name)} is for {option('to', 'gguf')}; leave it out")


def compressed_config(source: Path, trust_remote_code: bool) -> Any:
    """The configuration of a folder. Raises a ModelError if the folder is not compressed."""
    if not source.is_dir():
        raise ModelError(
            f"the model folder {source} does not exist; export takes a folder that compress wrote"
        )
    config = load_config(str(source), trust_remote_code)
    if quantization(config).get("quant_method") != QUANT_METHOD:
        raise ModelError(
            f"{source} is not compressed by hasslefree, so there is nothing to export; compress it"
            " first"
        )
    return config


def bytes_needed(model: PreTrainedModel) -> int:
    """An upper bound of the bytes of an export: S with its zeros, the factors, all other
    parameters, and 50 MB for the tokenizer.
    """
    entries = sum(parameter.numel() for parameter in dense_shapes(model).parameters())
    for layer in compressed_layers(model).values():
        entries += layer.spec.rank * sum(layer.spec.shape)
    return entries * model.dtype.itemsize + 50_000_000


def copy_rest(
    source: Path,
    part: Path,
    folders: Folders,
    config: PretrainedConfig,
    trust_remote_code: bool,
) -> None:
    """Write the tokenizer, the model cards and the record, and complete the configuration.

    Args:
        part: the folder of the export, until it is complete.
        config: the configuration that was written.
    """
    tokenizer = None
    if (source / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(str(source), trust_remote_code)
    recorded = (source / "compression.json").exists()
    if recorded:
        read_json(source / "compression.json")  # raises an error if it is damaged
        shutil.copyfile(source / "compression.json", part / "compression.json")
    for kind, folder in folders.items():
        if kind != "gguf":  # a GGUF file has a tokenizer of its own
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            patterns = TEXT_FILES + PROCESSOR_FILES
            if trust_remote_code:
                patterns += CODE_FILES
            copy_original_files(str(source), folder, patterns)
        config_file = folder / "config.json"
        if config_file.exists():  # an adapter has none
            restore_keys(config_file, read_configuration(str(source)), config)
            write_older_rotary(config_file)
        card = export_card(kind, source.name, recorded, auto_class(config).__name__)
        (folder / "README.md").write_text(card, encoding="utf-8")


def write_older_rotary(file: Path) -> None:
    """Add `rope_theta`, `rope_scaling` and `partial_rotary_factor` to a config.json that has only
    `rope_parameters`.

    A program that reads only the older entries would use its default base, and compute wrong
    results without an error.
    """
    with edited_json(file) as config:
        for part in (config, config.get("text_config") or {}):
            rest = dict(part.get("rope_parameters") or {})
            if "rope_theta" not in rest:  # the parameters differ from layer to layer
                continue
            for name in ("rope_theta", "partial_rotary_factor"):
                if name in rest:
                    add_missing(part, name, rest.pop(name))
            if rest.get("rope_type", "default") != "default":
                add_missing(part, "rope_scaling", rest)


def add_missing(part: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry that is missing or null."""
    if part.get(name) is None:
        part[name] = value
