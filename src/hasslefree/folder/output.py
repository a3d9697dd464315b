"""Output folders: what is checked before the work, and how a folder is replaced, completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout
from safetensors import SafetensorError

from hasslefree.errors import OutputError, option


def check_output(folder: Path, overwrite: bool, bytes_needed: int = 0) -> None:
    """Raise an OutputError if a folder is in use, cannot be written, or is on a disk with fewer free bytes.

    Args:
        folder: resolved.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"the output {folder} is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise OutputError(
            f"the output folder {folder} exists and is not empty; use {option('overwrite', True)} or another folder"
        )
    if folder == Path.cwd() or folder.is_mount():
        raise OutputError(
            f"the output folder {folder} is the current folder or a mount point, which cannot be replaced; give a "
            f"folder in it, such as {folder}/out"
        )
    parent = next(parent for parent in folder.parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(
            f"the output folder {folder} cannot be created: {parent} is not writable; give another folder"
        )
    if (free := shutil.disk_usage(parent).free) < bytes_needed:
        raise OutputError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB free and {bytes_needed / 1e6:,.0f} MB are needed; "
            "make room or choose another disk"
        )


@contextmanager
def replaced_whole(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder` that replaces it at the end; on an error only the new one is removed."""
    part, old = (folder.with_name(f".{folder.name}.{kind}-{os.getpid()}") for kind in ("part", "old"))
    with disk_errors(folder, "its previous content is unchanged. Correct the cause and try again"):
        try:
            part.mkdir(parents=True)
            yield part
            set_permissions(part)
            put_in_place(part, folder, old)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextmanager
def disk_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors of the disk into an OutputError. path: the file or folder that is written."""
    try:
        yield
    except (OutputError, Timeout):
        raise
    except Exception as error:
        # safetensors and tokenizers report a full disk as exceptions of their own.
        if isinstance(error, OSError | SafetensorError) or "os error" in str(error):
            raise OutputError(f"{path} cannot be written: {error}; {remedy}") from error
        raise


def set_permissions(folder: Path) -> None:
    """Set permissions by the user's umask: safetensors writes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def put_in_place(part: Path, folder: Path, old: Path) -> None:
    """Rename `part` to `folder`. An existing folder is renamed to `old` first, and back if that fails."""
    try:
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
