"""Run a command under a fault, in a process of its own with bounds, and compare what happened with what must hold.

A process of Python with torch takes seconds to start. One process imports everything once, and each command runs in a
fork of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.hostile.fault import PYTHON, USUAL, Fault

DATA = 6 * 2**30  # bytes of data of a command; not of addresses, of which the charts' engine reserves many GB
RESIDENT = 3 * 2**30  # bytes in memory beyond those of the imports
STANDS_STILL = 15  # seconds without any work after which a command waits for something that does not come
COLUMNS, LINES = 80, 3
WRITERS = ("evaluate", "inspect", "plan", "report")  # commands with --output

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f]")
_WRITTEN = (".html", ".json", ".md", ".svg", ".txt", ".jinja")
_BOX = re.compile(r"^(Usage:.*|Try '.*|[╭╰].*|)$")  # around the message of a call that cannot be parsed


@dataclass(frozen=True)
class Ended:
    """How a process ended. stopped: why it was killed, if it was. code: as a shell has it, 128 + signal."""

    code: int
    out: str
    err: str
    stopped: str = ""
    reached: bool = True
    seconds: float = 0.0


Snapshot = dict[str, Any]


def snapshot(root: Path) -> Snapshot:
    """Every path below a folder, and what it is."""
    found: Snapshot = {}
    for folder, folders, files in os.walk(root, onerror=None):
        for name in (*folders, *files):
            path = Path(folder, name)
            found[str(path.relative_to(root))] = _state(path)
    return found


def _state(path: Path) -> Any:
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return "folder"
    if not path.is_file():
        return "special"
    if path.stat().st_size > 2**26:
        return path.stat().st_size, path.stat().st_mtime_ns
    return hashlib.blake2b(path.read_bytes()).hexdigest()


class Workshop:
    """The folder of the cells, and the models that each of them starts from.

    Args:
        commands: those that are tried first, so that what they import is there for every cell.
    """

    def __init__(self, folder: Path, commands: Iterable[str] = tuple(USUAL)):
        signals()
        self.streams = folder
        self.template, self.root = folder / "template", folder / "in" / "c"  # always the same: a journal names paths
        self.template.mkdir()
        from hasslefree.demo import run as demo  # heavy

        shutil.copytree(demo.MODEL, self.template / "M")
        text = demo.HELD_OUT.read_text(encoding="utf-8")
        (self.template / "t.txt").write_text(text[:4000], encoding="utf-8")
        (self.template / "r.yaml").write_text("pattern: 2:4\nrank: 2\n", encoding="utf-8")
        self._fill(commands)

    def _fill(self, commands: Iterable[str]) -> None:
        """Compress M once for all, and import what the commands import."""
        self._fresh_root()
        for name in ("run.compress", "exports.export"):
            importlib.import_module(f"hasslefree.{name}")
        for command in USUAL:
            if command not in commands or command == "demo":
                continue
            words = (USUAL[command] + f" --output kept-{command}" * (command in WRITERS)).split()
            ended = self.watched(self._forked(words, b"hi\n", {}, modules=True), None, 300)
            if ended.code:
                raise SystemExit(f"{command} fails without a fault: {ended.out}{ended.err}")
            for name in (self.streams / "modules").read_text().split():
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            if command == "compress":
                shutil.copytree(self.root / "OUT", self.root / "C")
                shutil.copytree(self.root / "OUT", self.template / "C")
        for path in self.root.glob("kept-*"):
            shutil.copyfile(path, self.template / path.name)
        if "evaluate" in commands:
            shutil.copyfile(self.root / "kept-evaluate", self.template / "dense.json")
        self.expected = self._contents(self.template / "C")
        # A run that was killed after its first block.
        self._fresh_root()
        pid = self._forked(USUAL["compress"].split(), b"", {})
        journal = self.root / "OUT.unfinished" / "progress.json"
        while self._alive(pid) and not (journal.exists() and len(json.loads(journal.read_text())["parts"]) == 2):
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (self.root / "OUT.unfinished").rename(self.template / "U")

    @staticmethod
    def _alive(pid: int) -> bool:
        return _state_of(Path(f"/proc/{pid}/stat")) != "Z"

    @staticmethod
    def _contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def _fresh_root(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.template, self.root)

    def complaints(self, fault: Fault, command: str) -> list[str]:
        """What does not hold of a cell; nothing if all does."""
        self._fresh_root()
        limit = fault.file_limit
        mounted = fault.disk is not None and self._mount(fault.disk)
        if fault.disk is not None and not mounted:
            limit = 2**16
        try:
            fault.before(self.root, "M" if command in ("compress", "plan") else "C")
            return list(self._judged(fault, command, limit))
        finally:
            if mounted:
                subprocess.run(["umount", "-l", self.root / "disk"], check=False)

    def _mount(self, size: int) -> bool:
        """A small file system in the folder `disk`; False if this user may not mount one."""
        (self.root / "disk").mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.root / "disk"]
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def _judged(self, fault: Fault, command: str, limit: int | None) -> Iterator[str]:
        before = snapshot(self.root)
        words, given = fault.words(command), fault.input(command)
        start = self._forked if not fault.environment else self._fresh
        pid = start(
            words,
            given,
            fault.environment,
            limit=limit,
            python=command == PYTHON,
            out=fault.stdout or "/dev/null" * (limit is not None),
        )
        ended = self.watched(pid, fault, before)
        self.last = ended
        yield from verdict(ended, fault, command)
        after = snapshot(self.root)
        for path, state in before.items():
            if after.get(path) != state and not any(
                path == name or path.startswith(f"{name}/") for name in fault.may_change
            ):
                yield f"file {'changed' if path in after else 'lost'}: {path}"
        for path in after.keys() - before.keys():
            if path.endswith(_WRITTEN) and (self.root / path).is_file():
                text = (self.root / path).read_text(encoding="utf-8", errors="replace")
                if found := _HIDDEN.search(text):
                    yield f"control character {found[0]!r} in {path}"
        if fault.after and not ended.stopped and (complaint := fault.after(self.root, self.run)):
            yield complaint

    def run(self, line: str) -> int:
        """Run one more command in the same folder: its exit code."""
        return self.watched(self._forked(line.split(), b"", {}), None, 120).code

    def whole(self) -> bool:
        """Whether OUT is what an uninterrupted run writes."""
        return (self.root / "OUT").is_dir() and self._contents(self.root / "OUT") == self.expected

    # Processes

    def _streams(self, given: bytes, out: str) -> list[int]:
        files = [self.streams / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_bytes(given)
        written = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND) for file in files[1:]]
        if out:
            os.close(written[0])
            written[0] = os.open(out, os.O_WRONLY)
        return [os.open(files[0], os.O_RDONLY), *written]

    def _forked(
        self, words: list[str], given: bytes, environment: Mapping[str, str], *, modules: bool = False,
        limit: int | None = None, python: bool = False, out: str = "",
    ) -> int:  # fmt: skip
        """The command in a fork of this process, as if it had just been started."""
        streams = self._streams(given, out)
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            return pid
        try:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.setsid()
            os.chdir(self.root)
            limits(limit)
            code = called(words, python)
            if modules:
                (self.streams / "modules").write_text(" ".join(sys.modules))
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)

    def _fresh(
        self, words: list[str], given: bytes, environment: Mapping[str, str], *, limit: int | None = None,
        python: bool = False, out: str = "",
    ) -> int:  # fmt: skip
        """The command in a new process, which reads the environment when it starts."""
        streams = self._streams(given, out)
        start = ["-c", *words] if python else ["-m", "hasslefree", *words]
        child = subprocess.Popen(
            [sys.executable, *start], stdin=streams[0], stdout=streams[1], stderr=streams[2], cwd=self.root,
            env={**os.environ, **environment}, start_new_session=True, preexec_fn=lambda: limits(limit),
        )  # fmt: skip
        child.returncode = 0  # it is waited for by its number
        for stream in streams:
            os.close(stream)
        return child.pid

    def watched(self, pid: int, fault: Fault | None, before: Snapshot | int) -> Ended:
        """Wait for a process, and do what is done during it. before: changed by what is done; or seconds."""
        most = fault.seconds if fault else before
        during, stopped = fault.during if fault else None, ""
        page, imported = os.sysconf("SC_PAGE_SIZE"), _resident(os.getpid())
        moved, used = time.monotonic(), -1.0
        while True:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                break
            with contextlib.suppress(OSError, IndexError, ValueError):
                if during and during.when(self.root, pid):
                    self._interfere(pid, during, before)
                    during = None
                processor, asleep = _work(pid)
                if processor != used or not asleep:
                    moved, used = time.monotonic(), processor
                if _resident(pid) * page > imported * page + RESIDENT:
                    stopped = stopped or "memory"
                if processor > most:
                    stopped = stopped or "time"
                if time.monotonic() - moved > STANDS_STILL:
                    stopped = stopped or "stands still"
                if stopped:
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # what it may have started
        code = -os.waitstatus_to_exitcode(status) + 128 if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        out, err = (
            (self.streams / name).read_bytes().decode(errors="surrogateescape") for name in ("stdout", "stderr")
        )
        return Ended(code, out, err, stopped, during is None, usage.ru_utime + usage.ru_stime)

    def _interfere(self, pid: int, during: Any, before: Any) -> None:
        """Do it while the process stands still; what it does to files is not the command's doing."""
        os.kill(pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{pid}/task")
        while any(_state_of(task / "stat") not in "TZ" for task in tasks.iterdir()):
            time.sleep(0.001)
        earlier = snapshot(self.root)
        during.do(self.root, pid)
        later = snapshot(self.root)
        for path in earlier.keys() | later.keys():
            if earlier.get(path) != later.get(path):
                before.pop(path, None)
                if path in later:
                    before[path] = later[path]
        os.kill(pid, signal.SIGCONT)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def _state_of(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def _work(pid: int) -> tuple[float, bool]:
    """Seconds of the processor, and whether the process sleeps."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "S"


def signals() -> None:
    """Take signals as a process at a terminal does, however this one was started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def limits(files: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (DATA, DATA))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if files is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (files, files))


def called(words: list[str], python: bool) -> int:
    """Call the command line, or a piece of Python, as the interpreter would: its exit code."""
    from hasslefree.__main__ import main
    from hasslefree.errors import HasslefreeError

    sys.argv = ["hasslefree", *words]
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    )
    try:
        if python:
            exec(words[0], {"__name__": "__main__"})
        else:
            main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except HasslefreeError as error:
        if not python:
            raise
        print(error, file=sys.stderr)
        code = 2
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    try:
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        code = 120
    return code


