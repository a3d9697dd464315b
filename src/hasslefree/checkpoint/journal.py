"""The journal of an unfinished compression: the finished parts, and what they depend on."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hasslefree.checkpoint.entries import Entry
from hasslefree.checkpoint.output import fsync_and_rename
from hasslefree.checkpoint.record import HeldOut, LayerRecord, PredictionRecord
from hasslefree.errors import CheckpointError, OutputError, option
from hasslefree.files import read_json
from hasslefree.packed.spec import LayerSpec
from hasslefree.validation import InvalidError, validated

JOURNAL = "progress.json"
OUTPUT_WEIGHTS = "output_weights.safetensors"
# 1.4 KB for each matrix, of which models have up to 70,000. It was written on this machine.
MOST_BYTES = 1 << 30
# What the names of files begin with: those with the values of the finished model, and those that
# are still to be trained.
FINAL = "model"
FITTED = "fitted"
PART = rf"({FINAL}|{FITTED})-\d+-of-\d+\.safetensors"


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
    entries: dict[str, Entry]
    layers: list[LayerRecord]


@dataclass(frozen=True)
class Dealt:
    """A plan that is not uniform, and what was measured for it.

    Args:
        matrices: those of the ends, and of each block, by name.
        sensitivities: as for `allocate.allocation.Allocation`.
        sha256: of the file with its output weights; None without any.
    """

    matrices: list[dict[str, LayerSpec]]
    sensitivities: dict[str, float] | None
    sha256: str | None = None


@dataclass
class Progress:
    """The content of a journal.

    Args:
        parts: the first one holds what is outside the blocks, each of the others a block.
        identity: everything that the result depends on, as JSON.
        dealt: the plan; None if it is uniform, or was not made.
        predictions: the record of prediction matching, once all blocks have the matched values.
        held_out: what was measured after it.
        seconds: of the runs that led to this.
    """

    parts: list[FinishedPart]
    identity: dict[str, Any] | None = None
    dealt: Dealt | None = None
    predictions: PredictionRecord | None = None
    held_out: HeldOut = HeldOut()
    seconds: float = 0.0

    @property
    def blocks(self) -> list[FinishedPart]:
        """The finished blocks."""
        return self.parts[1:]

    @property
    def bytes(self) -> int:
        """The size of the finished parts."""
        return sum(size for part in self.parts for size in part.tensors.values())

    def __str__(self) -> str:
        plural = "" if len(self.blocks) == 1 else "s"
        return f"{len(self.blocks)} finished block{plural}"

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Raise an OutputError if this run depends on other things than the finished parts.

        Args:
            identity: everything that this run depends on; without the plan, before it is made.
        """
        if self.identity is None:
            return
        recorded = self.identity
        if "plan" not in identity:
            recorded = {name: value for name, value in recorded.items() if name != "plan"}
        changes = list(differences(recorded, as_json(identity)))
        if changes:
            raise OutputError(
                f"cannot resume: the settings differ: {'; '.join(changes)}. Give the same"
                f" settings, or {option('overwrite', True)} to start again"
            )

    def record_identity(self, identity: dict[str, Any]) -> None:
        """Check everything that this run depends on, and record it."""
        self.check_identity(identity)
        self.identity = as_json(identity)

    def write(self, folder: Path) -> None:
        """Write the journal of an unfinished folder."""
        temporary = folder / f".{JOURNAL}"
        # A configuration may hold an infinity, as that of Mamba 2 does, and Python reads it again.
        temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        fsync_and_rename(temporary, folder / JOURNAL)


def read_progress(folder: Path) -> Progress:
    """The journal of an unfinished folder; without parts if there is none."""
    file = folder / JOURNAL
    if not file.exists():
        return Progress([])
    remedy = "move it away, or delete it to start again"
    try:
        return validated(Progress, read_json(file, remedy, MOST_BYTES))
    except InvalidError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {remedy}") from None


def intact_progress(folder: Path) -> Progress:
    """The journal of an unfinished folder, up to the first part whose file is missing, and without
    a plan whose file is missing.

    Raises:
        CheckpointError: a file is damaged.
    """
    progress = read_progress(folder)
    dealt = progress.dealt
    if dealt is not None and dealt.sha256 is not None:
        file = folder / OUTPUT_WEIGHTS
        if file.is_file():
            check_bytes(file, dealt.sha256, "bits and ranks are chosen again")
        else:
            progress.dealt = None
    parts: list[FinishedPart] = []
    for part in progress.parts:
        file = folder / "model" / part.file
        if not file.is_file():
            break
        check_bytes(
            file,
            part.sha256,
            "its block and all later blocks are compressed again; if prediction matching was"
            " finished, all blocks are",
        )
        parts.append(part)
    if not parts:
        return Progress([], progress.identity)
    # All blocks are trained together: if the file of one is missing, all are dropped.
    if progress.predictions is not None and len(parts) < len(progress.parts):
        return Progress(parts[:1], progress.identity, progress.dealt)
    progress.parts = parts
    return progress


def check_bytes(file: Path, expected: str, consequence: str) -> None:
    """Raise a CheckpointError unless a file has this SHA-256. consequence: of deleting it."""
    if sha256(file) != expected:
        raise CheckpointError(
            f"{file} is damaged (wrong SHA-256). Delete it and use {option('resume', True)}:"
            f" {consequence}"
        )


def as_json(content: dict[str, Any]) -> dict[str, Any]:
    """What is read from a JSON file to which this is written."""
    found: dict[str, Any] = json.loads(json.dumps(content))
    return found


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The fields in which two JSON values differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            inner = f"{name}.{key}" if name else key
            yield from differences(before.get(key), now.get(key), inner)
    elif before != now:
        yield f"{name} was {before!r:.80} and is {now!r:.80}"


def sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
