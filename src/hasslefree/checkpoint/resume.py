"""The folder of an unfinished compression. It holds every finished block, and a journal of the
blocks and all that they depend on, so that the run can be resumed.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from hasslefree.checkpoint.entries import Entry
from hasslefree.checkpoint.output import (
    FILES,
    check_output,
    complete,
    disk_errors,
    fsync_and_rename,
    put_in_place,
    sync,
)
from hasslefree.checkpoint.record import HeldOut, LayerRecord, PredictionRecord
from hasslefree.errors import CheckpointError, OutputError, option
from hasslefree.files import INDEX, read_header, read_json, run_in_background, write_json
from hasslefree.packed.spec import LayerSpec
from hasslefree.validation import InvalidError, validated

JOURNAL = "progress.json"
OUTPUT_WEIGHTS = "output_weights.safetensors"
# Largest size of a journal. It has 1.4 KB per matrix, and models have up to 70,000 matrices.
MOST_BYTES = 1 << 30
# Prefixes of file names: for values of the finished model, and for values that are trained later.
FINAL = "model"
FITTED = "fitted"
PART = rf"({FINAL}|{FITTED})-\d+-of-\d+\.safetensors"
BEFORE = "before"
OWN = (
    "model",
    "scratch",
    BEFORE,
    "lock",
    JOURNAL,
    f".{JOURNAL}",
    OUTPUT_WEIGHTS,
    f".{OUTPUT_WEIGHTS}",
)


@dataclass(frozen=True)
class FinishedPart:
    """A finished part of the model: the tensors outside the blocks, or one block.

    Args:
        file: the name of the file.
        sha256: of the bytes of the file.
        tensors: the sizes of the tensors in bytes, by name.
        entries: of config.json, for the compressed layers, by name.
        layers: the records of the compressed layers.
    """

    file: Annotated[str, Field(pattern=f"^{PART}$")]
    sha256: str
    tensors: dict[str, int]
    entries: dict[str, Entry]
    layers: list[LayerRecord]


@dataclass(frozen=True)
class StoredPlan:
    """A plan that is not uniform, and the measurements behind it.

    Args:
        matrices: the specs of the ends, and of the layers of each block, by name.
        sensitivities: as for `allocate.allocation.Allocation`.
        sha256: of the file of output weights; None without any.
    """

    matrices: list[dict[str, LayerSpec]]
    sensitivities: dict[str, float] | None
    sha256: str | None = None


@dataclass
class Progress:
    """The content of a journal.

    Args:
        parts: first the tensors outside the blocks, then one part for each finished block.
        identity: everything that the result depends on, as JSON.
        dealt: the plan; None if it is uniform, or not made yet.
        predictions: the record of prediction matching, once the files have the matched values.
        held_out: the results on held-out text, measured at the end.
        seconds: the total duration of the runs so far.
    """

    parts: list[FinishedPart]
    identity: dict[str, Any] | None = None
    dealt: StoredPlan | None = None
    predictions: PredictionRecord | None = None
    held_out: HeldOut = HeldOut()
    seconds: float = 0.0

    @property
    def blocks(self) -> list[FinishedPart]:
        """The finished blocks."""
        return self.parts[1:]

    @property
    def bytes(self) -> int:
        """The size of the finished parts, in bytes."""
        return sum(size for part in self.parts for size in part.tensors.values())

    def __str__(self) -> str:
        plural = "" if len(self.blocks) == 1 else "s"
        return f"{len(self.blocks)} finished block{plural}"

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Raise an OutputError if the finished parts were made with other settings than this run's.

        Args:
            identity: everything that this run depends on, without the plan if none is made yet.
        """
        if self.identity is None:
            return
        plan = {"plan": self.identity.get("plan")}
        changes = list(differences(self.identity, plan | as_json(identity)))
        if changes:
            raise OutputError(
                f"cannot resume: the settings differ: {'; '.join(changes)}. Give the same"
                f" settings, or start again with {option('overwrite', True)} and without"
                f" {option('resume', True)}"
            )

    def record_identity(self, identity: dict[str, Any]) -> None:
        """Check the identity of this run, and record it."""
        self.check_identity(identity)
        self.identity = as_json(identity)

    def write(self, folder: Path) -> None:
        """Write the journal of an unfinished folder."""
        temporary = folder / f".{JOURNAL}"
        # Infinity is allowed: some configurations (Mamba 2) have one, and Python can read it back.
        temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        fsync_and_rename(temporary, folder / JOURNAL)


def read_progress(folder: Path) -> Progress:
    """Read the journal of an unfinished folder; an empty Progress if there is none."""
    file = folder / JOURNAL
    if not file.exists():
        return Progress([])
    remedy = "move it away, or delete it to start again"
    try:
        return validated(Progress, read_json(file, remedy, MOST_BYTES))
    except InvalidError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {remedy}") from None


