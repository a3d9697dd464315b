"""The record of a compression: per layer and in total, as JSON, as a verdict, and as the command
that repeats it.
"""

import dataclasses
import html
import importlib.metadata
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, Self

from pydantic import Field
from typing_extensions import TypedDict

from hasslefree.core.predictions import Comparison, quantile
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import CheckpointError
from hasslefree.escaping import escaped
from hasslefree.files import read_json
from hasslefree.packed.spec import LayerSpec
from hasslefree.progress import PhaseTime
from hasslefree.recipe.recipe import Recipe
from hasslefree.texts.shares import MIXED
from hasslefree.units import duration, significant, size, span
from hasslefree.validation import Count, Figure, InvalidError, Share, validated

# Part of the name of every layer in a block.
IN_BLOCK = re.compile(r"\.\d+\.")
# A number that JSON can represent.
Finite = Annotated[float, Field(allow_inf_nan=False)]
# The number of layers that a verdict names.
LOST_MOST = 3
# The remark on a layer of an expert that no calibration token was routed to.
NEVER_ROUTED = (
    "no calibration token was routed to this expert: it was fitted without inputs (H = I)"
)
# Two increases of log perplexity differ if their difference is larger than this share of the
# smaller one, and larger than chance on a few thousand tokens.
MUCH = 0.5
LITTLE = 0.005


