"""The files that prepare images and sound for a model: they belong to a folder as its tokenizer does."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers.utils.hub import cached_file

FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_preprocessor_config.json",
    "chat_template.json",
)


def copy_processor(model: str, folder: Path) -> None:
    """Copy those that a model, a folder or a hub name, has."""
    lenient = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")
    }
    for name in FILES:
        try:
            file = cached_file(model, name, **lenient)
        except OSError:
            file = None
        if file is not None and not (folder / name).exists():
            shutil.copyfile(file, folder / name)