def intact_progress(folder: Path, hashed: bool) -> Progress:
    """Read a journal, and drop the parts from the first one on whose file is missing, and the plan
    if its file is missing.

    Args:
        hashed: also check the bytes of the files. What is not continued may be damaged.

    Raises:
        CheckpointError: a file is damaged.
    """
    progress = read_progress(folder)
    dealt = progress.dealt
    if dealt is not None and dealt.sha256 is not None:
        file = folder / OUTPUT_WEIGHTS
        if not file.is_file():
            progress.dealt = None
        elif hashed:
            check_bytes(file, dealt.sha256, "bits and ranks are chosen again")
    parts: list[FinishedPart] = []
    for part in progress.parts:
        file = folder / "model" / part.file
        if not file.is_file():
            break
        if hashed:
            check_bytes(
                file,
                part.sha256,
                "its block and all later blocks are compressed again; if prediction matching was"
                " finished, all blocks are",
            )
        parts.append(part)
    if not parts:
        return Progress([], progress.identity)
    # All blocks are trained together: if one is missing, drop all.
    if progress.predictions is not None and len(parts) < len(progress.parts):
        return Progress(parts[:1], progress.identity, progress.dealt)
    progress.parts = parts
    return progress


def check_bytes(file: Path, expected: str, consequence: str) -> None:
    """Raise a CheckpointError unless a file has this SHA-256. consequence: of deleting the file."""
    if sha256(file) != expected:
        raise CheckpointError(
            f"{file} is damaged (wrong SHA-256). Delete it and use {option('resume', True)}:"
            f" {consequence}"
        )


def as_json(content: dict[str, Any]) -> dict[str, Any]:
    """The content as it comes back from a JSON file."""
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield a phrase for each field in which two JSON values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            inner = f"{name}.{key}" if name else key
            yield from differences(before.get(key), now.get(key), inner)
    elif before != now:
        yield f"{name} was {before!r:.80} and is {now!r:.80}"


def sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class Unfinished:
    """`OUT.unfinished`, next to OUT: a lock, a journal, and in `model/` the future content of OUT.

    No file is ever incomplete: files are written under a temporary name, synced, and renamed. With
    `background_writes`, a thread writes a part while the next one is computed, which takes the
    memory of one more part.

    Args:
        bytes: the size of the parts that were finished before this run. If the run does not
            continue from them, they stay until `remove_unlisted`.
        overwrite: as for `check_output`.
    """

    def __init__(
        self,
        out: Path,
        progress: Progress,
        bytes: int,
        overwrite: bool = False,
    ):
        self.out = out
        self.progress = progress
        self.overwrite = overwrite
        self.bytes = bytes
        self.folder = unfinished_folder(out)
        self.model = self.folder / "model"
        self.scratch = self.folder / "scratch"
        self.background_writes = True
        self.writes: list[Future[None]] = []
        self._began = time.perf_counter() - progress.seconds

    @property
    def seconds(self) -> float:
        """The duration of the compression, over all of its runs, without work that was lost."""
        return time.perf_counter() - self._began

    def add(
        self,
        file: str,
        tensors: dict[str, Tensor],
        entries: dict[str, Entry],
        layers: list[LayerRecord],
    ) -> None:
        """Write the next part once the one before is written, and list it in the journal.

        Args:
            tensors: by name; they must not change until `wait` has returned.
            entries, layers: as for `FinishedPart`.
        """
        self.wait()
        # This frees GPU memory for the next part.
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}

        def write() -> None:
            with resumable(self.model / file):
                written = save(self.model / file, on_cpu)
                self.progress.parts.append(FinishedPart(file, written, sizes, entries, layers))
                self._write_journal()

        self.writes = run_in_background("write", write)
        if not self.background_writes:
            self.wait()

    def wait(self) -> None:
        """Wait until all parts are written. Raises an OutputError if writing failed."""
        for write in self.writes:
            write.result()

    def _write_journal(self) -> None:
        self.progress.seconds = self.seconds
        self.progress.write(self.folder)

    def store_plan(self, dealt: StoredPlan, output_weights: Mapping[str, Tensor]) -> None:
        """Store a plan and its output weights. The journal lists them when a part is next added."""
        if output_weights:
            with resumable(self.folder):
                written = save(self.folder / OUTPUT_WEIGHTS, output_weights)
            dealt = dataclasses.replace(dealt, sha256=written)
        self.progress.dealt = dealt

    def output_weights(self, dealt: StoredPlan) -> dict[str, Tensor]:
        """Read the output weights of the stored plan."""
        if dealt.sha256 is None:
            return {}
        return read_tensors(self.folder / OUTPUT_WEIGHTS)

    def rewrite(self, blocks: Iterable[dict[str, Tensor]], predictions: PredictionRecord) -> None:
        """Replace the files of all blocks. The journal lists either all new files or none.

        Args:
            blocks: the tensors of each block.
            predictions: the record of prediction matching.
        """
        with resumable(self.model):
            new = self.progress.parts[:1]
            before = self.progress.blocks
            for part, tensors in zip(before, blocks, strict=True):
                file = part.file.replace(FITTED, FINAL)
                written = save(self.model / file, tensors)
                new.append(dataclasses.replace(part, file=file, sha256=written))
            self.progress.parts = new
            self.progress.predictions = predictions
            self._write_journal()
            for part in before:
                (self.model / part.file).unlink()

    def read(self, part: FinishedPart) -> dict[str, Tensor]:
        """Read the tensors of a part, on the CPU."""
        return read_tensors(self.model / part.file)

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Replace OUT with the folder. fill: writes the files that are still missing."""
        with resumable(self.model):
            (self.model / FILES).touch()  # for `others`
            fill(self.model)
            files = {name: part.file for part in self.progress.parts for name in part.tensors}
            index = {
                "metadata": {"total_size": self.progress.bytes},
                "weight_map": dict(sorted(files.items())),
            }
            write_json(self.model / INDEX, index, indent=2)
            complete(self.model)
            for path in self.model.iterdir():
                sync(path)
            put_in_place(self.model, self.out, self.overwrite, self.folder / BEFORE)

    def sweep(self, progress: Progress) -> None:
        """Remove the incomplete files of a killed process. progress: the journal it left."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        self.model.mkdir(exist_ok=True)
        self.remove_unlisted(progress)

    def remove_unlisted(self, progress: Progress) -> None:
        """Remove all files but the finished parts, and the journal if there are none."""
        listed = {part.file for part in progress.parts}
        with resumable(self.folder):
            for path in self.model.iterdir():
                if path.name not in listed:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not listed:
                (self.folder / JOURNAL).unlink(missing_ok=True)


