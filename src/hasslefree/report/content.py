"""What a report is made from: compressed folders, and the results of evaluations."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hasslefree.checkpoint import StoredTensor, map_tensors, read_json, weight_files
from hasslefree.core.factors import CodedRows
from hasslefree.core.protocols import Method
from hasslefree.errors import CheckpointError
from hasslefree.folder.card import trained
from hasslefree.folder.inspect import FolderSize, inspect_folder
from hasslefree.folder.record import Record, command_of, read_record
from hasslefree.phases import PhaseTime
from hasslefree.solve.methods import METHODS
from hasslefree.validation import Count, Figure, InvalidError, validated

# What `evaluate` writes is looked for under these names in a folder.
EVALUATIONS = "evaluation*.json"


@dataclass(frozen=True)
class TextResult:
    perplexity: Figure


@dataclass(frozen=True)
class TaskResult:
    value: Figure


@dataclass(frozen=True)
class Results:
    """What is read of a file that `evaluate` wrote."""

    model: str
    perplexity: dict[str, TextResult] = field(default_factory=dict)
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    average: Figure | None = None
    limit: Count | None = None


@dataclass(frozen=True)
class Seconds:
    """How long a compression took, in all, by layer and by phase.

    Args:
        compression: the SHA-256 of its compression.json. phases: those of the last run, where it was resumed.
    """

    compression: str
    seconds: Figure
    layers: dict[str, Figure]
    phases: tuple[PhaseTime, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """What was measured on one model.

    Args:
        perplexity: by text, a file by its name alone. tasks: accuracies, as shares.
        average: of the tasks; None without any. limit: rows of each task; None for all.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    average: float | None = None
    limit: int | None = None

    def __or__(self, other: Evaluation) -> Evaluation:
        """Both; where both have a figure, that of `other`."""
        texts = self.perplexity | other.perplexity
        return dataclasses.replace(other if other.tasks else self, perplexity=texts)


@dataclass(frozen=True)
class Run:
    """A compressed folder.

    Args:
        name: unlike that of any other run. spectra: by layer the singular values of L, the largest first.
        command: that repeats it; None where there is none. seconds: of the whole compression, where they are known.
        The seconds of its layers and phases are in the record.
    """

    name: str
    record: Record
    sizes: FolderSize
    spectra: dict[str, tuple[float, ...]]
    evaluation: Evaluation
    command: str | None
    seconds: float | None

    @property
    def step(self) -> str:
        """After what the objective was measured."""
        method = METHODS.get(self.record.recipe.get("method", ""))
        return Method.step if method is None else method.step

    @property
    def trained(self) -> str:
        """What was trained after the errors were measured, in words."""
        return trained(self.record)


@dataclass(frozen=True)
class Content:
    """A report. others: evaluations of other models, such as the dense one, by their name."""

    runs: tuple[Run, ...]
    others: dict[str, Evaluation]


def read_content(paths: Sequence[Path]) -> Content:
    """Folders that `compress` wrote, and JSON files that `evaluate` wrote, of these folders or of other models.

    Raises:
        CheckpointError: one that is neither, or is not as it should be; no folder at all; or one named twice.
    """
    if missing := [str(path) for path in paths if not path.exists()]:
        raise CheckpointError(f"{', '.join(missing)} does not exist; name a folder that `hasslefree compress` wrote")
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if not folders:
        raise CheckpointError("a report needs at least one folder that `hasslefree compress` wrote")
    places = [folder.resolve() for folder in folders]
    if twice := [folder for folder in folders if places.count(folder.resolve()) > 1]:
        raise CheckpointError(f"the folder {twice[0]} is named twice; once is enough")
    about: dict[Path, Evaluation] = {}
    others: dict[str, Evaluation] = {}
    for file in files:
        model, found = read_evaluation(file)
        home = Path(model).resolve()
        if home in places:
            about[home] = about.get(home, Evaluation()) | found
        else:
            others[model] = others.get(model, Evaluation()) | found
    runs = [
        read_run(folder, name, about.get(folder.resolve(), Evaluation()))
        for folder, name in zip(folders, distinct_names(folders), strict=True)
    ]
    return Content(tuple(runs), others)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of resolved paths, as many as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def read_run(folder: Path, name: str, evaluation: Evaluation) -> Run:
    """All that a folder and the files beside it tell. Weights are read for the spectra alone."""
    sizes = inspect_folder(folder)
    record = read_record(folder)
    for file in sorted(folder.glob(EVALUATIONS)):
        evaluation = read_evaluation(file)[1] | evaluation
    own_code = "auto_map" in read_json(folder / "config.json")
    seconds = read_seconds(folder, (folder / "compression.json").read_text(encoding="utf-8"))
    if seconds is not None:
        layers = (dataclasses.replace(layer, seconds=seconds.layers.get(layer.name, 0.0)) for layer in record.layers)
        record = dataclasses.replace(record, layers=tuple(layers), phases=seconds.phases)
    return Run(
        name=name,
        record=record,
        sizes=sizes,
        spectra=read_spectra(folder),
        evaluation=evaluation,
        command=command_of(record, trust_remote_code=own_code),
        seconds=None if seconds is None else seconds.seconds,
    )


