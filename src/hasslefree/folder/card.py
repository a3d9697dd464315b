"""README.md of the folders that are written, in the Hub's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load
from transformers.utils.hub import cached_file
from yaml import YAMLError

from hasslefree.folder.record import Record
from hasslefree.folder.repeat import command_of
from hasslefree.models.blocks import by_kind

# The picture in the card of a compressed folder.
FIGURE = "relative_error.png"

# What the card of a base model says of its licence, in the Hub's format.
LICENCE_FIELDS = ("license", "license_name", "license_link")

_LOAD = """```python
from transformers import {auto}

model = {auto}.from_pretrained("path/to/this/folder")
```
"""

_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import {auto}

base = {auto}.from_pretrained("path/to/this/folder/base")
model = PeftModel.from_pretrained(base, "path/to/this/folder")  # is_trainable=True to train the adapter on
```

`base` alone is not the model: it lacks the low-rank part.
"""

_WHAT = {
    "dense": (
        "transformers",
        "Every compressed layer holds the sum of its sparse and its low-rank matrix as an ordinary weight. The model "
        "is as large as before its compression, and needs no library of its own.",
        _LOAD,
    ),
    "narrow": (
        "transformers",
        "A plain model with fewer attention heads and fewer neurons than the one that it was made of: those that its "
        "compressed layers did not read are removed. It needs no library of its own.",
        _LOAD,
    ),
    "peft": (
        "peft",
        "A PEFT adapter with the low-rank matrices, and in `base` the model with the sparse ones as its weights.",
        _LOAD_ADAPTER,
    ),
    "base": (
        "transformers",
        "The sparse matrices alone, as the weights of a plain model. It is not the compressed model: the low-rank "
        "part is the adapter in the folder above.",
        _LOAD,
    ),
}


def export_card(kind: str, source: str, recorded: bool, auto: str = "AutoModelForCausalLM") -> str:
    """The card of one folder.

    Args:
        kind: "dense", "narrow", "peft", or "base" for the base model of a "peft".
        source: the name of the compressed folder.
        recorded: compression.json lies in the exported folder. auto: the name of the class that loads the model.
    """
    library, what, load = _WHAT[kind]
    front = ModelCardData(
        library_name=library, pipeline_tag="text-generation", tags=["hasslefree", "sparse", "low-rank"]
    )
    where = "compression.json" if kind != "base" else "../compression.json"
    record = f" `{where}` says of what model, and how it was made." if recorded else ""
    return f"""---
{front.to_yaml()}
---

# {source}, {kind}

Exported by hasslefree from a model of sparse + low-rank layers, `{source}`.{record}

{what}

## Load it

{load.format(auto=auto)}"""


def hub_file(model: str, name: str) -> Path | None:
    """A file of a local folder or of the hub; None where there is none, or no network."""
    lenient = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")
    }
    try:
        file = cached_file(model, name, **lenient)
    except OSError:
        return None
    return Path(file) if file else None


def base_licence(model: str) -> dict[str, str]:
    """What the model card of a local folder or of the hub says of the licence; empty where it says nothing.

    No network and no card are no reason to lose a compression.
    """
    try:
        file = hub_file(model, "README.md")
        found = metadata_load(file) if file else None
    except (OSError, ValueError, YAMLError):
        return {}
    given = found if isinstance(found, dict) else {}
    return {name: given[name] for name in LICENCE_FIELDS if isinstance(given.get(name), str)}


# What the errors of a compression with dense targets are, and are not.
TARGETED = """W is its target there: the weight, changed for inputs that the layers before it have changed. So the
figure says how close S + L came to that target, and cannot be compared with that of a run without dense targets.
"""


def trained(report: Record) -> str:
    """What was trained after the layers were fitted, in a sentence or two; nothing where nothing was."""
    if not report.matching and report.predictions is None:
        return ""
    found = "The errors are those of the layers as they were fitted; afterwards what they keep was trained"
    found += " block by block against the dense blocks' outputs" if report.matching else ""
    if report.predictions is not None:
        before, after, tokens = (report.predictions[name] for name in ("before", "after", "tokens"))
        found += ", and" if report.matching else ""
        found += f" together on the dense model's predictions, on {tokens:,} tokens: "
        found += f"their divergence on held-out text was {before:.4f} nats a token before, and is {after:.4f} now"
    return found + ".\n"


