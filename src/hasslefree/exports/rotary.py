"""The entries of config.json from which readers that do not know transformers 5 take rotary position embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_older_rotary(file: Path) -> None:
    """Add `rope_theta`, `rope_scaling` and `partial_rotary_factor` to a config.json that has `rope_parameters`.

    Transformers 5 writes `rope_parameters` alone. A reader of the older entries would take its default for the base,
    10000 in most models, and compute another model without an error. Transformers 5 reads the same from both.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):
        if part is not None:
            part.update({name: value for name, value in older_entries(part).items() if name not in part})
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def older_entries(config: dict[str, Any]) -> dict[str, Any]:
    """What older readers take for `rope_parameters`; nothing where these differ from layer to layer."""
    rest = dict(config.get("rope_parameters") or {})
    if "rope_theta" not in rest:
        return {}
    entries = {name: rest.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rest}
    return entries if rest.get("rope_type", "default") == "default" else entries | {"rope_scaling": rest}