def save(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file in one step, and return its SHA-256."""
    temporary = file.with_name(f".{file.name}")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, temporary, metadata={"format": "pt"})
    fsync_and_rename(temporary, file)
    return sha256(file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, on the CPU."""
    return {name: tensor.read() for name, tensor in read_header(file).items()}


def unfinished_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


@contextmanager
def unfinished(out: Path, overwrite: bool, resume: bool) -> Iterator[Unfinished]:
    """Open and lock the unfinished folder of OUT; remove it at the end if no block is finished.

    Args:
        out: a resolved path.
        overwrite: discard finished parts if there are any.
        resume: continue from finished parts if there are any.
    """
    folder = unfinished_folder(out)
    foreign = others(folder)
    if foreign:
        raise OutputError(
            f"{foreign[0]} was not written by hasslefree, which needs the name {folder} for its"
            " work; move it away, or give another output folder"
        )
    try:
        with resumable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            locked = FileLock(folder / "lock").acquire(timeout=0)
    except Timeout:
        raise OutputError(
            f"another compression is writing to {folder}; wait for it, or give another folder"
        ) from None
    with locked:
        repair_replacement(folder, out)
        check_output(out, overwrite)
        progress = intact_progress(folder, hashed=resume)
        if progress.parts and not resume and not overwrite:
            raise OutputError(
                f"{folder} holds an unfinished compression with {progress}; continue it with"
                f" {option('resume', True)}, or start again with {option('overwrite', True)}"
            )
        continued = progress if resume else Progress([])
        work = Unfinished(out, continued, progress.bytes, overwrite)
        with resumable(folder):
            work.sweep(progress)
        try:
            yield work
        finally:
            concurrent.futures.wait(work.writes)
            shutil.rmtree(work.scratch, ignore_errors=True)
            ended = not read_progress(folder).parts or not work.model.exists()
            if ended and not others(folder):
                shutil.rmtree(folder, ignore_errors=True)


def repair_replacement(folder: Path, out: Path) -> None:
    """Restore or remove the previous OUT if a process was killed while it was replaced."""
    before = folder / BEFORE
    if before.exists() and not out.exists():  # killed between the two renames
        before.rename(out)
    elif not (folder / "model").exists():  # killed after both
        shutil.rmtree(before, ignore_errors=True)


def others(folder: Path) -> list[Path]:
    """Files at the path of an unfinished folder, or in it, that hasslefree did not write.

    Files in `model` are checked only until `finish` begins.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return [folder]
    paths = [path for path in folder.glob("*") if path.name not in OWN or path.is_symlink()]
    if not (folder / "model" / FILES).exists():
        for path in (folder / "model").glob("*"):
            if not re.fullmatch(rf"\.?{PART}", path.name):
                paths.append(path)
    return paths


def describe_progress(out: Path) -> str:
    """Describe the finished blocks that an interrupted compression to OUT has left."""
    folder = unfinished_folder(out.resolve())
    progress = read_progress(folder)
    if not progress.parts:
        return "no block was finished"
    return f"{folder} holds {progress}; continue with {option('resume', True)}"


def resumable(path: Path) -> AbstractContextManager[None]:
    """`disk_errors` for the unfinished folder."""
    again = option("resume", True)
    return disk_errors(
        path, f"finished blocks are kept. Correct the cause, and continue with {again}"
    )