def verdict(ended: Ended, fault: Fault, command: str) -> Iterator[str]:
    """What of the printed text and the exit code does not hold."""
    if ended.stopped:
        yield f"bounds: {ended.stopped}"
        return
    if not ended.reached:
        yield "the fault did not happen"
    text = ended.out + ended.err
    if "Traceback (most recent" in text or "Exception ignored" in text or "terminate called" in text:
        yield "traceback"
    elif "defect of hasslefree" in text:
        yield "traceback: reported as a defect"
    if ended.code not in fault.exits:
        died = ended.code in (
            128 + number for number in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL)
        )
        yield f"killed: signal {ended.code - 128}" if died else f"exit code {ended.code}"
    if (found := _HIDDEN.search(text)) and command != PYTHON:  # the library shows bars
        yield f"control character {found[0]!r} printed"
    if 0 < ended.code < 128 and command != PYTHON and "Traceback" not in text:
        lines = [line for line in ended.err.rstrip().split("\n") if not _BOX.match(line)]
        taken = sum(max(1, -(-len(line.strip("│ ")) // COLUMNS)) for line in lines)
        if not lines:
            yield "message: none"
        elif taken > LINES:
            yield f"message: {taken} lines"
    if fault.says and not re.search(fault.says, " ".join(text.split()), re.IGNORECASE):
        yield f"message: does not say {fault.says}"