def rotated(report: Record) -> str:
    """What was rotated before the layers were fitted, in a sentence; nothing where nothing was."""
    if report.rotation is None:
        return ""
    parts = {"stream": "the residual stream", "heads": "the values of attention heads"}
    turned = [text for name, text in parts.items() if report.rotation[name] is not None]
    return (
        f"Before the layers were fitted, {' and '.join(turned)} were rotated, and the weights on either side took "
        "that in: also weights that were left dense differ from the base model's.\n"
    )


def model_card(
    report: Record, licence: dict[str, str], auto: str = "AutoModelForCausalLM", trust_remote_code: bool = False
) -> str:
    """The card of a compressed folder, with the picture `FIGURE` beside it.

    Args:
        licence: of the base model, as from `base_licence`. auto: the name of the class that loads the model.
    """
    left = report.recipe.get("leave_dense")
    dense = "Every linear layer in the blocks" + (f" (but for {_cell(left)})" if left else "")
    stored = f"{report.stored_bytes:,} of {report.dense_bytes:,} ({report.stored_bytes / report.dense_bytes:.1%})"
    worst = max(report.layers, key=lambda layer: layer.relative_error)
    recipe = "\n".join(
        f"| {key} | {_cell(value)} |" for key, value in report.recipe.items() if value not in (None, (), [])
    )
    remarks = (TARGETED if report.recipe.get("dense_target") else "") + trained(report) + rotated(report)
    if report.dense:
        remarks += f"Routers and other small matrices stay dense: {_cell(', '.join(by_kind(report.dense)))}.\n"
    if report.towers:
        remarks += (
            f"Only the text decoder is compressed, and the calibration was text alone: {_cell(report.towers)} are as "
            "they were.\n"
        )
    versions = ", ".join(f"{library} {version}" for library, version in report.versions.items())
    return f"""---
{_front(report, licence, auto).to_yaml()}
---

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
| largest relative error | {worst.relative_error:.5f} ({worst.name}) |
| calibration | {report.tokens:,} tokens in segments of {report.seqlen} |
| dtype | {report.dtype} |

![Relative error of every layer, block by block]({FIGURE})

The relative error of a layer is tr(R H Rᵀ) / tr(W H Wᵀ), with R = W − S − L and H the second moment of its inputs.
{remarks}All layers are listed in `compression.json`; `hasslefree report` makes a page of them.

## Licence

{_licence(report, licence)}

## Load it

```python
import hasslefree  # needed: it registers the layer with transformers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

## Make it again

{_again(report, trust_remote_code)}

| field | value |
|---|---|
{recipe}

The method in full: `{report.method}`. Made with {versions}.

[the paper HASSLE-free]: https://arxiv.org/abs/2502.00899
"""


def _front(report: Record, licence: dict[str, str], auto: str) -> ModelCardData:
    """The fields that the Hub reads."""
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation" if auto == "AutoModelForCausalLM" else "image-text-to-text",
        "tags": ["hasslefree", "sparse", "low-rank"],
        **licence,
    }
    if report.model.count("/") == 1 and not Path(report.model).exists():
        fields |= {"base_model": report.model, "base_model_relation": "quantized"}
    return ModelCardData(**fields)


def _licence(report: Record, licence: dict[str, str]) -> str:
    """The licence in words."""
    if not licence:
        return (
            f"That of the base model, `{report.model}`, which names none in its model card, or whose card could not be "
            "read: look it up before you pass this model on."
        )
    named = licence.get("license_name") or licence.get("license") or licence["license_link"]
    link = f" ({_cell(licence['license_link'])})" if licence.get("license_link", named) != named else ""
    return f"That of the base model, `{report.model}`: {_cell(named)}{link}."


def _again(report: Record, trust_remote_code: bool) -> str:
    command = command_of(report, trust_remote_code=trust_remote_code)
    if command is None:
        return "The calibration tokens were given from Python; all else is in the recipe."
    return f"    {command}"


def _cell(value: Any) -> str:
    """A value in a line of a table."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.replace("|", "\\|").split())
