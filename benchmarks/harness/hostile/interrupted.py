"""End compressions in every way that a machine can, resume them, and compare the result with an uninterrupted run.

The real command on the embedded model, in processes of its own. A fault is survived if --resume gives the folder of an
uninterrupted run, byte for byte; or, if there is nothing to resume, if a message names what is wrong and nothing that
was there has changed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.models import CALIBRATION, MODEL

OPTIONS = ["--method", "eora", "--rank", "8", "--calibration", str(CALIBRATION), "--samples", "16", "--seqlen", "128",
           "--device", "cpu"]  # fmt: skip


def command(out: Path, *more: str, model: Path = Path(MODEL)) -> list[str]:
    return [sys.executable, "-m", "hasslefree", "compress", str(model), str(out), *OPTIONS, *more]


def run(out: Path, *more: str, model: Path = Path(MODEL)) -> tuple[int, str]:
    """Exit code, and what was printed."""
    done = subprocess.run(command(out, *more, model=model), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def whole(out: Path, expected: dict[str, bytes]) -> bool:
    """Whether OUT is there, or going on makes it, and it is what it should be."""
    if not out.exists():
        run(out, "--resume")
    return out.exists() and contents(out) == expected and not unfinished(out).exists()


def with_a_block_done(out: Path, seconds: float, number: int = signal.SIGKILL) -> tuple[int, str]:
    """A run that gets a signal once it has a block or more: its exit code, and what it printed."""
    child = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 20 * seconds
    while len(list(unfinished(out).glob("model/model-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(number)
    text, _ = child.communicate()
    return child.returncode, text


def kill(out: Path, expected: dict[str, bytes], seconds: float, moment: float) -> bool:
    child = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(moment * seconds)
    child.kill()
    child.wait()
    return whole(out, expected)


def interrupted(out: Path, expected: dict[str, bytes], seconds: float, number: int) -> bool:
    """A clean message and exit code 128 + signal, however slow the machine is."""
    code, text = with_a_block_done(out, seconds, number)
    clean = code == 128 + number and "Interrupted" in text and "Traceback" not in text
    return (clean or code == 0) and whole(out, expected)


def full_disk(out: Path, expected: dict[str, bytes], seconds: float) -> bool:
    """A tmpfs that has room for some of the blocks; it is made larger then."""
    out.mkdir()
    need = sum(map(len, expected.values()))
    if os.system(f"mount -t tmpfs -o size={need * 2 // 3} tmpfs {out}"):
        raise SystemExit("a small disk cannot be mounted here; run this as root")
    try:
        # The check before the work would refuse it.
        script = (
            "import shutil, sys; shutil.disk_usage = lambda _: type('U', (), {'free': 10**12}); sys.argv = "
            f"{command(out / 'out')[2:]!r}; sys.argv[0] = 'hasslefree'; from hasslefree.cli import run_app; run_app()"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        said = done.returncode == 1 and "finished blocks are kept" in done.stderr
        os.system(f"mount -o remount,size={10 * need + 10**8} {out}")
        return said and whole(out / "out", expected)
    finally:
        os.system(f"umount {out}")


def flipped_byte(out: Path, expected: dict[str, bytes], seconds: float) -> bool:
    """In a finished block: it is named, and once it is gone its block is done again."""
    with_a_block_done(out, seconds)
    file = sorted(unfinished(out).glob("model/model-*"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    code, text = run(out, "--resume")
    file.unlink()
    return code == 1 and file.name in text and whole(out, expected)


def truncated_shard(out: Path, expected: dict[str, bytes], seconds: float) -> bool:
    """Of the model that is to be compressed: an error before any work, and nothing left behind."""
    model = out.with_name(f"{out.name}-model")
    shutil.copytree(MODEL, model)
    file = model / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)
    code, text = run(out, model=model)
    return code == 1 and "Traceback" not in text and not out.exists() and not unfinished(out).exists()


def read_only(out: Path, expected: dict[str, bytes], seconds: float) -> bool:
    """A mount that cannot be written."""
    out.mkdir()
    os.system(f"mount -t tmpfs -o ro tmpfs {out}")
    try:
        code, text = run(out / "out")
        return code in (1, 2) and "Traceback" not in text and "writ" in text
    finally:
        os.system(f"umount {out}")


def two_runs(out: Path, expected: dict[str, bytes], seconds: float) -> bool:
    """The second refuses, and the first is none the worse."""
    first = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (unfinished(out) / "lock").exists() and first.poll() is None:
        time.sleep(0.01)
    code, text = run(out, "--resume")
    first.wait()
    return code == 2 and ("another compression" in text or "not empty" in text) and whole(out, expected)


def all_faults(kills: int, seed: int) -> dict[str, Callable[[Path, dict[str, bytes], float], bool]]:
    """Name → what ends a run, and whether it was survived, of (OUT, the whole folder, the seconds of a whole run)."""
    moments = random.Random(seed)
    faults: dict[str, Callable[[Path, dict[str, bytes], float], bool]] = {}
    for number in range(kills):
        moment = moments.random()
        faults[f"SIGKILL {number}, at {moment:.2f} of a run"] = lambda o, e, s, m=moment: kill(o, e, s, m)
    faults["SIGTERM"] = lambda o, e, s: interrupted(o, e, s, signal.SIGTERM)
    faults["SIGHUP"] = lambda o, e, s: interrupted(o, e, s, signal.SIGHUP)
    faults["Ctrl-C"] = lambda o, e, s: interrupted(o, e, s, signal.SIGINT)
    others = (full_disk, flipped_byte, truncated_shard, read_only, two_runs)
    return faults | {fault.__name__.replace("_", " "): fault for fault in others}
