"""Read the content of a report: compressed folders, and the results of evaluations."""

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
# How a text may be scored, in words, by the field of a `TextResult`.
SCORINGS = {
    "window": "in windows of {} tokens",
    "tokens": "on {} tokens",
    "first_tokens": "with the first tokens {}",
}
# Stands for the block of layers outside the blocks, such as the embedding and the head.
OUTSIDE = -1


@dataclass(frozen=True)
class TextResult:
    """The results of a model on a text.

    Args:
        window: the number of tokens in a window; None if unknown.
        tokens: the number of tokens of the text; None if unknown.
        first_tokens: token ids that begin every window; None if unknown.
        kl: the KL divergence from the dense model; None if it was not measured.
    """

    perplexity: Figure
    window: Count | None = None
    tokens: Count | None = None
    first_tokens: tuple[Count, ...] | None = None
    kl: KLRecord | None = None


class _Accuracy(TypedDict):
    value: Figure


@dataclass(frozen=True)
class _Results:
    """The fields of `evaluate`'s results that a report needs."""

    model: str
    perplexity: dict[str, TextResult] = field(default_factory=dict)
    tasks: dict[str, _Accuracy] = field(default_factory=dict)
    limit: Count | None = None
    dense: "_Results | None" = None


@dataclass
class Evaluation:
    """The results of one model.

    Args:
        texts: the results on texts, by name.
        tasks: the accuracies of tasks, from 0 to 1.
        limit: the number of rows of each task; None for all.
    """

    texts: dict[str, TextResult] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    limit: int | None = None

    @property
    def perplexity(self) -> dict[str, float]:
        """The perplexities by text."""
        return {name: text.perplexity for name, text in self.texts.items()}

    @property
    def kl(self) -> dict[str, KLRecord]:
        """The KL divergences by text, if measured."""
        return {name: text.kl for name, text in self.texts.items() if text.kl is not None}

    @property
    def average(self) -> float | None:
        """The mean accuracy of the tasks; None without any."""
        if not self.tasks:
            return None
        return statistics.fmean(self.tasks.values())

    def add(self, results: _Results, names: Mapping[str, str]) -> None:
        """Add the results of a file, which replace earlier ones. names: of the texts, by path."""
        for path, text in results.perplexity.items():
            self.texts[names[path]] = text
        if results.tasks and results.limit != self.limit:
            self.tasks.clear()  # accuracies on other rows are not comparable
            self.limit = results.limit
        for name, task in results.tasks.items():
            self.tasks[name] = task["value"]


@dataclass(frozen=True)
class Run:
    """A compressed folder.

    Args:
        name: unique in the report.
        spectra: the singular values of L by layer, in descending order, divided by the largest.
        command: repeats the compression; None if the segments were given from Python.
        times: None if unknown.
    """

    name: str
    record: Record
    sizes: FolderSize
    spectra: dict[str, tuple[float, ...]]
    command: str | None
    times: Seconds | None
    evaluation: Evaluation = field(default_factory=Evaluation)

    @property
    def model(self) -> str:
        """The short name of the dense model."""
        return model_name(self.record.model)


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Args:
        others: the evaluations of other models, such as the dense one, by the model's name.
    """

    runs: tuple[Run, ...]
    others: dict[str, Evaluation]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of all models."""
        return [*self.others.values(), *(run.evaluation for run in self.runs)]

    @property
    def incomparable(self) -> dict[str, str]:
        """The texts that were scored in different ways, with these ways in words. Perplexities on
        such a text are not comparable.
        """
        results: dict[str, list[TextResult]] = {}
        for evaluation in self.evaluations:
            for name, text in evaluation.texts.items():
                results.setdefault(name, []).append(text)
        ways = {name: differences(found) for name, found in sorted(results.items())}
        return {name: way for name, way in ways.items() if way}

    def dense_bytes(self, model: str) -> int | None:
        """The bytes of a model, if it is the dense model of a folder; None otherwise."""
        for run in self.runs:
            if same_model(run.record.model, model):
                return run.sizes.dense_bytes
        return None


def differences(results: Sequence[TextResult]) -> str:
    """The differences between scorings of one text, in words; empty if there is none."""
    found: list[str] = []
    for name, words in SCORINGS.items():
        known = {getattr(result, name) for result in results} - {None}
        if len(known) > 1:
            found.append(words.format(" and ".join(map(in_words, sorted(known)))))
    return ", ".join(found)


def in_words(value: int | tuple[int, ...]) -> str:
    """A number, or the numbers of a list."""
    if isinstance(value, int):
        return str(value)
    return " ".join(map(str, value)) or "none"


def text_names(paths: Iterable[str]) -> dict[str, str]:
    """The names of texts in a report, by path: the last part, or the whole path if it may be
    another text than a path with the same last part. (a/test.txt may be /home/a/test.txt.)
    """
    paths = set(paths)
    names = {path: Path(path).name for path in paths}
    for path in paths:
        if any(Path(path).name == Path(other).name for other in paths if are_apart(path, other)):
            names[path] = path
    return names


