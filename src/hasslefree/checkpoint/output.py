"""Output folders and files: checks before the work begins, and replacement in one step."""

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout
from safetensors import SafetensorError

from hasslefree.errors import OutputError, WriteError, option
from hasslefree.files import read_json, write_json

# The file in an output folder that lists the sizes of all files in it.
FILES = "files.json"
# The first bytes of the results of `evaluate`, and of a page written by `report`.
RESULTS = b'{\n "model'
PAGE = b"<!doctype html><!-- a page of hasslefree report -->"


def check_output(
    folder: Path, overwrite: bool, bytes_needed: int = 0, source: Path | None = None
) -> None:
    """Raise an OutputError if a folder is in use, cannot be written, or its disk is too full.

    Args:
        folder: a resolved path.
        overwrite: the folder may be replaced if hasslefree wrote all of it.
        bytes_needed: free space that the disk must have.
        source: a folder that will be read, which must not be inside the output.
    """
    remedy = "give another folder"
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"the output {folder} is a file; {remedy}")
    if Path.cwd().is_relative_to(folder) or folder.is_mount():
        raise OutputError(
            f"the output {folder} holds the current folder, or is a mount point; {remedy}"
        )
    if folder.is_dir() and any(folder.iterdir()):
        read = []
        if source is not None and source.is_dir():
            read = [source, *filter(Path.is_file, source.iterdir())]
        if any(path.resolve().is_relative_to(folder) for path in read):
            raise OutputError(
                f"the output folder {folder} holds the model {source} itself; {remedy}"
            )
        if not overwrite:
            raise OutputError(
                f"the output folder {folder} exists and is not empty; use"
                f" {option('overwrite', True)}, or {remedy}"
            )
        check_replaceable(folder, folder)
    parent = next(parent for parent in folder.parents if parent.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise OutputError(
            f"the output folder {folder} cannot be created: {parent} is not writable; {remedy}"
        )
    free = shutil.disk_usage(parent).free
    if free < bytes_needed:
        raise OutputError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB free and {bytes_needed / 1e6:,.0f} MB"
            " are needed; make room or choose another disk"
        )


def check_replaceable(content: Path, folder: Path) -> None:
    """Raise an OutputError unless every file of a folder is as hasslefree wrote it.

    Args:
        content: the path of the folder now.
        folder: its path in the message.
    """
    written = read_json(content / FILES) if (content / FILES).exists() else {}
    for name, size in sizes(content):
        if name == FILES:
            size = 0  # the list was empty when sizes were taken
        if written.get(name) == size:
            continue
        if name.startswith("evaluation") and beginning(content / name) == RESULTS:
            continue
        raise OutputError(
            f"the output folder {folder} cannot be replaced: hasslefree did not write {name} in"
            " it, or not as it is now; move or delete it, or give another folder"
        )


def sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """The files in a folder, by relative path, with their sizes."""
    return (
        (f"{path.relative_to(folder)}", path.lstat().st_size)
        for path in folder.rglob("*")
        if not path.is_dir()
    )


