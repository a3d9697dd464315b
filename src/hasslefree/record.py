"""What a compression did: per layer and in total, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import typing
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from hasslefree.core.protocols import Decomposition
from hasslefree.errors import CheckpointError


@dataclass(frozen=True)
class LayerReport:
    """One compressed layer.

    Args:
        name: in the model. out, width: the shape of its weight. pattern, rank: what it became.
        nonzeros: of S. parameters: non-zeros and both factors, beside out × width before.
        relative_error: with the undamped Gram, after the cast to the dtype of the model; and before it.
        bytes, dense_bytes: of its weight as stored, and before.
        seconds: of the decomposition, its share of the factorisation included.
        history: the method's objective, as often as it measures it, or estimates it.
        remarks: what is out of the ordinary, a sentence each.
    """

    name: str
    out: int
    width: int
    pattern: str
    rank: int
    nonzeros: int
    relative_error: float
    relative_error_before_cast: float
    seconds: float
    history: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()
    bytes: int = 0
    dense_bytes: int = 0

    @property
    def parameters(self) -> int:
        return self.nonzeros + self.rank * (self.out + self.width)

    @classmethod
    def of(cls, name: str, pattern: str, result: Decomposition, seconds: float, stored: int) -> LayerReport:
        """The report of a decomposition. stored: the bytes that it takes."""
        return cls(
            name=name,
            out=result.sparse.shape[0],
            width=result.sparse.shape[1],
            pattern=pattern,
            rank=result.low_rank.rank,
            nonzeros=int(result.sparse.count_nonzero()),
            relative_error=result.relative_error,
            relative_error_before_cast=result.relative_error_before_cast,
            seconds=seconds,
            history=result.history,
            remarks=result.remarks,
            bytes=stored,
            dense_bytes=result.sparse.nbytes,
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> LayerReport:
        """What `dataclasses.asdict` made of one, read back from JSON."""
        return cls(**content | {"history": tuple(content["history"]), "remarks": tuple(content["remarks"])})


@dataclass(frozen=True)
class Report:
    """A whole compression.

    Args:
        recipe: its fields. method: with every hyper-parameter that was in force. versions: of the libraries.
        seqlen: as resolved for the model. tokens: of the calibration text.
        matching: for each block that was matched, its name and error before and after.
        own_segments: the calibration tokens were given, and not drawn from the text that the recipe names.
    """

    model: str
    recipe: dict[str, Any]
    method: str
    versions: dict[str, str]
    device: str
    dtype: str
    seqlen: int
    tokens: int
    seconds: float
    layers: tuple[LayerReport, ...]
    matching: tuple[dict[str, Any], ...] = ()
    own_segments: bool = False

    @property
    def mean_relative_error(self) -> float:
        return sum(layer.relative_error for layer in self.layers) / len(self.layers)

    @property
    def dense_parameters(self) -> int:
        return sum(layer.out * layer.width for layer in self.layers)

    @property
    def kept_parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def kept_share(self) -> float:
        return self.kept_parameters / self.dense_parameters

    @property
    def stored_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        return sum(layer.dense_bytes for layer in self.layers)

    def to_json(self) -> str:
        """compression.json: all but the seconds, so that the same recipe, model and machine give the same bytes."""
        content = dataclasses.asdict(self) | {
            "mean_relative_error": self.mean_relative_error,
            "dense_parameters": self.dense_parameters,
            "kept_parameters": self.kept_parameters,
            "stored_bytes": self.stored_bytes,
            "dense_bytes": self.dense_bytes,
        }
        for timed in (content, *content["layers"]):
            del timed["seconds"]
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What `to_json` wrote, all seconds 0.

        Raises:
            CheckpointError: it is not JSON, or a field is missing or of another type.
        """
        try:
            content = json.loads(text)
            layers = tuple(LayerReport.from_dict(_typed(LayerReport, layer)) for layer in content["layers"])
            found = _typed(cls, content) | {"layers": layers, "matching": tuple(content.get("matching", ()))}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(f"compression.json is not as this hasslefree writes it ({cause})") from None
        if not layers:
            raise CheckpointError("compression.json lists no layer")
        return cls(**found)


def _typed(kind: type[Any], content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass in an object read from JSON, each of the kind of its annotation, and seconds of 0.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, of another type, or a number that is not finite.
    """
    found: dict[str, Any] = {"seconds": 0.0}
    for name, hint in typing.get_type_hints(kind).items():
        if name in found or (name not in content and hasattr(kind, name)):
            continue
        value, plain = content[name], typing.get_origin(hint) or hint
        expected: Any = {tuple: list, float: (int, float)}.get(plain, plain)
        numbers = value if hint == tuple[float, ...] else [value] if plain in (int, float) else []
        if not isinstance(value, expected) or (isinstance(value, bool) and plain is not bool):
            raise TypeError(f"{name} is {value!r:.40}")
        least = {"out": 1, "width": 1}.get(name, 0)
        if not all(isinstance(number, int | float) and least <= number < math.inf for number in numbers):
            raise ValueError(f"{name} holds something that is no number of {least} or more")
        found[name] = value
    return found


def versions() -> dict[str, str]:
    """The versions of the libraries that a figure depends on."""
    return {package: importlib.metadata.version(package) for package in ("hasslefree", "torch", "transformers")}


def summary_table(report: Report) -> Table:
    """One line for each kind of layer (q_proj, down_proj, …): how many, the mean and the worst error, seconds."""
    title = f"{report.model}: {len(report.layers)} layers, {report.kept_share:.1%} of their parameters kept"
    table = Table(title=Text(title))
    table.add_column("layer")
    for heading in ("count", "rank", "mean relative error", "worst", "seconds"):
        table.add_column(heading, justify="right")
    kinds: dict[str, list[LayerReport]] = {}
    for layer in report.layers:
        kinds.setdefault(layer.name.rpartition(".")[2], []).append(layer)
    for kind, layers in kinds.items():
        errors = [layer.relative_error for layer in layers]
        ranks = sorted({layer.rank for layer in layers})
        table.add_row(
            kind,
            str(len(layers)),
            str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}",
            f"{sum(errors) / len(errors):.5f}",
            f"{max(errors):.5f}",
            f"{sum(layer.seconds for layer in layers):.1f}",
        )
    table.add_section()
    seconds = sum(layer.seconds for layer in report.layers)
    worst = max(layer.relative_error for layer in report.layers)
    table.add_row(
        "all", str(len(report.layers)), "", f"{report.mean_relative_error:.5f}", f"{worst:.5f}", f"{seconds:.1f}"
    )
    return table
