"""The files that prepare images and sound for a model: they belong to a folder as its tokenizer does."""

from __future__ import annotations

import shutil
from pathlib import Path

from hasslefree.folder.card import hub_file

FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_preprocessor_config.json",
    "chat_template.json",
)


def copy_processor(model: str, folder: Path) -> None:
    """Copy those that a model, a folder or a hub name, has, and that the folder lacks."""
    for name in FILES:
        if not (folder / name).exists() and (file := hub_file(model, name)):
            shutil.copyfile(file, folder / name)
