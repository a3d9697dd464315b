"""What a report is made from: compressed folders, and the results of evaluations."""

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from hasslefree.checkpoint.inspect import FolderSize, inspect_folder
from hasslefree.checkpoint.record import KLRecord, Record, command_of, read_record
from hasslefree.core.factors import CodedRows
from hasslefree.errors import CheckpointError, ModelError
from hasslefree.files import StoredTensor, read_json, stored_tensors, weight_files
from hasslefree.models.names import recorded_name
from hasslefree.report.seconds import Seconds, read_seconds
from hasslefree.validation import Count, Figure, InvalidError, validated

_BLOCK = re.compile(r"(?:.*?\.)?(\d{1,9})\.(.+)")
_EXPERT = re.compile(r"\.\d+(?=\.)")
# The block of a layer that is in none, such as the embedding and the head.
OUTSIDE = -1


class _Perplexity(TypedDict):
    perplexity: Figure
    window: NotRequired[Count]
    kl: NotRequired[KLRecord]


class _Accuracy(TypedDict):
    value: Figure


@dataclass(frozen=True)
class _Results:
    """The part of a file of `evaluate` that a report needs."""

    model: str
    perplexity: dict[str, _Perplexity] = field(default_factory=dict)
    tasks: dict[str, _Accuracy] = field(default_factory=dict)
    limit: Count | None = None
    dense: "_Results | None" = None


@dataclass
class Evaluation:
    """The results of one model: perplexities by text, and accuracies of tasks as shares.

    Args:
        windows: the tokens in a window of each text, where they are known.
        kl: the KL divergence from the dense model, by text, where it was measured.
        limit: the rows of each task; None for all.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    kl: dict[str, KLRecord] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    limit: int | None = None

    @property
    def average(self) -> float | None:
        """The mean accuracy of the tasks; None without any."""
        if not self.tasks:
            return None
        return statistics.fmean(self.tasks.values())

    def add(self, results: _Results) -> None:
        """Add what a file holds, which replaces an earlier result. A text is known by the last part
        of its path.
        """
        for text, row in results.perplexity.items():
            name = Path(text).name
            self.perplexity[name] = row["perplexity"]
            self.windows.pop(name, None)
            if "window" in row:
                self.windows[name] = row["window"]
            self.kl.pop(name, None)
            if "kl" in row:
                self.kl[name] = row["kl"]
        if results.tasks and results.limit != self.limit:
            self.tasks.clear()  # accuracies on other rows do not compare
            self.limit = results.limit
        for name, task in results.tasks.items():
            self.tasks[name] = task["value"]


@dataclass(frozen=True)
class Run:
    """A compressed folder.

    Args:
        name: unlike that of any other folder of the report.
        spectra: the singular values of L by layer, as shares of the largest, which is first.
        command: repeats the compression; None if its text was given from Python.
        times: None if they are unknown.
    """

    name: str
    record: Record
    sizes: FolderSize
    spectra: dict[str, tuple[float, ...]]
    evaluation: Evaluation
    command: str | None
    times: Seconds | None

    @property
    def model(self) -> str:
        """The short name of the dense model."""
        return model_name(self.record.model)


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Args:
        others: the evaluations of other models, such as the dense one, by their name.
    """

    runs: tuple[Run, ...]
    others: dict[str, Evaluation]

    @property
    def evaluations(self) -> list[Evaluation]:
        """Those of all models."""
        return [*self.others.values(), *(run.evaluation for run in self.runs)]

    @property
    def unlike(self) -> dict[str, list[int]]:
        """The texts whose perplexities do not compare, with the tokens in their windows."""
        found: dict[str, list[int]] = {}
        for text in {text for each in self.evaluations for text in each.windows}:
            windows = {each.windows[text] for each in self.evaluations if text in each.windows}
            if len(windows) > 1:
                found[text] = sorted(windows)
        return dict(sorted(found.items()))

    def dense_bytes(self, model: str) -> int | None:
        """The bytes of the dense model from which a folder was made; None for any other model."""
        for run in self.runs:
            if same_model(run.record.model, model):
                return run.sizes.dense_bytes
        return None


def read_content(paths: Sequence[Path]) -> Content:
    """Read folders that `compress` wrote, and JSON files that `evaluate` wrote.

    The JSON files may be those of the folders, or of other models.

    Raises:
        ModelError: a path does not exist, or no folder is named, or one twice.
        CheckpointError: a folder or a file is damaged.
    """
    folders = resolved_folders(paths)
    evaluations = read_evaluations(paths, folders)
    above = os.path.commonpath([resolved.parent for resolved in folders])
    runs: list[Run] = []
    for resolved, folder in folders.items():
        evaluation = evaluations.pop(str(resolved), Evaluation())
        runs.append(read_run(folder, str(resolved.relative_to(above)), evaluation))
    return Content(tuple(runs), evaluations)


def resolved_folders(paths: Sequence[Path]) -> dict[Path, Path]:
    """The folders among some paths, by their resolved paths."""
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ModelError(
            f"{', '.join(missing)} does not exist; name a folder that `hasslefree compress` wrote"
        )
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            continue
        if path.resolve() in folders:
            raise ModelError(f"the folder {path} is named twice; remove one")
        folders[path.resolve()] = path
    if not folders:
        raise ModelError("a report needs at least one folder that `hasslefree compress` wrote")
    return folders


