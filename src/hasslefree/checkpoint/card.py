"""The model cards (README.md) of the folders that are written, in the Hub's format."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from yaml import YAMLError

from hasslefree.checkpoint.originals import original_file
from hasslefree.checkpoint.record import Record, command_of
from hasslefree.escaping import escaped
from hasslefree.models.rules import by_kind

ASSETS = Path(__file__).parent / "assets"
# The tag that identifies models written by hasslefree, so that an upload may replace them.
TAG = "hasslefree"

# The picture in the card of a compressed folder.
FIGURE = "relative_error.png"

LICENCE_FIELDS = ("license", "license_name", "license_link")

# The library that loads an export, by its kind, if it is not transformers.
LIBRARIES = {
    "peft": "peft",
    "gguf": "gguf",
    "mlx": "mlx",
    "mlx-base": "mlx",
    "mlx-base alone": "mlx",
}


def export_card(
    kind: str,
    source: str,
    recorded: bool,
    auto: str,
) -> str:
    """The card of one folder of an export.

    Args:
        kind: of the folder, such as "dense" or "base".
        source: name of the compressed folder.
        recorded: the export has compression.json.
        auto: the name of the class that loads the model.
    """
    library = LIBRARIES.get(kind, "transformers")
    front = ModelCardData(library_name=library, pipeline_tag="text-generation", tags=[TAG])
    return rendered(
        "exported.md",
        front,
        kind=kind,
        source=source,
        library=library,
        recorded=recorded,
        auto=auto,
    )


def base_licence(model: str) -> dict[str, str]:
    """The licence fields in the card of a model; empty without a card or a network.

    Args:
        model: a folder or a hub name.
    """
    try:
        file = original_file(model, "README.md")
        front = metadata_load(file) if file else None
    except (OSError, ValueError, YAMLError):
        return {}
    given = front or {}
    return {name: given[name] for name in LICENCE_FIELDS if isinstance(given.get(name), str)}


def trained(report: Record) -> str:
    """A paragraph about the training that followed the measurement of errors; "" without any."""
    record = report.predictions
    if record is None:
        return ""
    return (
        "After the layers were fitted, their values were trained on all blocks together, to"
        f" reproduce the predictions of the dense model on {record['tokens']:,} tokens. The errors"
        " were measured before this training. The mean KL divergence from the dense model on"
        f" segments held out of this training was {record['before']:.4f} nats per token before it"
        f" and {record['after']:.4f} after it.\n"
    )


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
    kinds = {"sparse": report.patterns, "quantized": report.bits, "low-rank": report.ranks}
    is_of_text = auto == "AutoModelForCausalLM"
    base: dict[str, Any] = dict(licence)
    if report.model.count("/") == 1 and not Path(report.model).exists():
        base |= {"base_model": report.model, "base_model_relation": "quantized"}
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if is_of_text else "image-text-to-text",
        tags=[TAG, *(tag for tag, layers in kinds.items() if layers)],
        **base,
    )
    return rendered(
        "compressed.md",
        front,
        record=report,
        command=command_of(report, trust_remote_code=trust_remote_code),
        picture=FIGURE if has_picture else None,
        licence=licence,
        auto=auto,
    )


def rendered(template: str, front: ModelCardData, **content: Any) -> str:
    """Render a template of `assets`. front: the metadata that the Hub reads."""
    templates = Environment(
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"by_kind": by_kind, "cell": cell, "trained": trained}
    card = templates.get_template(template).render(content, front=front.to_yaml())
    return escaped(card, "\n")


def cell(value: Any) -> str:
    """A value as one line of Markdown, with special characters escaped."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    plain = re.sub(r"[|*<`\[]", r"\\\g<0>", text)
    return "<br>".join(" ".join(line.split()) for line in plain.splitlines())
