"""README.md of the folders that are written, in the Hub's format."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load
from yaml import YAMLError

from hasslefree.checkpoint.originals import original_file
from hasslefree.checkpoint.record import Record, command_of
from hasslefree.escaping import escaped
from hasslefree.models.rules import by_kind

# What an upload replaces in a card with the name on the hub; and the tag by which it knows its own
# models.
PLACE = "path/to/this/folder"
NAME = "USER/NAME"
TAG = "hasslefree"

# The picture in the card of a compressed folder.
FIGURE = "relative_error.png"

LICENCE_FIELDS = ("license", "license_name", "license_link")

_LOAD = """```python
from transformers import {auto}

model = {auto}.from_pretrained("path/to/this/folder")
```
"""

_LOAD_COMPRESSED = """## Load it

```python
import hasslefree  # needed: it registers the layer with transformers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

Without `import hasslefree`, transformers fills the compressed layers with random numbers.
"""

_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import {auto}

base = {auto}.from_pretrained("DIR/base")
model = PeftModel.from_pretrained(base, "DIR")  # is_trainable=True to train the adapter on
```
"""

_LOAD_GGUF = """    llama-cli -m DIR/model.gguf  # with --lora DIR/adapter.gguf if there is one
    ollama create NAME -f DIR/Modelfile
"""
_LOAD_MLX = '    mlx_lm.generate --model DIR/base --adapter-path DIR --prompt "…"\n'

_EXPORTS = {
    "dense": (
        "Every compressed layer holds the sum of its sparse and its low-rank matrix as an ordinary"
        " weight. The model is as large as before the compression, and loads without hasslefree."
    ),
    "narrow": (
        "A plain model with fewer attention heads and fewer neurons than the base model: those that"
        " no compressed layer reads were removed. It loads without hasslefree."
    ),
    "peft": (
        "A PEFT adapter that holds the low-rank matrices, and in `base` a model whose weights are"
        " the sparse matrices."
    ),
    "gguf": (
        "`model.gguf` holds the quantised matrices, and `adapter.gguf` the low-rank ones, if there"
        " are any, as a LoRA adapter."
    ),
    "mlx": (
        "An adapter of mlx-lm that holds the low-rank matrices, and in `base` a model of the"
        " quantised matrices."
    ),
    "base": (
        "A model whose weights are the sparse or quantised matrices alone. It is not the whole"
        " compressed model: the low-rank matrices, if there are any, are in the adapter in the"
        " parent folder."
    ),
}
_EXPORTS["mlx-base"] = _EXPORTS["base"]


def export_card(
    kind: str,
    source: str,
    recorded: bool,
    auto: str = "AutoModelForCausalLM",
) -> str:
    """The card of one folder. kind: as in `_EXPORTS`. source: name of the compressed folder.
    recorded: with record.
    """
    fetch = (
        f"DIR is this folder; `hf download {NAME} --local-dir DIR` fetches it from the hub. The"
        " base alone lacks L.\n\n"
    )
    others = {
        "peft": ("peft", _LOAD_ADAPTER),
        "gguf": ("gguf", _LOAD_GGUF),
        "mlx": ("mlx", _LOAD_MLX),
    }
    library, load = (others | {"mlx-base": others["mlx"]}).get(kind, ("transformers", _LOAD))
    front = ModelCardData(library_name=library, pipeline_tag="text-generation", tags=[TAG])
    where = "../compression.json" if kind in ("base", "mlx-base") else "compression.json"
    record = (
        f" `{where}` names the base model and the settings of the compression." if recorded else ""
    )
    card = f"""---
{front.to_yaml()}
---

# {source}, {kind}

hasslefree exported this model from `{source}`, whose layers are sums of a sparse and a low-rank
matrix.{record}

{_EXPORTS[kind]}

## Load it

{fetch if "DIR" in load else ""}{load.format(auto=auto)}"""
    return escaped(card, "\n")


def base_licence(model: str) -> dict[str, str]:
    """The licence fields in the card of a model, a folder or a hub name; empty without a card or a
    network.
    """
    try:
        file = original_file(model, "README.md")
        front = metadata_load(file) if file else None
    except (OSError, ValueError, YAMLError):
        return {}
    given = front if isinstance(front, dict) else {}
    return {name: given[name] for name in LICENCE_FIELDS if isinstance(given.get(name), str)}


def trained(report: Record) -> str:
    """What was trained after the errors were measured, in sentences; nothing if nothing was."""
    if (record := report.predictions) is None:
        return ""
    return (
        "After the layers were fitted, their values were trained on all blocks together, to"
        f" reproduce the predictions of the dense model on {record['tokens']:,} tokens. The errors"
        " were measured before this training. The mean KL divergence from the dense model on"
        f" segments held out of this training was {record['before']:.4f} nats per token before it"
        f" and {record['after']:.4f} after it.\n"
    )


def _remarks(report: Record) -> str:
    """What a reader has to know about the errors and about what stayed dense, in sentences."""
    text = trained(report)
    if report.dense:
        text += (
            "These small matrices, such as routers, stayed dense:"
            f" {_cell(', '.join(by_kind(report.dense)))}.\n"
        )
    if report.towers:
        text += (
            "Only the text decoder was compressed, calibrated on text alone. These modules are"
            f" unchanged: {_cell(report.towers)}.\n"
        )
    return text


def model_card(
    report: Record,
    licence: dict[str, str],
    auto: str = "AutoModelForCausalLM",
    trust_remote_code: bool = False,
    has_picture: bool = True,
) -> str:
    """The card of a compressed folder.

    Args:
        licence: from `base_licence`.
        auto: the name of the class that loads the model.
        has_picture: the folder holds `FIGURE`.
    """
    picture = (
        f"![Relative error of every layer, block by block]({FIGURE})\n\n" if has_picture else ""
    )
    left = report.recipe.get("leave_dense")
    verdict = "\n".join(f"| {name} | {_cell(text)} |" for name, text in report.verdict().items())
    name = report.model.rstrip("/").rpartition("/")[2]
    exception = f" Left as they are: {_cell(left)}." if left else ""
    outside = [layer.name for layer in report.outside]
    ends = f"`{_cell(outside)}` among them" if outside else "all of them in the blocks"
    card = f"""---
{_front(report, licence, auto).to_yaml()}
---

