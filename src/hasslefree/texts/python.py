"""The standard library of the running Python: a text that is on every machine."""

import hashlib
import sysconfig
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
    for file in root.rglob("*.py"):
        if OTHERS.isdisjoint(file.relative_to(root).parts):
            text = file.read_text(encoding="utf-8", errors="ignore")
            digest = hashlib.sha256(text.encode()).digest()
            if (digest[-1] % PARTS == 0) == held_out and text.strip():
                documents[digest] = text
    if not documents:
        raise CalibrationError(
            f"this Python has no source files of its standard library in {root}; give another text"
        )
    return [documents[digest] for digest in sorted(documents)]
