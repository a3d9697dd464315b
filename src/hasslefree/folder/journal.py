"""The folder of an unfinished compression. It holds every finished block, so that the run can be resumed."""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from hasslefree.checkpoint import INDEX, opened, read_json, run_in_background
from hasslefree.errors import CheckpointError, OutputError, option
from hasslefree.folder.output import check_output, disk_errors, put_in_place, set_permissions
from hasslefree.folder.record import PredictionRecord

logger = logging.getLogger(__name__)

JOURNAL, BEFORE = "progress.json", "before"


@dataclass(frozen=True)
class FinishedPart:
    """A finished part of the model: the tensors outside the blocks, or one block.

    Args:
        file: its name. sha256: of its bytes. tensors: their names and sizes in bytes.
        entries: those of config.json for its compressed layers. layers: their records.
    """

    file: str
    sha256: str
    tensors: dict[str, int]
    entries: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)


class Unfinished:
    """`OUT.unfinished`, next to OUT: a lock, a journal, and in `model/` the content of OUT.

    No file is ever incomplete: files are written under a temporary name, synced, and renamed. With `background_writes`,
    a thread writes a part while the next one is computed, which takes the memory of one more part.

    Args:
        identity: everything that the result depends on, as JSON. predictions: the record of prediction matching, once
            all blocks have the matched values.
    """

    def __init__(
        self,
        out: Path,
        identity: dict[str, Any] | None,
        parts: list[FinishedPart],
        predictions: PredictionRecord | None = None,
    ):
        self.out, self.identity, self.parts, self.predictions = out, identity, parts, predictions
        self.folder = unfinished_folder(out)
        self.model, self.scratch = self.folder / "model", self.folder / "scratch"
        self.background_writes = True
        self._writing: Future[None] | None = None

    @property
    def bytes_done(self) -> int:
        """The size of the finished parts."""
        return sum(size for part in self.parts for size in part.tensors.values())

    def begin(self, identity: dict[str, Any]) -> None:
        """Record the settings of this run. Raises an OutputError if they differ from those of the finished parts."""
        if self.identity is not None and (changes := list(differences(self.identity, identity))):
            raise OutputError(
                f"cannot resume {self.folder}: the settings differ: {'; '.join(changes)}. Give the same settings, or "
                f"{option('overwrite', True)} to start again"
            )
        self.identity = identity

    def add(self, file: str, tensors: dict[str, Tensor], **rest: Any) -> None:
        """Write one more part, after the part before it; once it is on the disk, the journal lists it.

        Args:
            tensors: by their names; they must not change until `wait` has returned. rest: `entries` and `layers`.
        """
        self.wait()
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}  # frees GPU memory for the next part
        [self._writing] = run_in_background("write", partial(self._write_part, file, on_cpu, rest))
        if not self.background_writes:
            self.wait()

    def check(self) -> None:
        """Raise the error of the last `add` if it has failed already; do not wait for it."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all parts are written. Raises an OutputError if the last one could not be."""
        error = self._writing.exception() if self._writing is not None else None
        self._writing = None  # not before: if the wait is interrupted, `close` waits
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last write after an error of the run; an error of that write is only logged."""
        if self._writing is not None and (error := error_of(self._writing)) is not None:
            logger.error("%s", error)

    def _write_part(self, file: str, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        with resumable(self.model / file):
            digest = self._save(file, tensors)
            self.parts.append(
                FinishedPart(file, digest, {name: tensor.nbytes for name, tensor in tensors.items()}, **rest)
            )
            self._write_journal()

    def _save(self, file: str, tensors: dict[str, Tensor]) -> str:
        """Write a file of the model, and return the SHA-256 of its bytes."""
        temporary = self.model / f".{file}"
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"format": "pt"})
        digest = sha256(temporary)
        fsync_and_rename(temporary, self.model / file)
        return digest

    def rewrite(self, files: Iterable[tuple[str, dict[str, Tensor]]], predictions: PredictionRecord) -> None:
        """Replace the values and files of all blocks: the journal then lists all new files, or none.

        Args:
            files: for each block the name of its new file, and its tensors. predictions: the record of the matching.
        """
        outside, blocks = self.parts[0], self.parts[1:]
        with resumable(self.folder):
            new = [outside]
            for part, (file, tensors) in zip(blocks, files, strict=True):
                new.append(dataclasses.replace(part, file=file, sha256=self._save(file, tensors)))
            self.parts[:], self.predictions = new, predictions
            self._write_journal()
            for part in blocks:
                (self.model / part.file).unlink()

    def read(self, part: FinishedPart) -> dict[str, Tensor]:
        """The tensors of a part, on the CPU."""
        with opened(self.model / part.file) as handle:
            return dict(handle.get_tensors())

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Replace OUT by the folder. fill: writes the files that are still missing."""
        with resumable(self.folder):
            fill(self.model)
            files = {name: part.file for part in self.parts for name in part.tensors}
            index = {"metadata": {"total_size": self.bytes_done}, "weight_map": dict(sorted(files.items()))}
            (self.model / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            set_permissions(self.model)
            for path in self.model.iterdir():
                sync(path)
            put_in_place(self.model, self.out, self.folder / BEFORE)

    def _write_journal(self) -> None:
        parts = [dataclasses.asdict(part) for part in self.parts]
        content = {"identity": self.identity, "parts": parts, "predictions": self.predictions}
        temporary = self.folder / f".{JOURNAL}"
        temporary.write_text(json.dumps(content), encoding="utf-8")
        fsync_and_rename(temporary, self.folder / JOURNAL)

    def sweep(self) -> None:
        """Remove everything that the journal does not list, such as files that a killed process left incomplete."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        self.model.mkdir(exist_ok=True)
        for path in self.model.iterdir():
            if path.name not in {part.file for part in self.parts}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not self.parts:
            (self.folder / JOURNAL).unlink(missing_ok=True)


def unfinished_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


@contextmanager
def unfinished(out: Path, overwrite: bool, resume: bool) -> Iterator[Unfinished]:
    """The unfinished folder of OUT, locked by this process. If no block is finished at the end, it is removed.

    Args:
        out: resolved. overwrite: discard finished parts. resume: continue from finished parts, if there are any.
    """
    folder = unfinished_folder(out)
    lock, owner = FileLock(folder / "lock"), folder / "owner"
    try:
        with resumable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
    except Timeout:
        process = owner.read_text(encoding="utf-8") if owner.exists() else "unknown"
        raise OutputError(
            f"another compression (process {process}) is writing to {folder}; wait for it, or give another folder"
        ) from None
    try:
        with resumable(folder):
            owner.write_text(str(os.getpid()), encoding="utf-8")
        if (folder / BEFORE).exists() and not out.exists():  # killed between two renames
            (folder / BEFORE).rename(out)
        check_output(out, overwrite)
        work = Unfinished(out, *_read_journal(folder))
        if work.parts and not resume and not overwrite:
            raise OutputError(
                f"{folder} holds an unfinished compression with {_blocks(work.parts)}; continue it with "
                f"{option('resume', True)}, or start again with {option('overwrite', True)}"
            )
        if not resume:
            work = Unfinished(out, None, [])
        with resumable(folder):
            work.sweep()
        try:
            yield work
        finally:
            work.close()
            shutil.rmtree(work.scratch, ignore_errors=True)
            if not work.parts or not work.model.exists():
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def _read_journal(folder: Path) -> tuple[dict[str, Any] | None, list[FinishedPart], PredictionRecord | None]:
    """The identity, finished parts and matching record of the journal, up to the first part whose file is missing."""
    if not (folder / JOURNAL).exists():
        return None, [], None
    content = read_json(folder / JOURNAL, "delete it to start again")
    parts = []
    for entry in content["parts"]:
        entry.pop("matching", None)  # of earlier versions
        part = FinishedPart(**entry)
        file = folder / "model" / part.file
        if not file.exists():
            break
        if sha256(file) != part.sha256:
            raise CheckpointError(
                f"{file} is damaged (wrong SHA-256). Delete it and use {option('resume', True)}: its block and all "
                "later blocks are compressed again; if prediction matching was finished, all blocks are"
            )
        parts.append(part)
    predictions = content.get("predictions")
    # All blocks are trained together: if the file of one is missing, all are dropped.
    if predictions is not None and len(parts) < len(content["parts"]):
        parts, predictions = parts[:1], None
    return content["identity"], parts, predictions


def describe_progress(out: Path) -> str:
    """Which finished blocks an interrupted compression to OUT has left, in words."""
    folder = unfinished_folder(out.resolve())
    if not (folder / JOURNAL).exists():
        return "no block was finished"
    done = _blocks(read_json(folder / JOURNAL)["parts"])
    return f"{folder} holds {done}; continue with {option('resume', True)}"


def _blocks(parts: list[Any]) -> str:
    return f"{len(parts) - 1} finished block{'' if len(parts) == 2 else 's'}"


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The fields in which two JSON values differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            if (key not in before or key not in now) and (before | now)[key] in (None, False, [], {}):
                continue
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {before!r} and is {now!r}"


def sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fsync_and_rename(temporary: Path, file: Path) -> None:
    """Rename a file to its final name once its bytes are on the disk."""
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


def resumable(path: Path) -> AbstractContextManager[None]:
    """`disk_errors` for the unfinished folder."""
    resume = option("resume", True)
    return disk_errors(path, f"finished blocks are kept. Correct the cause, and continue with {resume}")


def fingerprint(tokens: Tensor) -> str:
    """SHA-256 of token ids, with their shape."""
    data = tokens.to("cpu", torch.int64).contiguous().numpy().tobytes()
    return hashlib.sha256(f"{tuple(tokens.shape)}".encode() + data).hexdigest()


def error_of(future: Future[None]) -> BaseException | None:
    """The error of a call, or None, once the call has ended; Ctrl-C does not interrupt the wait."""
    while True:
        try:
            return future.exception()
        except KeyboardInterrupt:
            continue
