"""The folder of an unfinished compression. It holds every finished block, so that the run can be
resumed.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from filelock import FileLock, Timeout
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from hasslefree.checkpoint.output import (
    FILES,
    check_output,
    complete,
    disk_errors,
    fsync_and_rename,
    put_in_place,
    sync,
)
from hasslefree.checkpoint.record import HeldOutRecord, PredictionRecord
from hasslefree.errors import CheckpointError, OutputError, option
from hasslefree.files import INDEX, read_header, read_json, run_in_background
from hasslefree.validation import InvalidError, validated

logger = logging.getLogger(__name__)

JOURNAL = "progress.json"
BEFORE = "before"
OWNER = "owner"
OWN = ("model", "scratch", BEFORE, f".{JOURNAL}", JOURNAL, "lock", OWNER)  # as they are removed
PART = r"(model|fitted)-\d+-of-\d+\.safetensors"


@dataclass(frozen=True)
class FinishedPart:
    """A finished part of the model: the tensors outside the blocks, or one block.

    Args:
        file: its name. sha256: of its bytes. tensors: their names and sizes in bytes.
        entries: those of config.json for its compressed layers. layers: their records.
    """

    file: Annotated[str, Field(pattern=f"^{PART}$")]
    sha256: str
    tensors: dict[str, int]
    entries: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """The content of a journal.

    identity: everything that the result depends on, as JSON. predictions: the record of prediction
    matching, once all blocks have the matched values. held_out: what was measured after it.
    """

    identity: dict[str, Any] | None = None
    parts: list[FinishedPart] = field(default_factory=list)
    predictions: PredictionRecord | None = None
    held_out: HeldOutRecord | None = None


class Unfinished:
    """`OUT.unfinished`, next to OUT: a lock, a journal, and in `model/` the content of OUT.

    No file is ever incomplete: files are written under a temporary name, synced, and renamed. With
    `background_writes`, a thread writes a part while the next one is computed, which takes the
    memory of one more part.

    overwrite: as for `check_output`.
    """

    def __init__(
        self,
        out: Path,
        progress: Progress,
        overwrite: bool = False,
    ):
        self.out = out
        self.overwrite = overwrite
        self.identity = progress.identity
        self.parts = progress.parts
        self.predictions = progress.predictions
        self.held_out = progress.held_out
        self.folder = unfinished_folder(out)
        self.model = self.folder / "model"
        self.scratch = self.folder / "scratch"
        self.background_writes = True
        self._writing: Future[None] | None = None

    @property
    def bytes_done(self) -> int:
        """The size of the finished parts."""
        return sum(size for part in self.parts for size in part.tensors.values())

    def begin(self, identity: dict[str, Any]) -> None:
        """Record the settings of this run. Raises an OutputError if they differ from those of the
        finished parts.
        """
        if self.identity is not None and (changes := list(differences(self.identity, identity))):
            raise OutputError(
                f"cannot resume {self.folder}: the settings differ: {'; '.join(changes)}. Give the"
                f" same settings, or {option('overwrite', True)} to start again"
            )
        self.identity = identity

    def add(self, file: str, tensors: dict[str, Tensor], **rest: Any) -> None:
        """Write one more part, after the part before it; once it is on the disk, the journal lists
        it.

        tensors: by their names; they must not change until `wait` has returned. rest: `entries` and
            `layers`.
        """
        self.wait()
        on_cpu = {
            name: tensor.detach().cpu() for name, tensor in tensors.items()
        }  # frees GPU memory for the next part
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
        """Wait for the last write after an error of the run; an error of that write is only
        logged.
        """
        if self._writing is not None and (error := error_of(self._writing)) is not None:
            logger.error("%s", error)

    def _write_part(
        self,
        file: str,
        tensors: dict[str, Tensor],
        rest: dict[str, Any],
    ) -> None:
        with resumable(self.model / file):
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
            self.parts.append(FinishedPart(file, self._save(file, tensors), sizes, **rest))
            self._write_journal()

    def _save(self, file: str, tensors: dict[str, Tensor]) -> str:
        """Write a file of the model, and return the SHA-256 of its bytes."""
        temporary = self.model / f".{file}"
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"format": "pt"})
        fsync_and_rename(temporary, self.model / file)
        return sha256(self.model / file)

    def rewrite(
        self, files: Iterable[tuple[str, dict[str, Tensor]]], predictions: PredictionRecord
    ) -> None:
        """Replace the values and files of all blocks: the journal then lists all new files, or
        none.

        files: for each block the name of its new file, and its tensors. predictions: the record of
            the matching.
        """
        outside = self.parts[0]
        blocks = self.parts[1:]
        with resumable(self.model):
            new = [outside]
            for part, (file, tensors) in zip(blocks, files, strict=True):
                new.append(dataclasses.replace(part, file=file, sha256=self._save(file, tensors)))
            self.parts[:], self.predictions = new, predictions
            self._write_journal()
            for part in blocks:
                (self.model / part.file).unlink()

    def read(self, part: FinishedPart) -> dict[str, Tensor]:
        """The tensors of a part, on the CPU."""
        stored = read_header(self.model / part.file)
        return {name: tensor.read() for name, tensor in stored.items()}

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Replace OUT by the folder. fill: writes the files that are still missing."""
        with resumable(self.model):
            (self.model / FILES).touch()  # for `check_own`
            fill(self.model)
            files = {name: part.file for part in self.parts for name in part.tensors}
            index = {
                "metadata": {"total_size": self.bytes_done},
                "weight_map": dict(sorted(files.items())),
            }
            (self.model / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            complete(self.model)
            for path in self.model.iterdir():
                sync(path)
            put_in_place(self.model, self.out, self.overwrite, self.folder / BEFORE)

    def _write_journal(self) -> None:
        content = dataclasses.asdict(
            Progress(self.identity, self.parts, self.predictions, self.held_out)
        )
        temporary = self.folder / f".{JOURNAL}"
        # A configuration may hold an infinity, as that of Mamba 2 does, and Python reads it again.
        temporary.write_text(json.dumps(content), encoding="utf-8")
        fsync_and_rename(temporary, self.folder / JOURNAL)

    def sweep(self) -> None:
        """Remove everything that the journal does not list, such as files that a killed process
        left incomplete.
        """
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
def unfinished(
    out: Path,
    overwrite: bool,
    resume: bool,
) -> Iterator[Unfinished]:
    """The unfinished folder of OUT, locked by this process. If no block is finished at the end, it
    is removed.

    out: resolved. overwrite: discard finished parts. resume: continue from finished parts, if there
    are any.
    """
    folder = unfinished_folder(out)
    owner = folder / OWNER
    check_own(folder)
    try:
        with resumable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            locked = FileLock(folder / "lock").acquire(timeout=0)
    except Timeout:
        process = owner.read_text(encoding="utf-8") if owner.exists() else "unknown"
        raise OutputError(
            f"another compression (process {process}) is writing to {folder}; wait for it, or give"
            " another folder"
        ) from None
    with locked:
        with resumable(folder):
            owner.unlink(missing_ok=True)  # it may be a hard link
            owner.write_text(str(os.getpid()), encoding="utf-8")
        if (folder / BEFORE).exists() and not out.exists():  # killed between two renames
            (folder / BEFORE).rename(out)
        check_output(out, overwrite)
        progress = _finished(folder)
        if progress.parts and not resume and not overwrite:
            raise OutputError(
                f"{folder} holds an unfinished compression with {_blocks(progress.parts)}; continue"
                f" it with {option('resume', True)}, or start again with"
                f" {option('overwrite', True)}"
            )
        work = Unfinished(out, progress if resume else Progress(), overwrite)
        with resumable(folder):
            work.sweep()
        try:
            yield work
        finally:
            work.close()
            shutil.rmtree(work.scratch, ignore_errors=True)
            if not work.parts or not work.model.exists():
                with suppress(OSError):
                    for path in map(folder.joinpath, OWN):
                        shutil.rmtree(path, ignore_errors=True)
                        path.unlink(missing_ok=True)
                    folder.rmdir()  # unless something else is in it


def check_own(folder: Path) -> None:
    """Raise an OutputError if the name of an unfinished folder is taken by what is none, or if
    others' files are in it.

    In `model`, those are known until `finish` begins.
    """
    is_folder = folder.is_dir() and not folder.is_symlink()
    content = list(folder.iterdir()) if is_folder else [folder] * os.path.lexists(folder)
    others = [path for path in content if path.name not in OWN or path.is_symlink()]
    if not others and not (folder / "model" / FILES).exists():
        others = [
            path
            for path in (folder / "model").glob("*")
            if not re.fullmatch(rf"\.?{PART}", path.name)
        ]
    names = {path.name for path in content}
    if others or (names and not {OWNER, JOURNAL} & names and names != {"lock"}):
        raise OutputError(
            f"{(others or content)[0]} was not written by hasslefree, which needs the name {folder}"
            " for its work; move it away, or give another output folder"
        )


def read_progress(folder: Path) -> Progress:
    """The journal of an unfinished folder; without parts if there is none."""
    file = folder / JOURNAL
    remedy = "delete it to start again"
    if not file.exists():
        return Progress()
    try:
        content = read_json(file, remedy)
        if "parts" not in content:
            raise CheckpointError(
                f"{file} was not written by hasslefree; move it away, or give another output folder"
            )
        progress = validated(Progress, content)
        if [int(part.file.split("-")[1]) for part in progress.parts] != [
            *range(1, len(progress.parts) + 1)
        ]:
            raise InvalidError("parts", "its parts do not follow each other")
        return progress
    except InvalidError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {remedy}") from None


def _finished(folder: Path) -> Progress:
    """The journal, up to the first part whose file is missing."""
    progress = read_progress(folder)
    parts: list[FinishedPart] = []
    for part in progress.parts:
        file = folder / "model" / part.file
        if not file.is_file():
            break
        if sha256(file) != part.sha256:
            raise CheckpointError(
                f"{file} is damaged (wrong SHA-256). Delete it and use {option('resume', True)}:"
                " its block and all later blocks are compressed again; if prediction matching was"
                " finished, all blocks are"
            )
        sizes = {name: tensor.meta.nbytes for name, tensor in read_header(file).items()}
        if part.tensors != sizes:
            raise CheckpointError(
                f"{folder / JOURNAL} does not list the tensors of {file}; delete it to start again"
            )
        parts.append(part)
    # All blocks are trained together: if the file of one is missing, all are dropped.
    if progress.predictions is not None and len(parts) < len(progress.parts):
        return Progress(progress.identity, parts[:1])
    return dataclasses.replace(progress, parts=parts)


def describe_progress(out: Path) -> str:
    """Which finished blocks an interrupted compression to OUT has left, in words."""
    folder = unfinished_folder(out.resolve())
    if not (parts := read_progress(folder).parts):
        return "no block was finished"
    return f"{folder} holds {_blocks(parts)}; continue with {option('resume', True)}"


def _blocks(parts: list[Any]) -> str:
    return f"{len(parts) - 1} finished block{'' if len(parts) == 2 else 's'}"


def differences(
    before: Any,
    now: Any,
    name: str = "",
) -> Iterator[str]:
    """The fields in which two JSON values differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            if (key in before and key in now) or (before | now)[key] not in (None, False, [], {}):
                yield from differences(
                    before.get(key), now.get(key), f"{name}.{key}" if name else key
                )
    elif before != now:
        yield f"{name} was {before!r:.80} and is {now!r:.80}"


def sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def resumable(path: Path) -> AbstractContextManager[None]:
    """`disk_errors` for the unfinished folder."""
    return disk_errors(
        path,
        "finished blocks are kept. Correct the cause, and continue with " + option("resume", True),
    )


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
