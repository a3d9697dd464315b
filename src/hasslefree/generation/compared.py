"""The compressed model and its dense original, loaded for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from hasslefree.errors import CheckpointError, RecipeError
from hasslefree.folder.record import read_record
from hasslefree.generation.sample import warm_up
from hasslefree.models.load import load_model, load_tokenizer
from hasslefree.packed.linear import compressed_layers, use_backend

# The value of --dense that leaves the dense model out.
NONE = "none"


@dataclass(frozen=True)
class ComparedModel:
    """A loaded model. role: dense or compressed. name: as it was given."""

    role: str
    name: str
    model: PreTrainedModel
    tokenizer: Any

    @property
    def bytes(self) -> int:
        """The memory of its weights, including the copies that backends hold."""
        copies = [layer.cached_sparse for layer in compressed_layers(self.model).values()]
        return int(self.model.get_memory_footprint()) + sum(copy.nbytes for copy in copies if copy is not None)


def load_compared_model(role: str, name: str, **how: Any) -> ComparedModel:
    """how: the dtype, device and trust_remote_code of `load_model`."""
    tokenizer = load_tokenizer(name, how.get("trust_remote_code", False))
    return ComparedModel(role, name, load_model(name, **how), tokenizer)


def load_compared_models(
    folder: str, dense: str | None, backend: str | None, threads: int | None, **how: Any
) -> tuple[list[ComparedModel], str | None]:
    """The dense model, if it is available locally, and the compressed one.

    Args:
        dense: the dense model; None for the one that the record of `folder` names, if it is available locally; "none"
            for no dense model.
        backend: of the compressed layers; None for the automatic choice. threads: of torch; None for torch's default.
        how: the dtype, device and trust_remote_code of `load_model`.

    Returns:
        The models, and a sentence that says why there is no dense one, where one was expected.

    Raises:
        HasslefreeError: a model that cannot be loaded or is not compressed, or a backend that is not possible.
    """
    if threads is not None:
        if threads < 1:
            raise RecipeError(f"threads must be at least 1, got {threads}", ("threads",))
        torch.set_num_threads(threads)
    remark = None
    if dense is None:
        dense, remark = recorded_dense(Path(folder))
    compressed = load_compared_model("compressed", folder, **how)
    if not compressed_layers(compressed.model):
        raise CheckpointError(f"{folder} has no compressed layers; give a folder that `hasslefree compress` wrote")
    use_backend(compressed.model, backend)
    warm_up(compressed.model)
    if dense is None or dense == NONE:
        return [compressed], remark
    return [load_compared_model("dense", dense, **how), compressed], None


def recorded_dense(folder: Path) -> tuple[str | None, str | None]:
    """The dense model that compression.json names, as a local folder; or None, and a sentence that says why."""
    if not (folder / "compression.json").is_file():
        return None, f"{folder} has no compression.json, which would name the dense model; give that with --dense."
    try:
        name = read_record(folder).model
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or give the dense one with --dense") from None
    if found := at_hand(name):
        return str(found), None
    return (
        None,
        f"The dense model {name} was not found from this folder or in the cache of the hub; name it with --dense.",
    )


def at_hand(name: str) -> Path | None:
    """The local folder of a model or its folder in the cache of the hub, if it holds weights; nothing is downloaded."""
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            return None
    return folder if any(folder.glob("*.safetensors")) else None
