"""Store the time that a compression took, in a file beside its folder."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from hasslefree.checkpoint.output import write_whole
from hasslefree.checkpoint.record import Record
from hasslefree.checkpoint.resume import sha256
from hasslefree.errors import CheckpointError
from hasslefree.files import read_json
from hasslefree.progress import PhaseTime
from hasslefree.validation import Figure, InvalidError, validated


@dataclass(frozen=True)
class Seconds:
    """The time that a compression took.

    Args:
        compression: the SHA-256 of its compression.json.
        seconds: the total time.
        layers: the seconds of each layer.
        phases: the times of phases; if the run was resumed, only those after that.
    """

    compression: str
    seconds: Figure
    layers: dict[str, Figure]
    phases: tuple[PhaseTime, ...] = ()


def seconds_file(folder: Path) -> Path:
    """The path of the file. It is outside the folder, whose bytes do not depend on the time."""
    return folder.resolve().with_name(f"{folder.resolve().name}.seconds.json")


def write_seconds(folder: Path, report: Record) -> None:
    """Write the time that a compression took. folder: the output of the compression."""
    times = {layer.name: round(layer.seconds, 3) for layer in report.layers}
    phases = tuple(PhaseTime(phase.name, round(phase.seconds, 3)) for phase in report.phases)
    digest = sha256(folder / "compression.json")
    content = dataclasses.asdict(Seconds(digest, round(report.seconds, 3), times, phases))
    write_whole(seconds_file(folder), json.dumps(content, indent=1) + "\n")


def read_seconds(folder: Path) -> Seconds | None:
    """Read the file that `write_seconds` wrote.

    Returns:
        None if there is no file, or if it belongs to another compression.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = seconds_file(folder)
    remedy = "move or delete it: hasslefree keeps the seconds of a run there"
    if not file.exists():
        return None
    try:
        seconds = validated(Seconds, read_json(file, remedy))
    except InvalidError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {remedy}") from None
    compression = folder / "compression.json"
    if compression.exists() and sha256(compression) == seconds.compression:
        return seconds
    return None