@contextmanager
def replaced_whole(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Open a new folder next to `folder`, which replaces it at the end. After an error, the new one
    is removed.
    """
    with disk_errors(folder, "its previous content is unchanged. Correct the cause and try again"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Not the process number: a killed process may have had the same one.
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.parent))
        part = work / "new"
        part.mkdir()
        try:
            yield part
            complete(part)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        put_in_place(part, folder, overwrite, work / "old")
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def replaced_files(files: Sequence[Path]) -> Iterator[Path]:
    """Open a new folder next to some files. At the end, the files in it replace those of the same
    name; a file without a replacement is removed.
    """
    folder = files[0].parent
    with (
        disk_errors(files[0], "if there was such a file, it is unchanged"),
        tempfile.TemporaryDirectory(dir=folder, prefix=".") as part,
    ):
        yield Path(part)
        for file in files:
            written = Path(part) / file.name
            if written.exists():
                fsync_and_rename(written, file)
            else:
                file.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn disk errors into a WriteError. path: the file or folder that is written."""
    try:
        yield
    except (OutputError, Timeout):
        raise
    except Exception as error:
        # safetensors and tokenizers report a full disk with their own exceptions.
        if isinstance(error, OSError | SafetensorError) or "os error" in str(error):
            if not path.parent.exists():
                remedy = "its folder was removed during the run; start again"
            raise WriteError(f"{path} cannot be written: {error}; {remedy}") from error
        raise


def complete(folder: Path) -> None:
    """Write the list of files of a finished folder, and set permissions, because safetensors
    ignores the umask.
    """
    (folder / FILES).touch()
    write_json(folder / FILES, dict(sorted(sizes(folder))))
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def rewrite(file: Path, text: str) -> None:
    """Rewrite a file of a finished folder, and update its size in the folder's list of files."""
    file.write_text(text, encoding="utf-8")
    listed = file.with_name(FILES)
    if listed.exists():
        content = read_json(listed) | {file.name: file.stat().st_size}
        write_json(listed, content)


def put_in_place(
    part: Path,
    folder: Path,
    overwrite: bool,
    old: Path,
) -> None:
    """Rename a finished folder to `folder`. If `folder` was changed meanwhile, keep both and raise
    a WriteError.

    Args:
        overwrite: as for `check_output`.
        old: temporary path of the previous content of `folder`.
    """
    try:
        try:
            if overwrite and folder.is_dir():
                folder.rename(old)
                check_replaceable(old, folder)
            part.rename(folder)  # fails if `folder` is anything but an empty folder
        finally:
            if old.exists() and not folder.exists():
                old.rename(folder)
    except (OSError, OutputError) as error:
        finish = shlex.join(["mv", str(part), str(folder)])
        reason = f"{folder}: {error.strerror}" if isinstance(error, OSError) else error
        raise WriteError(
            f"{reason}. The new folder is complete; once {folder} is free: {finish}"
        ) from error
    shutil.rmtree(old, ignore_errors=True)


def check_files(files: Mapping[Path, bytes], overwrite: bool) -> None:
    """Check several files as `check_file` does, and that none exists unless `overwrite` is set.

    Args:
        files: the first bytes of each file.
    """
    for file, start in files.items():
        check_file(file, start)
        if file.exists() and not overwrite:
            raise OutputError(
                f"{file} exists; use {option('overwrite', True)}, or give another file"
            )


def check_file(path: Path, start: bytes) -> None:
    """Raise an OutputError if a file cannot be written, or would replace a foreign file.

    Args:
        start: the first bytes of the content. An existing file must be empty or begin with them.
    """
    file = path.resolve()
    remedy = "give another file"
    if not file.parent.is_dir():
        raise OutputError(f"the folder of {path} does not exist; make it, or {remedy}")
    if not os.access(file.parent, os.W_OK):  # also for a file that exists, which is replaced
        raise OutputError(f"the folder of {path} is read-only; {remedy}")
    if file.is_dir():
        raise OutputError(f"{path} is a folder; give the path of a file")
    is_result = file.match("evaluation*.json") or file.match("*.seconds.json")
    if is_model_folder(file.parent) and not is_result:
        raise OutputError(
            f"{path} is in a model folder, where only evaluation*.json can be written; {remedy}"
        )
    if not file.exists():
        return
    is_foreign = beginning(file, len(start)) not in (b"", start)
    if is_foreign or not os.access(file, os.W_OK):
        raise OutputError(
            f"{path} exists, and is read-only or not from this command; delete it, or {remedy}"
        )


def is_model_folder(folder: Path) -> bool:
    """Return True if a folder holds a model or the output of `compress` or `export`."""
    if (folder / FILES).exists() or (folder / "compression.json").exists():
        return True
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def beginning(file: Path, length: int = len(RESULTS)) -> bytes | None:
    """The first bytes of a file; None if it is not a regular file."""
    if not file.is_file():
        return None
    with file.open("rb") as content:
        return content.read(length)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step. If that fails, the previous file stays, the content is saved to a
    temporary folder, and a WriteError names it.
    """
    data = content.encode() if isinstance(content, str) else content
    file = path.resolve()
    with disk_errors(path, "if there was such a file, it is unchanged"):
        try:
            check_file(path, PAGE if data.startswith(PAGE) else data[: len(RESULTS)])
            with replaced_files([file]) as folder:
                part = folder / file.name
                part.write_bytes(data)
                if file.exists():
                    shutil.copymode(file, part)
        except (OSError, OutputError) as error:
            kept = Path(tempfile.mkdtemp()) / path.name
            kept.write_bytes(data)
            raise WriteError(f"{error}; the content of {path} is in {kept} instead") from error


def fsync_and_rename(temporary: Path, file: Path) -> None:
    """Sync a file to the disk, then rename it to its final name."""
    sync(temporary)
    temporary.rename(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