@dataclass(frozen=True)
class LayerRecord:
    """One compressed layer.

    Args:
        name: in the model.
        spec: of the result; its `nonzeros` are the entries of S that are not zero.
        relative_error: with the undamped Gram, after the cast to the dtype of the model.
        relative_error_before_cast: the same before the cast.
        bytes: the size of the stored weight.
        dense_bytes: the size of the dense weight.
        seconds: of the decomposition, including its share of the factorisation.
        history: the objective of the method, whenever the method measures or estimates it.
        remarks: unusual facts, one sentence each.
    """

    name: str
    spec: LayerSpec
    relative_error: Figure
    relative_error_before_cast: Figure
    seconds: Figure
    history: tuple[Finite, ...] = ()
    remarks: tuple[str, ...] = ()
    bytes: Count = 0
    dense_bytes: Count = 0

    @classmethod
    def of(
        cls, name: str, spec: LayerSpec, result: Decomposition, seconds: float, stored: int
    ) -> Self:
        """The record of a decomposition.

        Args:
            spec: of the stored layer.
            stored: the size of the layer, in bytes.
        """
        spec = dataclasses.replace(spec, nonzeros=int(result.sparse.count_nonzero()))
        history = result.history
        remarks = result.remarks
        if not all(map(math.isfinite, history)):
            history = ()
            remarks += ("the objective was NaN or Inf in a round: its history is left out",)
        return cls(
            name,
            spec,
            relative_error=result.relative_error,
            relative_error_before_cast=result.relative_error_before_cast,
            seconds=seconds,
            history=history,
            remarks=remarks,
            bytes=stored,
            dense_bytes=result.sparse.nbytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """The entry of compression.json, without the seconds. The fields of the spec are inlined,
        its shape as `out` and `width`.
        """
        spec = self.spec.to_dict()
        out, width = spec.pop("shape")
        content = {"name": self.name, "out": out, "width": width, **spec, **vars(self)}
        del content["spec"], content["seconds"]
        return content


class PredictionRecord(TypedDict):
    """The result of prediction matching.

    before, after: mean KL(dense ‖ compressed) per token, in nats, on the validation segments. after
        ≤ before.
    history: the same at each validation since the last retreat.
    learning_rate: its peak since the last retreat.
    tokens: the number of training tokens.
    """

    before: Figure
    after: Figure
    history: list[float]
    learning_rate: Figure
    tokens: Count


class KLRecord(TypedDict):
    """KL(dense ‖ compressed) of the predictions after each token of a text, in nats.

    percentile_99: 99 % of the tokens have less. same_top_token: the share of the tokens after which
        both models find the same token most probable.
    """

    mean: Figure
    median: Figure
    percentile_99: Figure
    same_top_token: Share


class HeldOutRecord(TypedDict):
    """Perplexities on held-out text; None if not finite.

    segments: their number; each has the record's seqlen tokens.
    kl: on the same tokens; None if it is not finite.
    """

    dense: Figure | None
    compressed: Figure | None
    segments: Count
    kl: NotRequired[KLRecord | None]


@dataclass(frozen=True)
class HeldOut:
    """Results on held-out text of the calibration's kind, and on code; None if not measured."""

    text: HeldOutRecord | None = None
    code: HeldOutRecord | None = None


@dataclass(frozen=True)
class Record:
    """A whole compression.

    Args:
        recipe: its fields.
        method: with all hyper-parameters.
        versions: of the libraries.
        seqlen: as resolved for the model.
        tokens: the number of calibration tokens.
        predictions: the result of prediction matching; None without it.
        held_out, held_out_code: None if no perplexity was measured.
        sensitivities: by the name of each layer, the estimated divergence of the model's
            predictions, in nats per token, when that layer alone is pruned, or rounded to the
            fewest bits that it may get. None where the allocation did not measure it.
        dense: the full names of the matrices that stayed dense automatically, such as routers.
        towers: the names of the modules for other inputs than text, which are unchanged.
        other_bytes: the size of all tensors outside the compressed layers.
        own_segments: the calibration tokens were given, not drawn from the recipe's text.
        from_memory: a loaded model was given, which may have been changed after loading.
        first_tokens: the ids with which every segment begins, as the tokenizer begins a text.
        texts: the number of tokens from each calibration text, by name.
        left_out: the texts that could not be read, with the reasons.
        phases: the duration of each phase of the run.
    """

    model: str
    recipe: dict[str, Any]
    method: str
    versions: dict[str, str]
    device: str
    dtype: str
    seqlen: Count
    tokens: Count
    seconds: Figure
    layers: tuple[LayerRecord, ...]
    predictions: PredictionRecord | None = None
    held_out: HeldOutRecord | None = None
    held_out_code: HeldOutRecord | None = None
    sensitivities: dict[str, Figure] | None = None
    dense: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    other_bytes: Count = 0
    own_segments: bool = False
    from_memory: bool = False
    first_tokens: tuple[Count, ...] = ()
    texts: dict[str, Count] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    phases: tuple[PhaseTime, ...] = ()

    @property
    def mean_relative_error(self) -> float:
        return sum(layer.relative_error for layer in self.layers) / len(self.layers)

    @property
    def dense_parameters(self) -> int:
        return sum(layer.spec.dense_parameters for layer in self.layers)

    @property
    def kept_parameters(self) -> int:
        return sum(layer.spec.parameters for layer in self.layers)

    @property
    def outside(self) -> list[LayerRecord]:
        """The compressed matrices outside the blocks: embedding and head."""
        return [layer for layer in self.layers if not IN_BLOCK.search(layer.name)]

    @property
    def patterns(self) -> list[str]:
        """The names of the patterns that prune."""
        return sorted({layer.spec.pattern for layer in self.layers} - {"dense"})

    @property
    def bits(self) -> list[float]:
        """The bits of each matrix on a grid: their average if the codes are entropy-coded."""
        return [layer.spec.grid.stored_bits for layer in self.layers if layer.spec.grid]

    @property
    def ranks(self) -> list[int]:
        """The ranks of all matrices; empty if all are 0."""
        ranks = [layer.spec.rank for layer in self.layers]
        return ranks if any(ranks) else []

    def changes(self) -> str:
        """A sentence on what was done to the matrices."""
        done = []
        if self.patterns:
            done.append(f"pruned ({', '.join(self.patterns)})")
        if self.bits:
            done.append(f"rounded to {span(self.bits, '{:g}')} bits")
        text = f"{len(self.layers)} matrices were {' and '.join(done)}"
        if self.ranks:
            text += f", and corrected by a low-rank matrix of rank {span(self.ranks)}"
        return text

    @property
    def kept_share(self) -> float:
        return self.kept_parameters / self.dense_parameters

    @property
    def stored_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        return sum(layer.dense_bytes for layer in self.layers)

    def verdict(self) -> dict[str, str]:
        """The main results by heading: sizes, perplexity, the layers with the largest errors, and
        the time.
        """
        other = self.other_bytes
        rows = {
            "all weights": shrunk(self.dense_bytes + other, self.stored_bytes + other),
            "compressed layers": shrunk(self.dense_bytes, self.stored_bytes),
            "perplexity": perplexities(self),
        }
        kl = self.held_out.get("kl") if self.held_out else None
        if kl is not None:
            rows["KL from dense"] = kl_in_words(kl)
        if self.held_out_code:
            rows["on code"] = perplexity_of_code(self, self.held_out_code)
        worst = sorted(self.layers, key=lambda layer: -layer.relative_error)[:LOST_MOST]
        errors = [f"{significant(layer.relative_error, 2):,g} in {layer.name}" for layer in worst]
        note = "relative, of the squared output on the calibration text"
        if self.predictions is not None:
            note += ",\nbefore the fine-tuning"
        rows["largest errors"] = "\n".join([*errors, f"({note})"])
        unreached = sum(NEVER_ROUTED in layer.remarks for layer in self.layers)
        if unreached:
            rows["experts"] = (
                f"{unreached} layers had no token of the calibration text, and were\n"
                "fitted without inputs: use more text"
            )
        if self.seconds:
            rows["time"] = duration(self.seconds)
        return rows

    def summary(self) -> str:
        """The verdict as text, for a terminal."""
        rows = self.verdict()
        width = max(map(len, rows)) + 2
        lines = [f"{name:{width}}{text}" for name, text in rows.items()]
        below = "\n" + " " * width
        return escaped("\n".join(line.replace("\n", below) for line in lines), "\n")

    def _repr_html_(self) -> str:
        """The verdict as a table, for a notebook."""
        rows = ""
        for name, text in self.verdict().items():
            cell = html.escape(escaped(text, "\n")).replace("\n", "<br>")
            rows += f'<tr><th style="text-align:left">{name}</th><td>{cell}</td></tr>'
        return f"<table>{rows}</table>"

    def to_json(self) -> str:
        """The content of compression.json. It has no durations: the same recipe, model and machine
        give the same bytes.
        """
        totals = (
            "mean_relative_error",
            "dense_parameters",
            "kept_parameters",
            "stored_bytes",
            "dense_bytes",
        )
        content = vars(self) | {"layers": [layer.to_dict() for layer in self.layers]}
        content |= {name: getattr(self, name) for name in totals}
        del content["phases"], content["seconds"]
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The inverse of `to_json`, with all seconds 0. Raises an InvalidError."""
        if not content.get("layers"):
            raise InvalidError("layers", "it lists no layers")
        nested = []
        for layer in validated(list[dict[str, Any]], content["layers"]):
            spec = layer | {"shape": [layer.get("out"), layer.get("width")]}
            nested.append(layer | {"spec": spec, "seconds": 0.0})
        return validated(cls, content | {"layers": nested, "seconds": 0.0})


def read_record(folder: Path) -> Record:
    """The record in a folder's compression.json. Raises a CheckpointError if it is missing or
    damaged.
    """
    file = folder / "compression.json"
    remedy = "compress the model again"
    content = read_json(file, remedy)
    try:
        return Record.from_dict(content)
    except InvalidError as error:
        raise CheckpointError(
            f"{file} is not valid for this version of hasslefree ({error}); {remedy}"
        ) from None


def versions(*more: str) -> dict[str, str]:
    """The versions of the libraries that results depend on. more: names of further libraries."""
    packages = ("hasslefree", "torch", "transformers", *more)
    return {package: importlib.metadata.version(package) for package in packages}


def shrunk(dense: int, stored: int) -> str:
    return f"{size(dense)} → {size(stored)} ({100 * stored / max(dense, 1):.0f} %)"


def perplexities(report: Record) -> str:
    """Perplexity before and after, with the text that it was measured on, or the reason why it was
    not measured.
    """
    if report.held_out is None:
        if report.own_segments:
            return "not measured (the calibration tokens were given from Python)"
        if report.recipe.get("check") is False:
            return "not measured (switched off)"
        return "not measured (too little text, or no output head)"
    source = "of the calibration text"
    if report.recipe.get("calibration") == "self":
        source = "that the model wrote itself"
    measured = measured_on(report, report.held_out, source)
    if report.held_out_code:
        return measured
    return f"{measured};\ntext of other kinds may lose more"


def perplexity_of_code(report: Record, code: HeldOutRecord) -> str:
    """Perplexity of code before and after, with a remark if the increase differs much from that on
    the calibration's kind of text.
    """
    measured = measured_on(report, code, "of Python's library")
    on_text = increase(report.held_out)
    on_code = increase(code)
    if on_text is None or on_code is None:
        return measured
    least = min(abs(on_text), abs(on_code))
    if abs(on_code - on_text) <= max(LITTLE, MUCH * least):
        return measured
    if on_code < on_text:
        return f"{measured},\nwhich loses less than the calibration text"
    more = f"{measured},\nwhich loses more than the calibration text; other kinds may too"
    if report.recipe.get("calibration") == MIXED:
        return more
    return f"{more};\nthe calibration text {MIXED!r} has several kinds"


def kl_record(comparison: Comparison) -> KLRecord | None:
    """Summarise a comparison; None if it is empty or not finite."""
    if not comparison.kl:
        return None
    ascending = comparison.sorted()
    if not ascending.isfinite().all():
        return None
    return KLRecord(
        mean=ascending.mean().item(),
        median=quantile(ascending, 0.5),
        percentile_99=quantile(ascending, 0.99),
        same_top_token=comparison.same / len(ascending),
    )


def kl_in_words(kl: KLRecord) -> str:
    return (
        f"mean {kl['mean']:.2g}, 99th percentile {kl['percentile_99']:.2g} nats;"
        f" same top token {100 * kl['same_top_token']:.1f} %"
    )


def measured_on(
    report: Record,
    measured: HeldOutRecord,
    source: str,
) -> str:
    """Both perplexities in words, with the number of held-out tokens and their source."""
    before = measured["dense"]
    after = measured["compressed"]
    shown = ["not finite" if value is None else f"{value:.2f}" for value in (before, after)]
    values = " → ".join(shown)
    if before and after:
        values += f" ({100 * (after / before - 1):+z.1f} %)"
    tokens = f"{measured['segments']} × {report.seqlen} held-out tokens"
    return f"{values}\non {tokens} {source}"


def increase(measured: HeldOutRecord | None) -> float | None:
    """The increase of log perplexity; None if it was not measured, or is not finite."""
    if measured is None:
        return None
    before = measured["dense"]
    after = measured["compressed"]
    if before and after:
        return math.log(after / before)
    return None


def command_of(report: Record, trust_remote_code: bool = False) -> str | None:
    """The command that repeats the compression, without options that have this version's default;
    None if its tokens or its model were given from Python.
    """
    if report.own_segments or report.from_memory:
        return None
    given = {name: value for name, value in report.recipe.items() if value is not None}
    recipe = Recipe(**given | {"seqlen": report.seqlen})
    words = ["hasslefree", "compress", report.model, "OUT"]
    always = ("pattern", "method")  # first
    for field in sorted(dataclasses.fields(recipe), key=lambda field: field.name not in always):
        value = getattr(recipe, field.name)
        if value == field.default and field.name not in always:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            (switch,) = field.metadata.get("flags", (f"--{name}/--no-{name}",))
            words.append(switch.split("/")[not value])
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name}", *map(str, values)]
    if report.device != "cuda":
        words += ["--device", report.device]
    if trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)
