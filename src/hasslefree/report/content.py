"""What a report is made from: compressed folders, and the results of evaluations."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import TypedDict

from hasslefree.checkpoint.inspect import FolderSize, inspect_folder
from hasslefree.checkpoint.output import write_whole
from hasslefree.checkpoint.record import Record, command_of, read_record
from hasslefree.core.factors import CodedRows
from hasslefree.errors import CheckpointError, ModelError
from hasslefree.files import StoredTensor, read_json, stored_tensors, weight_files
from hasslefree.progress import PhaseTime
from hasslefree.validation import Count, Figure, InvalidError, validated

_BLOCK = re.compile(r"(?:.*?\.)?(\d{1,9})\.(.+)")
_EXPERT = re.compile(r"\.\d+(?=\.)")


class _Perplexity(TypedDict):
    perplexity: Figure


class _Accuracy(TypedDict):
    value: Figure


@dataclass(frozen=True)
class _Results:
    """What is read of a file that `evaluate` wrote."""

    model: str
    perplexity: dict[str, _Perplexity] = field(default_factory=dict)
    tasks: dict[str, _Accuracy] = field(default_factory=dict)
    limit: Count | None = None
    dense: "_Results | None" = None


@dataclass(frozen=True)
class Seconds:
    """How long a compression took. compression: SHA-256 of its compression.json. phases: of the
    last, resumed run.
    """

    compression: str
    seconds: Figure
    layers: dict[str, Figure]
    phases: tuple[PhaseTime, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """Perplexities by text, and accuracies of tasks as shares, of one model. limit: rows of each
    task; None for all.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    limit: int | None = None

    @property
    def average(self) -> float | None:
        """Of the tasks; None without any."""
        return sum(self.tasks.values()) / len(self.tasks) if self.tasks else None

    def __or__(self, other: "Evaluation") -> "Evaluation":
        """Both; where both have a result, that of `other`."""
        texts = self.perplexity | other.perplexity
        return dataclasses.replace(other if other.tasks else self, perplexity=texts)


@dataclass(frozen=True)
class Run:
    """A compressed folder. name: unlike that of any other run. record: with seconds, where they are
    known.

    spectra: by layer the singular values of L, the largest first. command: repeats the compression;
    None where its text was given from Python. seconds: of the whole compression; None where they
    are unknown.
    """

    name: str
    record: Record
    sizes: FolderSize
    spectra: dict[str, tuple[float, ...]]
    evaluation: Evaluation
    command: str | None
    seconds: float | None


@dataclass(frozen=True)
class Content:
    """A report. others: evaluations of other models, such as the dense one, by their name."""

    runs: tuple[Run, ...]
    others: dict[str, Evaluation]


