"""What a report is made from: compressed folders, and the results of evaluations."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import TypedDict

from hasslefree.checkpoint.inspect import FolderSize, inspect_folder
from hasslefree.checkpoint.record import Record, command_of, read_record
from hasslefree.core.factors import CodedRows
from hasslefree.errors import CheckpointError, ModelError
from hasslefree.files import StoredTensor, read_json, stored_tensors, weight_files
from hasslefree.packed.spec import LayerSpec
from hasslefree.report.seconds import read_seconds
from hasslefree.validation import Count, Figure, InvalidError, validated

_BLOCK = re.compile(r"(?:.*?\.)?(\d{1,9})\.(.+)")
_EXPERT = re.compile(r"\.\d+(?=\.)")


class _Perplexity(TypedDict):
    perplexity: Figure


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

    @property
    def evaluation(self) -> "Evaluation":
        """The figures alone; a text is known by the last part of its path."""
        texts: dict[str, float] = {}
        for text, perplexity in self.perplexity.items():
            texts[Path(text).name] = perplexity["perplexity"]
        tasks: dict[str, float] = {}
        for name, accuracy in self.tasks.items():
            tasks[name] = accuracy["value"]
        return Evaluation(texts, tasks, self.limit)


@dataclass(frozen=True)
class Evaluation:
    """The results of one model: perplexities by text, and accuracies of tasks as shares.

    Args:
        limit: the rows of each task; None for all.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    limit: int | None = None

    @property
    def average(self) -> float | None:
        """The mean accuracy of the tasks; None without any."""
        if not self.tasks:
            return None
        return sum(self.tasks.values()) / len(self.tasks)

    def __or__(self, other: "Evaluation") -> "Evaluation":
        """Both; where both have a result, that of `other`."""
        texts = self.perplexity | other.perplexity
        return dataclasses.replace(other if other.tasks else self, perplexity=texts)


@dataclass(frozen=True)
class Run:
    """A compressed folder.

    Args:
        name: unlike that of any other folder of the report.
        record: with seconds, if they are known.
        spectra: the singular values of L by layer, the largest first.
        command: repeats the compression; None if its text was given from Python.
        seconds: of the whole compression; None if they are unknown.
    """

    name: str
    record: Record
    sizes: FolderSize
    spectra: dict[str, tuple[float, ...]]
    evaluation: Evaluation
    command: str | None
    seconds: float | None


@dataclass(frozen=True)
class Parts:
    """The parts that at least one of some layers has.

    Args:
        quantised: S is on a grid.
        sparse: S has a pattern of zeros.
        low_rank: L is not zero.
    """

    quantised: bool
    sparse: bool
    low_rank: bool

    @classmethod
    def of(cls, specs: Iterable[LayerSpec]) -> "Parts":
        """Look at every layer once."""
        quantised = False
        sparse = False
        low_rank = False
        for spec in specs:
            quantised = quantised or spec.grid is not None
            sparse = sparse or spec.pattern != "dense"
            low_rank = low_rank or spec.rank > 0
        return cls(quantised, sparse, low_rank)


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Args:
        others: the evaluations of other models, such as the dense one, by their name.
    """

    runs: tuple[Run, ...]
    others: dict[str, Evaluation]


def read_content(paths: Sequence[Path]) -> Content:
    """Read folders that `compress` wrote, and JSON files that `evaluate` wrote.

    The JSON files may be those of the folders, or of other models.

    Raises:
        ModelError: a path does not exist, or no folder is named, or one twice.
        CheckpointError: a folder or a file is damaged.
    """
    folders = resolved_folders(paths)
    evaluations = read_evaluations(paths, folders)
    names = distinct_names([*folders])
    runs: list[Run] = []
    for (resolved, folder), name in zip(folders.items(), names, strict=True):
        runs.append(read_run(folder, name, evaluations.pop(resolved, Evaluation())))
    others: dict[str, Evaluation] = {}
    for model, evaluation in evaluations.items():
        others[str(model)] = evaluation
    return Content(tuple(runs), others)


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


def read_evaluations(
    paths: Sequence[Path], folders: Mapping[Path, Path]
) -> dict[Path | str, Evaluation]:
    """The evaluations in the folders and in the files that are named, by folder or model.

    A file that is named wins over those in the folders, and of these the first by name.
    """
    files: list[tuple[Path, Path | None]] = []
    for owner in folders:
        for file in sorted(owner.glob("evaluation*.json"), reverse=True):
            files.append((file, owner))
    for path in paths:
        if not path.is_dir():
            files.append((path, None))
    evaluations: dict[Path | str, Evaluation] = {}
    for file, folder in files:
        for model, evaluation in read_evaluation(file, folder):
            resolved = Path(model).resolve()
            key = resolved if resolved in folders else model
            evaluations[key] = evaluations.get(key, Evaluation()) | evaluation
    return evaluations


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of resolved paths, as many as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


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
    seconds = read_seconds(folder, (folder / "compression.json").read_text(encoding="utf-8"))
    total = None
    if seconds is not None:
        total = seconds.seconds
        layers = []
        for layer in record.layers:
            layer_seconds = seconds.layers.get(layer.name, 0.0)
            layers.append(dataclasses.replace(layer, seconds=layer_seconds))
        record = dataclasses.replace(record, layers=tuple(layers), phases=seconds.phases)
    return Run(name, record, sizes, read_spectra(folder), evaluation, command, total)


def read_evaluation(
    file: Path, owner: Path | None = None
) -> Iterator[tuple[str | Path, Evaluation]]:
    """Yield the model and results in a file of `evaluate`, then those of its dense model, if any.

    Args:
        owner: the folder of the model, if the file lies in it.
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
    yield owner or results.model, results.evaluation
    if results.dense is not None:
        yield results.dense.model, results.dense.evaluation


def read_spectra(folder: Path) -> dict[str, tuple[float, ...]]:
    """The singular values of every L in a folder that was checked, by the layer's name."""
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
        spectra[layer] = tuple(spectrum(u, v).tolist())
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


def place(name: str) -> tuple[int, str]:
    """The block of a layer and its kind: model.layers.3.mlp.up_proj → 3, mlp.up_proj.

    A name without a number is in block 0.
    """
    match = _BLOCK.fullmatch(name)
    if match is None:
        return 0, name
    return int(match[1]), match[2]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last part of each name if no other name ends in it, else all of the name."""
    leaves: dict[str, set[str]] = {}
    for name in names:
        leaves.setdefault(name.rpartition(".")[2], set()).add(name)
    short: dict[str, str] = {}
    for leaf, alike in leaves.items():
        for name in alike:
            short[name] = leaf if len(alike) == 1 else name
    return short


def places(names: Iterable[str], merge_experts: bool = False) -> dict[str, tuple[int, str]]:
    """The block and the shortened kind of each layer.

    Args:
        merge_experts: experts.5.w1 becomes experts.w1, one kind.
    """
    blocks: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for name in names:
        blocks[name], kind = place(name)
        kinds[name] = _EXPERT.sub("", kind) if merge_experts else kind
    short = short_names(kinds.values())
    shortened: dict[str, tuple[int, str]] = {}
    for name, kind in kinds.items():
        shortened[name] = blocks[name], short[kind]
    return shortened


def error_range(errors: Iterable[float]) -> tuple[float, float]:
    """The least error above 0 and the most; both 1 where all are 0."""
    positive = [error for error in errors if error > 0] or [1.0]
    return min(positive), max(positive)