# {name}, compressed

Of `{report.model}`, {report.changes()}, {ends}. They were fitted on calibration texts.{exception}

| | |
|---|---|
{verdict}
| mean relative error | {report.mean_relative_error:.5f}, over {len(report.layers)} layers |
| {_stored(report)} |
| calibration text | {_text(report)} |
| dtype | {report.dtype} |

{_LOAD_COMPRESSED.format(auto=auto)}
{_repeat(report, trust_remote_code)}

## Errors

{picture}The relative error of a layer is the share of its output that is lost on the calibration
text: tr(R H Rᵀ) / tr(W H Wᵀ), where W is the dense weight, R = W − S − L, and H is the second
moment of the layer's inputs.
{_remarks(report)}`compression.json` lists all layers; `hasslefree report` shows them on an HTML
page.

## Licence

{_licence(report, licence)}
"""
    return escaped(card, "\n")


def _tags(report: Record) -> list[str]:
    """What the hub lists the model under."""
    tags = [TAG]
    if report.patterns:
        tags.append("sparse")
    if report.bits:
        tags.append("quantized")
    if report.ranks:
        tags.append("low-rank")
    return tags


def _text(report: Record) -> str:
    """The row of the table about the calibration text."""
    row = f"{report.tokens:,} tokens, in segments of {report.seqlen}"
    if report.first_tokens:
        row += ", each of which begins with what the tokenizer puts before a text"
    if len(report.texts) > 1:
        shares = [f"{tokens / report.tokens:.0%} {name}" for name, tokens in report.texts.items()]
        row += f": {', '.join(shares)}"
    if report.left_out:
        row += f" (without {', '.join(report.left_out)}, which could not be had)"
    return _cell(row)


def _stored(report: Record) -> str:
    """The row of the table that says how much of the compressed layers is stored.

    It counts parameters where the stored values are numbers of the model's dtype, and bits where
    some layers hold codes.
    """
    weights = report.dense_parameters
    if all(layer.spec.grid is None for layer in report.layers):
        return (
            f"parameters kept | {report.kept_parameters:,} of {weights:,} ({report.kept_share:.1%})"
        )
    bits = 8 * report.stored_bytes / weights
    sizes = f"{report.stored_bytes:,} bytes for {weights:,} weights"
    return f"stored | {sizes}: {bits:.2f} bits per weight"


def _front(
    report: Record,
    licence: dict[str, str],
    auto: str,
) -> ModelCardData:
    """The fields that the Hub reads."""
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": (
            "text-generation" if auto == "AutoModelForCausalLM" else "image-text-to-text"
        ),
        "tags": _tags(report),
        **licence,
    }
    if report.model.count("/") == 1 and not Path(report.model).exists():
        fields |= {"base_model": report.model, "base_model_relation": "quantized"}
    return ModelCardData(**fields)


def _licence(report: Record, licence: dict[str, str]) -> str:
    """The licence in words."""
    if not licence:
        return (
            f"The licence is that of the base model, `{report.model}`. No licence could be read"
            " from its model card: look it up before you pass this model on."
        )
    named = licence.get("license_name") or licence.get("license") or licence["license_link"]
    link = (
        f" ({_cell(licence['license_link'])})"
        if licence.get("license_link", named) != named
        else ""
    )
    return f"The licence is that of the base model, `{report.model}`: {_cell(named)}{link}."


def _repeat(report: Record, trust_remote_code: bool) -> str:
    """The command, and what it depends on."""
    command = command_of(report, trust_remote_code=trust_remote_code)
    given = "its calibration tokens were given from Python"
    if report.from_memory:
        given = "its model was given from memory, which may differ from the one of this name"
    repeat = f"    {command}"
    if command is None:
        repeat = f"No command repeats this compression: {given}."
    versions = ", ".join(f"{library} {version}" for library, version in report.versions.items())
    return f"""## Repeat the compression

{repeat}

All parameters of the method: `{report.method}`. Made with {versions};
`compression.json` has all settings."""


def _cell(value: Any) -> str:
    """A value in a line of a table."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "<br>".join(" ".join(line.replace("|", "\\|").split()) for line in text.splitlines())
