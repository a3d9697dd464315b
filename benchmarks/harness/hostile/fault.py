"""One row of the table: what is done to which commands, and what must hold."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# How a command is called in a folder that holds a dense model M, a compressed one C, a text and a recipe.
USUAL = {
    "compress": "compress M OUT -q --method eora --rank 2 --samples 2 --seqlen 32 --calibration t.txt",
    "plan": "plan M --rank 2 --samples 2 --seqlen 32 --calibration t.txt",
    "inspect": "inspect C --layers",
    "evaluate": "evaluate C --perplexity t.txt --seqlen 32 --max-tokens 64 -q",
    "generate": "generate C hi --dense none --max-new-tokens 2",
    "chat": "chat C --dense none --max-new-tokens 2",
    "export": "export C E --to dense -q",
    "report": "report C --output page.html -q",
    "methods": "methods",
    "demo": "demo --out D --rounds 1 -q",
}
# The model that the usual call reads.
MODEL = {command: "M" if command in ("compress", "plan") else "C" for command in USUAL}
READERS = ("compress", "plan", "inspect", "evaluate", "generate", "chat", "export", "report")
LOADERS = ("compress", "evaluate", "generate", "chat", "export")
PYTHON = "python"  # the command of a row whose words are a piece of Python

TYPED_WRONG, WENT_WRONG, EITHER = frozenset({2}), frozenset({1}), frozenset({1, 2})
WORKS = frozenset({0})
WORKS_OR_NOT = EITHER | WORKS

Damage = Callable[[Path, str], None]  # of the folder in which the command is called, and the name of the model it reads


def nothing(root: Path, model: str) -> None:
    pass


@dataclass(frozen=True)
class During:
    """What is done while the command runs, which stands still meanwhile. when, do: of the folder and the process id."""

    when: Callable[[Path, int], bool]
    do: Callable[[Path, int], None]


@dataclass(frozen=True)
class Fault:
    """A row of the table: a cell for each command.

    Args:
        kind: the heading. what: what is done, in words.
        lines: command → its words, in which {usual} stands for the usual call; in a piece of Python nothing does.
        before, during: what is done to the folder. disk: the folder `disk` is a file system of so many bytes.
        exits: the exit codes that are right. says: a pattern that the message must contain.
        stdin: standard input; a chat gets a line if there is none. stdout: the file that is standard output.
        environment: variables of a process of its own. file_limit: bytes of the largest file that may be written.
        may_change: names of files and folders that the command is asked to replace.
        seconds: of the processor.
        after: of the folder, once the command has ended, and a function that runs another: what is wrong, or nothing.
    """

    kind: str
    what: str
    lines: Mapping[str, str]
    before: Damage = nothing
    during: During | None = None
    exits: frozenset[int] = EITHER
    says: str = ""
    stdin: bytes | None = None
    stdout: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    file_limit: int | None = None
    disk: int | None = None
    may_change: tuple[str, ...] = ()
    seconds: int = 30
    after: Callable[[Path, Callable[[str], int]], str] | None = None

    def words(self, command: str) -> list[str]:
        """The arguments of the command line, or the piece of Python alone."""
        line = self.lines[command]
        return [line] if command == PYTHON else shlex.split(line.replace("{usual}", USUAL.get(command, "")))

    def input(self, command: str) -> bytes:
        return self.stdin if self.stdin is not None else b"hi\n" if command == "chat" else b""


def usual(*commands: str, more: str = "") -> dict[str, str]:
    """The usual calls of these commands, with more words."""
    return {command: f"{{usual}} {more}" for command in commands}


# Moments


def at_once(root: Path, pid: int) -> bool:
    return True


def appears(*patterns: str) -> Callable[[Path, int], bool]:
    """Once a path matches one of the patterns."""
    return lambda root, pid: any(any(root.glob(pattern)) for pattern in patterns)


def worked(seconds: float) -> Callable[[Path, int], bool]:
    """Once the process has used so much of the processor."""

    def reached(root: Path, pid: int) -> bool:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") >= seconds

    return reached


def opened(ending: str) -> Callable[[Path, int], bool]:
    """Once the process has a file with such a name open, or mapped into its memory."""

    def reached(root: Path, pid: int) -> bool:
        if f"{ending}\n" in Path(f"/proc/{pid}/maps").read_text():
            return True
        links = Path(f"/proc/{pid}/fd")
        return any(os.readlink(link).endswith(ending) for link in links.iterdir() if link.is_symlink())

    return reached
