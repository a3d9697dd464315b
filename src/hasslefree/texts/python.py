"""The source of the running Python's standard library: a text that is on every machine."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hasslefree.errors import CalibrationError

PYTHON = "python"
# Folders that are missing in some installations, or not part of the library.
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
# One file in PARTS is kept for evaluation and never used for calibration.
PARTS = 4


def library_documents(held_out: bool) -> list[str]:
    """Read the source files of the standard library, ordered by a hash of their content.

    Args:
        held_out: return the files for evaluation; otherwise all others. The hash decides, so equal
            files are in the same part.

    Raises:
        CalibrationError: this installation has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[bytes, str] = {}
    for file in _source_files(root):
        try:
            text = file.read_text(encoding="utf-8", errors="ignore")
        except OSError:  # such as a distribution's link to a file that is not installed
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
        # os.walk skips removed folders: site-packages has many times as many files.
        subfolders[:] = set(subfolders) - OTHERS
        for name in files:
            if name.endswith(".py"):
                yield Path(folder, name)