def read_content(paths: Sequence[Path]) -> Content:
    """Folders that `compress` wrote, and JSON files that `evaluate` wrote, of these folders or of
    other models.
    """
    if missing := [str(path) for path in paths if not path.exists()]:
        raise ModelError(
            f"{', '.join(missing)} does not exist; name a folder that `hasslefree compress` wrote"
        )
    folders: dict[Path, Path] = {}
    for path in filter(Path.is_dir, paths):
        if path.resolve() in folders:
            raise ModelError(f"the folder {path} is named twice; remove one")
        folders[path.resolve()] = path
    if not folders:
        raise ModelError("a report needs at least one folder that `hasslefree compress` wrote")
    # A file that is named wins over those in the folders, and of these the first.
    inside = [
        (file, owner)
        for owner in folders
        for file in sorted(owner.glob("evaluation*.json"), reverse=True)
    ]
    evaluations: dict[Path | str, Evaluation] = {}
    for file, owner in [*inside, *((path, None) for path in paths if not path.is_dir())]:
        for model, evaluation in read_evaluation(file, owner):
            key = Path(model).resolve() if Path(model).resolve() in folders else model
            evaluations[key] = evaluations.get(key, Evaluation()) | evaluation
    names = distinct_names([*folders])
    runs = [
        read_run(folder, name, evaluations.pop(resolved, Evaluation()))
        for (resolved, folder), name in zip(folders.items(), names, strict=True)
    ]
    return Content(
        tuple(runs), {str(model): evaluation for model, evaluation in evaluations.items()}
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of resolved paths, as many as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def read_run(folder: Path, name: str, evaluation: Evaluation) -> Run:
    """Load a folder's record, sizes and spectra."""
    sizes, record = inspect_folder(folder), read_record(folder)
    if len(record.layers) != len(sizes.layers):
        raise CheckpointError(
            f"compression.json in {folder} is of another model; download or copy the folder again"
        )
    command = command_of(record, trust_remote_code="auto_map" in read_json(folder / "config.json"))
    seconds = read_seconds(folder, (folder / "compression.json").read_text(encoding="utf-8"))
    if seconds is not None:
        layers = (
            dataclasses.replace(layer, seconds=seconds.layers.get(layer.name, 0.0))
            for layer in record.layers
        )
        record = dataclasses.replace(record, layers=tuple(layers), phases=seconds.phases)
    total = None if seconds is None else seconds.seconds
    return Run(name, record, sizes, read_spectra(folder), evaluation, command, total)


def seconds_file(folder: Path) -> Path:
    """Beside the folder, which has no seconds in it, so that the same compression gives the same
    bytes.
    """
    return folder.resolve().with_name(f"{folder.resolve().name}.seconds.json")


def write_seconds(folder: Path, report: Record) -> None:
    """Keep how long a compression took, for the folder that it wrote."""
    times = {layer.name: round(layer.seconds, 3) for layer in report.layers}
    phases = tuple(PhaseTime(phase.name, round(phase.seconds, 3)) for phase in report.phases)
    digest = hashlib.sha256((folder / "compression.json").read_bytes()).hexdigest()
    content = dataclasses.asdict(Seconds(digest, round(report.seconds, 3), times, phases))
    write_whole(seconds_file(folder), json.dumps(content, indent=1) + "\n")


def read_seconds(folder: Path, compression: str) -> Seconds | None:
    """What `write_seconds` wrote; None without a file, or of another compression; a CheckpointError
    if damaged.
    """
    file, remedy = (
        seconds_file(folder),
        "move or delete it: hasslefree keeps the seconds of a run there",
    )
    if not file.exists():
        return None
    try:
        seconds = validated(Seconds, read_json(file, remedy))
    except InvalidError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {remedy}") from None
    return (
        seconds if seconds.compression == hashlib.sha256(compression.encode()).hexdigest() else None
    )


def read_evaluation(
    file: Path, owner: Path | None = None
) -> Iterator[tuple[str | Path, Evaluation]]:
    """The model and results in a file of `evaluate`; then the dense model's, if any. owner: the
    model's folder.
    """
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
    for each in filter(None, (results, results.dense)):
        texts = {Path(text).name: row["perplexity"] for text, row in each.perplexity.items()}
        tasks = {name: row["value"] for name, row in each.tasks.items()}
        yield (
            owner if owner and each is results else each.model,
            Evaluation(texts, tasks, each.limit),
        )


def read_spectra(folder: Path) -> dict[str, tuple[float, ...]]:
    """The singular values of every L in a folder that was checked, by the layer's name."""
    stored, spectra = stored_tensors(weight_files(folder)), {}
    for layer in [
        name.removesuffix(".low_rank_u") for name in stored if name.endswith(".low_rank_u")
    ]:
        u, v = (_factor(stored, f"{layer}.low_rank_{side}") for side in "uv")
        if not (torch.isfinite(u).all() and torch.isfinite(v).all()):
            raise CheckpointError(
                f"the factors of {layer} in {folder} contain NaN or Inf; compress the model again"
            )
        spectra[layer] = tuple(spectrum(u, v).tolist())
    return spectra


def _factor(stored: Mapping[str, StoredTensor], name: str) -> Tensor:
    """A factor, decoded if it is stored as codes."""
    factor, scale = stored[name].read(), stored.get(f"{name}_scale")
    return factor if scale is None else CodedRows(factor, scale.read()).values()


def spectrum(u: Tensor, v: Tensor) -> Tensor:
    """The singular values of u v, float64, the largest first, of u: (out, r), v: (r, in): those of
    R Tᵀ.
    """
    # u = Q R and vᵀ = P T.
    left, right = (torch.linalg.qr(factor.double(), mode="r").R for factor in (u, v.T))
    return torch.linalg.svdvals(left @ right.T)


def place(name: str) -> tuple[int, str]:
    """The block of a layer and its kind: model.layers.3.mlp.up_proj → 3, mlp.up_proj. Without a
    number, block 0.
    """
    match = _BLOCK.fullmatch(name)
    return (int(match[1]), match[2]) if match else (0, name)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last part of each name where that tells them apart, else all of it."""
    leaves: dict[str, set[str]] = {}
    for name in names:
        leaves.setdefault(name.rpartition(".")[2], set()).add(name)
    return {
        name: leaf if len(alike) == 1 else name for leaf, alike in leaves.items() for name in alike
    }


def places(names: Iterable[str], merge_experts: bool = False) -> dict[str, tuple[int, str]]:
    """The block and the shortened kind of each layer. merge_experts: experts.5.w1 becomes
    experts.w1, one kind.
    """
    long = {name: place(name) for name in names}
    if merge_experts:
        long = {name: (block, _EXPERT.sub("", kind)) for name, (block, kind) in long.items()}
    short = short_names(kind for _, kind in long.values())
    return {name: (block, short[kind]) for name, (block, kind) in long.items()}


def error_range(errors: Iterable[float]) -> tuple[float, float]:
    """The least error above 0 and the most; both 1 where all are 0."""
    positive = [error for error in errors if error > 0] or [1.0]
    return min(positive), max(positive)