def seconds_file(folder: Path) -> Path:
    """Beside the folder, which has no seconds in it, so that the same compression gives the same bytes."""
    return folder.resolve().with_name(f"{folder.resolve().name}.seconds.json")


def write_seconds(folder: Path, report: Record) -> None:
    """Keep how long a compression took, for the folder that it wrote."""
    times = {layer.name: round(layer.seconds, 3) for layer in report.layers}
    phases = tuple(PhaseTime(phase.name, round(phase.seconds, 3)) for phase in report.phases)
    digest = hashlib.sha256((folder / "compression.json").read_bytes()).hexdigest()
    content = dataclasses.asdict(Seconds(digest, round(report.seconds, 3), times, phases))
    seconds_file(folder).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_seconds(folder: Path, compression: str) -> Seconds | None:
    """What `write_seconds` wrote; None where there is nothing, or it is of another compression.

    Args:
        compression: the content of compression.json.
    """
    file = seconds_file(folder)
    if not file.is_file():
        return None
    content = read_json(file, "it holds only the seconds of the run; delete it")
    if content.get("compression") != hashlib.sha256(compression.encode()).hexdigest():
        return None
    try:
        return validated(Seconds, content)
    except InvalidError as error:
        raise CheckpointError(f"{file} is damaged ({error}). It holds only the seconds of the run; delete it") from None


def read_evaluation(file: Path) -> tuple[str, Evaluation]:
    """The model and the figures in a file that `evaluate` wrote.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        found = validated(Results, read_json(file))
    except InvalidError as error:
        raise CheckpointError(f"{file} holds no results of `hasslefree evaluate` ({error})") from None
    if not found.perplexity and not found.tasks:
        raise CheckpointError(f"{file} holds no results of `hasslefree evaluate`: neither of texts nor of tasks")
    if found.tasks and found.average is None:
        raise CheckpointError(f"{file} has results of tasks without their average; run `hasslefree evaluate` again")
    texts = {Path(text).name: row.perplexity for text, row in found.perplexity.items()}
    return found.model, Evaluation(texts, {n: row.value for n, row in found.tasks.items()}, found.average, found.limit)


def read_spectra(folder: Path) -> dict[str, tuple[float, ...]]:
    """The singular values of every L in a folder whose headers were checked, by the layer's name.

    Raises:
        CheckpointError: a factor holds NaN or Inf.
    """
    ends = {"low_rank_u", "low_rank_v"}
    stored = map_tensors(weight_files(folder))
    found = {}
    for name in (name for name in stored if name.rpartition(".")[2] in ends):
        layer = name.rpartition(".")[0]
        if layer in found:
            continue
        u, v = (_factor(stored, f"{layer}.{leaf}") for leaf in sorted(ends))
        if not (torch.isfinite(u).all() and torch.isfinite(v).all()):
            raise CheckpointError(f"the factors of {layer} in {folder} contain NaN or Inf; compress the model again")
        found[layer] = tuple(spectrum(u, v).tolist())
    return found


def _factor(stored: Mapping[str, StoredTensor], name: str) -> Tensor:
    """A factor, decoded if it is stored as codes."""
    factor, scale = stored[name].tensor, stored.get(f"{name}_scale")
    return factor if scale is None else CodedRows(factor, scale.tensor).values()


def spectrum(u: Tensor, v: Tensor) -> Tensor:
    """The singular values of u v, float64, the largest first, for u: (out, r), v: (r, in).

    With u = Q R and vᵀ = P T they are those of R Tᵀ, which is small.
    """
    left, right = (torch.linalg.qr(factor.double(), mode="r").R for factor in (u, v.T))
    return torch.linalg.svdvals(left @ right.T)
