"""The standard library of the running Python: a text that is on every machine."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hasslefree.errors import CalibrationError

PYTHON = "python"
# Folders that not every installation has, or that are not the library's.
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
# One file in so many is for evaluation, and never calibrated on.
PARTS = 4


def library_documents(held_out: bool) -> list[str]:
    """The source files of the standard library, in the order of a hash of what they say.

    Args:
        held_out: the files for evaluation; else all the others. The hash says which a file is, so
            that two equal files are both of the same part.

    Raises:
        CalibrationError: this installation has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[bytes, str] = {}
    for file in _source_files(root):
        try:
            text = file.read_text(encoding="utf-8", errors="ignore")
        except OSError:  # such as a link of a distribution to a file that is not installed
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if (digest[-1] % PARTS == 0) == held_out and text.strip():
            documents[digest] = text
    if not documents:
        raise CalibrationError(
            f"this Python has no source files of its standard library in {root}; give another text"
        )
    return [documents[digest] for digest in sorted(documents)]


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        # os.walk goes on with what is left: what is installed beside has many times as many files.
        subfolders[:] = set(subfolders) - OTHERS
        for name in files:
            if name.endswith(".py"):
                yield Path(folder, name)
