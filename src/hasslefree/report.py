"""What a compression did: per layer and in total, as JSON, as a table and as a model card."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hasslefree.core.protocols import Decomposition


@dataclass(frozen=True)
class LayerReport:
    """One compressed layer.

    Args:
        name: in the model. out, width: the shape of its weight. pattern, rank: what it became.
        nonzeros: of S. parameters: non-zeros and both factors, beside out × width before.
        relative_error: with the undamped Gram, after the cast to the dtype of the model; and before it.
        bytes, dense_bytes: of its weight as stored, and before.
        seconds: of the decomposition, its share of the factorisation included.
        history: the method's objective, as often as it measures it.
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


def model_card(report: Report) -> str:
    """README.md of the output folder, in the Hub's format."""
    recipe = "\n".join(
        f"| {name} | {_cell(value)} |" for name, value in report.recipe.items() if value not in (None, ())
    )
    left = report.recipe.get("leave_dense")
    dense = "Every linear layer in the blocks" + (f" (but for {_cell(left)})" if left else "")
    stored = f"{report.stored_bytes:,} of {report.dense_bytes:,} ({report.stored_bytes / report.dense_bytes:.1%})"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    from_hub = report.model.count("/") == 1 and not Path(report.model).exists()
    base = f"base_model: {report.model}\nbase_model_relation: quantized\n" if from_hub else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- hasslefree
- sparse
- low-rank
{base}---

# {report.model.rstrip("/").rpartition("/")[2]}, sparse + low-rank

{dense} of `{report.model}` was replaced by a sparse matrix plus a low-rank one, without
retraining, by hasslefree, which starts from [the paper HASSLE-free]. Embeddings, norms and the output head are as they
were.

| | |
|---|---|
| layers | {len(report.layers)} |
| parameters kept in them | {report.kept_parameters:,} of {report.dense_parameters:,} ({report.kept_share:.1%}) |
| bytes of their weights | {stored} |
| mean relative error | {report.mean_relative_error:.5f} |
| calibration | {report.tokens:,} tokens in segments of {report.seqlen} |
| dtype | {report.dtype} |

The relative error of a layer is tr(R H Rᵀ) / tr(W H Wᵀ), with R = W − S − L and H the second moment of its inputs.
All layers are listed in `compression.json`.

## Load it

```python
import hasslefree  # needed: it registers the layer with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

## Recipe

| field | value |
|---|---|
{recipe}

The method in full: `{report.method}`. Made with {versions}.

[the paper HASSLE-free]: https://arxiv.org/abs/2502.00899
"""


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
