"""Files and configuration of the original model that an output folder keeps."""

import copy
import json
import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from hasslefree.files import edited_json, read_json
from hasslefree.models.names import folder_of

logger = logging.getLogger(__name__)

# The files of tokenizers and of processors. Programs other than transformers may read files that
# transformers does not write, such as tokenizer.model.
TEXT_FILES = (
    "*tokenizer*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)
PROCESSOR_FILES: tuple[str, ...] = ("*processor_config.json",)
# Code of tokenizers and processors that comes with a model.
CODE_FILES = ("*.py",)
# Weights and code that the patterns above would match.
OTHER_FILES = ("*.safetensors", "*.bin", "*.gguf", *CODE_FILES)
# Keys of config.json that describe the output folder, not the original.
OF_THE_FOLDER = (
    "quantization_config",
    "transformers_version",
    "transformers_weights",
    "auto_map",
    "_name_or_path",
)


def original_file(model: str, name: str) -> Path | None:
    """The path of a file of a local folder or of the hub; None without the file or a network."""
    errors = ("missing_entries", "connection_errors", "gated_repo")
    options = {f"_raise_exceptions_for_{error}": False for error in errors}
    try:
        file = cached_file(model, name, **options)
    except Exception as error:  # of transformers, the hub, the network or a proxy
        logger.warning("%s of %s could not be read: %s", name, model, error)
        return None
    if file:
        return Path(file)
    return None


def copy_original_files(
    model: str,
    folder: Path,
    patterns: tuple[str, ...],
) -> None:
    """Copy files of the original model that the output folder lacks.

    Args:
        model: a local folder, or a hub name.
        patterns: of file names: `TEXT_FILES`, `PROCESSOR_FILES`, `CODE_FILES`.
    """
    others = [pattern for pattern in OTHER_FILES if pattern not in patterns]
    wanted = filter_repo_objects(
        file_names(model), allow_patterns=list(patterns), ignore_patterns=others
    )
    for name in wanted:
        if (folder / name).exists():
            continue
        file = original_file(model, name)
        if file is not None:
            shutil.copyfile(file, folder / name)


def file_names(model: str) -> Iterable[str]:
    """The names of the files at the top level of a local folder or a hub repository; without a
    network, of the files in the hub's cache.
    """
    if not Path(model).is_dir():
        with suppress(Exception):  # no network, or no such repository; requests raise anything
            return [name for name in huggingface_hub.list_repo_files(model) if "/" not in name]
    folder = folder_of(model)
    if folder is None:
        return ()
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def read_configuration(model: str) -> dict[str, Any]:
    """The content of a model's config.json; empty if it is not available."""
    file = original_file(model, "config.json")
    if file is None:
        return {}
    return read_json(file)


def restore_keys(
    file: Path,
    original: dict[str, Any],
    config: PretrainedConfig,
) -> None:
    """Restore the original keys and values in a config.json that transformers wrote, except where
    the configuration changed.

    transformers writes `num_local_experts` where a released Qwen3-MoE has `num_experts`, which
    other programs look for, and null for a `sliding_window` that is not in use.

    Args:
        file: the config.json that transformers wrote.
        original: the content of the original one.
        config: the configuration that was written.
    """
    if original.get("model_type") != config.model_type:  # a decoder taken out of its model
        return
    readable = config._decode_special_floats(copy.deepcopy(original))  # such as an infinity
    loaded = type(config).from_dict(readable)
    with edited_json(file) as written:
        _restore(written, original, loaded, config)


def _restore(
    written: dict[str, Any],
    original: dict[str, Any],
    loaded: PretrainedConfig,
    config: PretrainedConfig,
) -> None:
    """Restore the keys of one configuration. loaded: the original as transformers reads it."""
    before = as_json(loaded)
    now = as_json(config)
    names = {"torch_dtype": "dtype", **config.attribute_map}
    for key, value in original.items():
        name = names.get(key, key)
        inner = getattr(config, name, None)
        if key in OF_THE_FOLDER:
            continue
        if isinstance(inner, PretrainedConfig):
            if isinstance(value, dict) and isinstance(written.get(key), dict):
                _restore(written[key], value, getattr(loaded, name), inner)
        elif before.get(name) == now.get(name):
            written[key] = value
        elif key not in written and name in now:
            written[key] = now[name]
        if key in config.attribute_map and name not in original and key in written:
            written.pop(name, None)


def as_json(config: PretrainedConfig) -> dict[str, Any]:
    """All fields of a configuration, as JSON."""
    content: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return content