def are_apart(one: str, other: str) -> bool:
    """Return True unless one path is the end of the other."""
    parts = zip(reversed(Path(one).parts), reversed(Path(other).parts), strict=False)
    return any(left != right for left, right in parts)


def read_content(paths: Sequence[Path]) -> Content:
    """Read folders that `compress` wrote, and JSON files that `evaluate` wrote.

    The JSON files may belong to the folders or to other models. Files that are named override the
    files in folders, and of these, the first by name overrides the others. A file in a folder
    belongs to the folder, unless it names the dense model.

    Raises:
        ModelError: a path does not exist, no folder is named, or one is named twice.
        CheckpointError: a folder or a file is damaged.
    """
    folders = resolved_folders(paths)
    named = [read_results(path) for path in paths if not path.is_dir()]
    above = os.path.commonpath([resolved.parent for resolved in folders])
    runs: dict[Path, Run] = {}
    for resolved, folder in folders.items():
        runs[resolved] = read_run(folder, str(resolved.relative_to(above)))
    measured: list[tuple[str, _Results]] = []
    for resolved, run in runs.items():
        measured += results_in(folders[resolved], run.record.model)
    measured += [(results.model, results) for results in named]
    measured = with_dense(measured)
    names = text_names(path for _, results in measured for path in results.perplexity)
    others: dict[str, Evaluation] = {}
    for model, results in measured:
        resolved = Path(model).resolve()
        if resolved in runs:
            evaluation = runs[resolved].evaluation
        else:
            same = (other for other in others if same_model(other, model))
            evaluation = others.setdefault(next(same, model), Evaluation())
        evaluation.add(results, names)
    return Content(tuple(runs.values()), others)


def results_in(folder: Path, dense: str) -> list[tuple[str, _Results]]:
    """The results in a folder, by model: the folder's, or those of its dense model."""
    found: list[tuple[str, _Results]] = []
    for file in sorted(folder.glob("evaluation*.json"), reverse=True):
        results = read_results(file)
        is_dense = same_model(results.model, dense)
        found.append((dense if is_dense else str(folder), results))
    return found


def with_dense(measured: Iterable[tuple[str, _Results]]) -> list[tuple[str, _Results]]:
    """Results by model, each followed by those of the dense model that they contain."""
    found: list[tuple[str, _Results]] = []
    for model, results in measured:
        found.append((model, results))
        if results.dense is not None:
            found.append((results.dense.model, results.dense))
    return found


def resolved_folders(paths: Sequence[Path]) -> dict[Path, Path]:
    """The folders among some paths, by their resolved path."""
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


def read_run(folder: Path, name: str) -> Run:
    """Load a folder's record, sizes and spectra."""
    sizes = inspect_folder(folder)
    record = read_record(folder)
    if len(record.layers) != len(sizes.layers):
        raise CheckpointError(
            f"compression.json in {folder} belongs to another model; download or copy the folder"
            " again"
        )
    command = command_of(record, trust_remote_code="auto_map" in read_json(folder / "config.json"))
    times = read_seconds(folder)
    return Run(name, record, sizes, read_spectra(folder), command, times)


def read_spectra(folder: Path) -> dict[str, tuple[float, ...]]:
    """The singular values of every L, as in `Run`. The folder has been checked."""
    stored = stored_tensors(weight_files(folder))
    spectra: dict[str, tuple[float, ...]] = {}
    for name in stored:
        if not name.endswith(".low_rank_u"):
            continue
        layer = name.removesuffix(".low_rank_u")
        u = _factor(stored, name)
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
    """Read a factor, and decode it if it is stored as codes."""
    factor = stored[name].read()
    scale = stored.get(f"{name}_scale")
    if scale is None:
        return factor
    return CodedRows(factor, scale.read()).values()


def spectrum(u: Tensor, v: Tensor) -> Tensor:
    """The singular values of u v, float64, in descending order.

    With u = Q R and vᵀ = P T, they are the singular values of R Tᵀ.

    Args:
        u: (out, r).
        v: (r, in).
    """
    R = torch.linalg.qr(u.double(), mode="r").R
    T = torch.linalg.qr(v.T.double(), mode="r").R
    return torch.linalg.svdvals(R @ T.T)


def same_model(one: str, other: str) -> bool:
    """Return True if two names or paths belong to the same model."""
    return Path(recorded_name(one)).resolve() == Path(recorded_name(other)).resolve()


def model_name(model: str) -> str:
    """The short name of a model: a name on the hub, or the last part of a path."""
    path = Path(model)
    if path.is_absolute() or len(path.parts) != 2:
        return path.name
    return model


def place(name: str) -> tuple[int, str]:
    """The block of a layer and its kind: model.layers.3.mlp.up_proj → 3, mlp.up_proj.

    The experts of a block have the same kind: experts.5.w1 becomes experts.w1. A name without a
    number is `OUTSIDE` the blocks.
    """
    match = _BLOCK.fullmatch(name)
    if match is None:
        return OUTSIDE, name
    return int(match[1]), _EXPERT.sub("", match[2])


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last part of each name; the whole name if another name has the same last part."""
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