def read_evaluations(paths: Sequence[Path], folders: Mapping[Path, Path]) -> dict[str, Evaluation]:
    """The evaluations in the folders and in the files that are named, by resolved folder or model.

    A file that is named wins over those in the folders, and of these the first by name. A file in a
    folder is that of the folder, unless it names the dense model.
    """
    evaluations: dict[str, Evaluation] = {}

    def add(model: str, results: _Results) -> None:
        resolved = Path(model).resolve()
        key = str(resolved) if resolved in folders else model
        evaluations.setdefault(key, Evaluation()).add(results)
        if results.dense is not None:
            add(results.dense.model, results.dense)

    for resolved, folder in folders.items():
        files = sorted(folder.glob("evaluation*.json"), reverse=True)
        dense = read_record(folder).model if files else ""
        for file in files:
            results = read_results(file)
            add(dense if same_model(results.model, dense) else str(resolved), results)
    for path in paths:
        if not path.is_dir():
            results = read_results(path)
            add(results.model, results)
    return evaluations


def read_results(file: Path) -> _Results:
    """Read a file of `evaluate`. Raises a CheckpointError if it holds no results."""
    try:
        results = validated(_Results, read_json(file))
    except InvalidError as error:
        raise CheckpointError(
            f"{file} holds no results of `hasslefree evaluate` ({error})"
        ) from None
    if not results.perplexity and not results.tasks:
        raise CheckpointError(
            f"{file} holds no results of `hasslefree evaluate`: neither of texts nor of tasks"
        )
    return results


def read_run(
    folder: Path,
    name: str,
    evaluation: Evaluation,
) -> Run:
    """Load a folder's record, sizes and spectra."""
    sizes = inspect_folder(folder)
    record = read_record(folder)
    if len(record.layers) != len(sizes.layers):
        raise CheckpointError(
            f"compression.json in {folder} is of another model; download or copy the folder again"
        )
    command = command_of(record, trust_remote_code="auto_map" in read_json(folder / "config.json"))
    times = read_seconds(folder, (folder / "compression.json").read_text(encoding="utf-8"))
    return Run(name, record, sizes, read_spectra(folder), evaluation, command, times)


def read_spectra(folder: Path) -> dict[str, tuple[float, ...]]:
    """The singular values of every L in a folder that was checked, as in `Run`."""
    stored = stored_tensors(weight_files(folder))
    spectra: dict[str, tuple[float, ...]] = {}
    for name in stored:
        if not name.endswith(".low_rank_u"):
            continue
        layer = name.removesuffix(".low_rank_u")
        u = _factor(stored, f"{layer}.low_rank_u")
        v = _factor(stored, f"{layer}.low_rank_v")
        if not (torch.isfinite(u).all() and torch.isfinite(v).all()):
            raise CheckpointError(
                f"the factors of {layer} in {folder} contain NaN or Inf; compress the model again"
            )
        values = spectrum(u, v)
        largest = values[0].clamp_min(torch.finfo(values.dtype).tiny)
        spectra[layer] = tuple((values / largest).tolist())
    return spectra


def _factor(stored: Mapping[str, StoredTensor], name: str) -> Tensor:
    """A factor, decoded if it is stored as codes."""
    factor = stored[name].read()
    scale = stored.get(f"{name}_scale")
    if scale is None:
        return factor
    return CodedRows(factor, scale.read()).values()


def spectrum(u: Tensor, v: Tensor) -> Tensor:
    """The singular values of u v, float64, the largest first.

    With u = Q R and vᵀ = P T, they are those of R Tᵀ.

    Args:
        u: (out, r).
        v: (r, in).
    """
    R = torch.linalg.qr(u.double(), mode="r").R
    T = torch.linalg.qr(v.T.double(), mode="r").R
    return torch.linalg.svdvals(R @ T.T)


def same_model(one: str, other: str) -> bool:
    """Say whether two names or paths are of one model."""
    return Path(recorded_name(one)).resolve() == Path(recorded_name(other)).resolve()


def model_name(model: str) -> str:
    """A name on the hub as it is, and the last part of a path of this machine."""
    path = Path(model)
    if path.is_absolute() or len(path.parts) != 2:
        return path.name
    return model


def place(name: str) -> tuple[int, str]:
    """The block of a layer and its kind: model.layers.3.mlp.up_proj → 3, mlp.up_proj.

    The experts of a block are of one kind: experts.5.w1 becomes experts.w1. A name without a number
    is `OUTSIDE` of the blocks.
    """
    match = _BLOCK.fullmatch(name)
    if match is None:
        return OUTSIDE, name
    return int(match[1]), _EXPERT.sub("", match[2])


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last part of each name if no other name ends in it, else all of the name."""
    short = {name: name.rpartition(".")[2] for name in names}
    times = Counter(short.values())
    for name, leaf in short.items():
        if times[leaf] > 1:
            short[name] = name
    return short


def places(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The block and the shortened kind of each layer."""
    found = {name: place(name) for name in names}
    short = short_names(kind for _, kind in found.values())
    for name, (block, kind) in found.items():
        found[name] = block, short[kind]
    return found
