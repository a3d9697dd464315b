"""Kinds of faults by which files are lost, and runs that are interrupted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.hostile.damage import (
    ESCAPE,
    WEIGHTS,
    all_of,
    config,
    copied,
    edited,
    fifo,
    file,
    filled,
    folder,
    gone,
    link,
    moved,
    unfinished,
)
from harness.hostile.fault import (
    EITHER,
    USUAL,
    WENT_WRONG,
    WORKS,
    WORKS_OR_NOT,
    During,
    Fault,
    appears,
    opened,
    usual,
    worked,
)

Run = Callable[[str], int]


FIRST_BLOCK = appears("OUT.unfinished/model/model-00002-*")


EXPORTING = appears(".E*")


RESUME = USUAL["compress"] + " --resume"


def doing(damage: Any) -> Callable[[Path, int], None]:
    return lambda root, pid: damage(root, "M")


def resumes_once(undo: Callable[[Path], None]) -> Callable[[Path, Run], str]:
    """Once the cause is gone, the run can be finished, to the bytes of an uninterrupted one (`C`)."""

    def after(root: Path, run: Run) -> str:
        undo(root)
        if not (root / "OUT.unfinished" / "progress.json").exists():
            return "lost: the finished blocks"
        if run(RESUME):
            return "lost: it does not resume"
        same = {path.name: path.read_bytes() for path in (root / "OUT").iterdir()} == {
            path.name: path.read_bytes() for path in (root / "C").iterdir()
        }
        return "" if same else "lost: it resumes to other bytes"

    return after


def aside(*names: str) -> Callable[[Path], None]:
    """Move what is in the way to another place."""

    def undo(root: Path) -> None:
        for name in names:
            if (root / name).is_symlink() or (root / name).exists():
                (root / name).rename(root / f"{name}.aside")

    return undo


def destinations() -> Iterator[Fault]:
    kind = "OUT appears during a run"
    intruders = {
        "a folder with a file": file("{at}/notes"),
        "a file": file("{at}"),
        "a link to a folder with a file": all_of(file("mine/notes"), link("{at}", "mine")),
        "a link that leads nowhere": link("{at}", "nowhere"),
    }
    for what, intruder in intruders.items():
        for command, at, when in (("compress", "OUT", FIRST_BLOCK), ("export", "E", EXPORTING)):
            put = lambda root, pid, intruder=intruder, at=at: intruder(Renamed(root, at), "M")  # noqa: E731
            after = resumes_once(aside("OUT")) if command == "compress" else None
            exits = EITHER if "nowhere" not in what else WORKS_OR_NOT
            yield Fault(kind, what, usual(command), during=During(when, put), exits=exits, after=after)  # type: ignore[arg-type]
    seconds = During(FIRST_BLOCK, doing(file("OUT.seconds.json")))
    yield Fault(kind, "a file at OUT.seconds.json", usual("compress"), during=seconds, exits=WORKS_OR_NOT)
    seconds = During(FIRST_BLOCK, doing(folder("OUT.seconds.json")))
    yield Fault(kind, "a folder at OUT.seconds.json", usual("compress"), during=seconds, exits=WORKS_OR_NOT)
    page = During(worked(0.05), doing(folder("page.html")))
    yield Fault(kind, "a folder at --output", usual("report"), during=page)
    results = During(worked(0.1), doing(folder("e.json")))
    yield Fault(kind, "a folder at --output", usual("evaluate", more="--output e.json"), during=results)


class Renamed:
    """A folder in whose paths {at} stands for a name."""

    def __init__(self, root: Path, at: str):
        self.root, self.at = root, at

    def __truediv__(self, name: str) -> Path:
        return self.root / name.replace("{at}", self.at)


def replaced() -> Iterator[Fault]:
    kind = "--overwrite"
    over = "--overwrite"
    inside = {
        "the recipe": (moved("r.yaml", "OUT/r.yaml"), "{usual} --recipe OUT/r.yaml"),
        "the calibration text": (moved("t.txt", "OUT/t.txt"), USUAL["compress"].replace("t.txt", "OUT/t.txt")),
        "the model": (moved("M", "OUT/x"), USUAL["compress"].replace("M ", "OUT/x ")),
        "the model, through a link": (
            all_of(moved("M", "OUT/x"), link("L", "OUT")),
            USUAL["compress"].replace("M ", "L/x "),
        ),
        "somebody's notes": (file("OUT/notes"), "{usual}"),
        "notes beside a compressed model": (all_of(copied("C", "OUT"), file("OUT/notes")), "{usual}"),
        "a record of another program": (file("OUT/compression.json", '{"mine": 1}'), "{usual}"),
        "a folder in a compressed model": (all_of(copied("C", "OUT"), file("OUT/old/notes")), "{usual}"),
        "a repository": (all_of(file("OUT/.git/HEAD"), file("OUT/setup.py")), "{usual}"),
    }
    for what, (before, line) in inside.items():
        yield Fault(kind, f"OUT holds {what}", {"compress": f"{line} {over}"}, before)
    whole = copied("C", "OUT")
    yield Fault(
        kind, "OUT holds a compressed model", usual("compress", more=over), whole, exits=WORKS, may_change=("OUT",)
    )
    rated = all_of(whole, copied("dense.json", "OUT/evaluation.json"))
    yield Fault(kind, "OUT holds one, evaluated", usual("compress", more=over), rated, exits=WORKS, may_change=("OUT",))
    yield Fault(kind, "OUT holds one", {"compress": "{usual}"}, whole)
    yield Fault(kind, "DEST is the dense model", {"export": f"export C M --to dense -q {over}"})
    yield Fault(kind, "DEST is the compressed model", {"export": f"export C C --to dense -q {over}"})
    yield Fault(kind, "DEST is above it", {"export": f"export x/y/C x --to dense -q {over}"}, moved("C", "x/y/C"))
    yield Fault(kind, "DEST holds notes", usual("export", more=over), file("E/notes"))
    yield Fault(kind, "DEST is the current folder", {"export": f"export C . --to dense -q {over}"})
    yield Fault(kind, "OUT is the model", {"compress": USUAL["compress"].replace("OUT", "M") + f" {over}"})
    yield Fault(
        kind,
        "OUT is above the model",
        {"compress": USUAL["compress"].replace("M OUT", "x/y/M x") + f" {over}"},
        moved("M", "x/y/M"),
    )
    yield Fault(kind, "a folder of the demo's name", usual("demo"), file("D/1-sparsegpt/notes"))


def neighbours() -> Iterator[Fault]:
    kind = "files beside OUT"
    taken = {
        "OUT.unfinished is a folder of somebody's": file("OUT.unfinished/notes"),
        "OUT.unfinished holds a folder `model`": file("OUT.unfinished/model/keep.txt"),
        "OUT.unfinished is a link to a folder": all_of(file("p/model/keep.txt"), link("OUT.unfinished", "p")),
        "OUT.unfinished is a file": file("OUT.unfinished"),
        "OUT.unfinished holds another's journal": file("OUT.unfinished/progress.json", '{"mine": 1}'),
        "OUT.unfinished leads nowhere": link("OUT.unfinished", "nowhere/at/all"),
        "OUT.unfinished is a loop": link("OUT.unfinished", "OUT.unfinished"),
    }
    for what, before in taken.items():
        for more in ("", "--overwrite", "--resume"):
            yield Fault(kind, f"{what} {more}".strip(), usual("compress", more=more), before)
    beside = {
        "is somebody's": file("OUT.seconds.json", '{"mine": 1}'),
        "is a folder": folder("OUT.seconds.json"),
        "is a link to a file": all_of(file("diary"), link("OUT.seconds.json", "diary")),
    }
    for what, before in beside.items():
        yield Fault(kind, f"OUT.seconds.json {what}", usual("compress"), before, exits=WORKS_OR_NOT)
    notes = all_of(unfinished, file("OUT.unfinished/notes"), file("OUT.unfinished/model/notes"))
    yield Fault(kind, "notes in an unfinished run", usual("compress", more="--resume"), notes, exits=WORKS_OR_NOT)
    for more in ("--resume", "--overwrite"):
        notes = all_of(unfinished, file("OUT.unfinished/model/notes"))
        yield Fault(kind, f"notes among the finished blocks {more}", usual("compress", more=more), notes)
    for name in ("model/notes", "scratch/notes"):
        somebodys = all_of(file("OUT.unfinished/lock"), file(f"OUT.unfinished/{name}"))
        yield Fault(kind, f"OUT.unfinished holds `lock` and {name}", usual("compress"), somebodys)
    appear = During(FIRST_BLOCK, doing(file("OUT.unfinished/notes")))
    yield Fault(kind, "notes appear in OUT.unfinished", usual("compress"), during=appear, exits=WORKS_OR_NOT)


def outputs() -> Iterator[Fault]:
    kind = "--output is read"
    for at in ("C/config.json", "C/model-00001-of-00005.safetensors", "C/tokenizer.json", "C/compression.json"):
        yield Fault(kind, f"{at}", usual("inspect", "evaluate", more=f"--output {at}"))
        yield Fault(kind, f"{at}", {"report": f"report C --output {at} -q"})
    yield Fault(kind, "the text", usual("evaluate", "plan", more="--output t.txt"))
    yield Fault(kind, "the text, by a link", usual("evaluate", "plan", more="--output L"), link("L", "t.txt"))
    hard = lambda root, model: os.link(root / "M" / WEIGHTS, root / "H")  # noqa: E731
    yield Fault(
        kind, "weights, by a hard link", {"evaluate": USUAL["evaluate"].replace("C", "M") + " --output H"}, hard
    )
    yield Fault(kind, "weights", {"evaluate": USUAL["evaluate"].replace("C", "M") + f" --output M/{WEIGHTS}"})
    yield Fault(kind, "the recipe", {"plan": f"{USUAL['plan']} --recipe r.yaml --output r.yaml"})
    yield Fault(kind, "the configuration", usual("plan", more="--output M/config.json"))
    yield Fault(kind, "the results", {"report": "report C dense.json --output dense.json -q"})
    yield Fault(kind, "the results, in another way", {"report": "report C dense.json --output M/../dense.json -q"})
    page = file("own.html", "<!doctype html>\n<title>mine</title>\n")
    yield Fault(kind, "somebody's page", {"report": "report C --output own.html -q"}, page)
    good = usual("evaluate", more="--output C/evaluation.json")
    yield Fault(kind, "evaluation.json, which is allowed", good, exits=WORKS)


def writes() -> Iterator[Fault]:
    kind = "a write fails"
    results = {command: "{usual} --output {at}" for command in ("evaluate", "inspect", "plan")}
    results["report"] = "report C --output {at} -q"
    at = lambda name: {command: line.replace("{at}", name) for command, line in results.items()}  # noqa: E731
    for command in results:
        # What the same command wrote before, and may replace.
        full = all_of(copied(f"kept-{command}", "disk/old"), lambda root, model: fill(root / "disk"))
        limits: Any = {"file_limit": 256, "exits": WENT_WRONG}
        line = {command: at("old")[command]}
        yield Fault(kind, "files are limited to 256 bytes", line, copied(f"kept-{command}", "old"), **limits)
        line = {command: at("disk/old")[command]}
        yield Fault(kind, "a full disk", line, full, disk=2**20, exits=WENT_WRONG)
    full = lambda root, model: fill(root / "disk")  # noqa: E731
    device = lambda root, model: os.mknod(root / "full", 0o20666, os.makedev(1, 7))  # noqa: E731
    yield Fault(kind, "/dev/full", at("full"), device, exits=EITHER)
    yield Fault(kind, "figures on a full disk", usual("report", more="--figures disk/f"), full, disk=2**20)
    folders = {"compress": USUAL["compress"].replace("OUT", "disk/OUT"), "export": "export C disk/E --to dense -q"}
    yield Fault(kind, "a folder on a full disk", folders, full, disk=2**20)
    small = {"compress": USUAL["compress"], "export": USUAL["export"]}
    yield Fault(kind, "weights over the largest file size", small, file_limit=300_000)
    during = During(appears("disk/OUT.unfinished/model/model-00002-*"), lambda root, pid: fill(root / "disk"))
    yield Fault(kind, "the disk fills", {"compress": folders["compress"]}, disk=2**27, during=during, after=on_disk)
    during = During(appears("disk/.E*"), lambda root, pid: fill(root / "disk"))
    yield Fault(kind, "the disk fills", {"export": folders["export"]}, disk=2**27, during=during)
    show = usual("methods", "inspect", "plan", "generate")
    yield Fault(kind, "standard output is full", show, stdout="/dev/full", exits=WENT_WRONG)
    lost = {
        "the model": gone("M"),
        "the unfinished folder": gone("OUT.unfinished"),
    }
    for what, damage in lost.items():
        during = During(FIRST_BLOCK, doing(damage))
        yield Fault(kind, f"{what} is removed", usual("compress"), during=during, exits=WORKS_OR_NOT)
    yield Fault(
        kind,
        "the model is removed",
        usual("export", "evaluate", "generate"),
        during=During(opened(".safetensors"), doing(gone("C"))),
        exits=WORKS_OR_NOT,
    )
    yield Fault(
        kind,
        "the unfinished export is removed",
        usual("export"),
        during=During(EXPORTING, lambda root, pid: [shutil.rmtree(path) for path in root.glob(".E*")] and None),
        exits=WORKS_OR_NOT,
    )
    yield Fault(
        kind,
        "the folder of --output is removed",
        {"evaluate": "{usual} --output gone/e.json"},
        file("gone/x"),
        during=During(worked(0.1), doing(gone("gone"))),
        exits=EITHER,
    )


def fill(disk: Path) -> None:
    """Leave no byte free on a small file system."""
    if not disk.is_mount():
        return
    with open(disk / "filler", "wb", buffering=0) as handle:
        try:
            while True:
                handle.write(bytes(4096))
        except OSError:
            pass


def on_disk(root: Path, run: Run) -> str:
    (root / "disk" / "filler").unlink(missing_ok=True)
    if run(RESUME.replace("OUT", "disk/OUT")):
        return "lost: it does not resume"
    same = {path.name: path.read_bytes() for path in (root / "disk/OUT").iterdir()} == {
        path.name: path.read_bytes() for path in (root / "C").iterdir()
    }
    return "" if same else "lost: it resumes to other bytes"


def resumed() -> Iterator[Fault]:
    kind = "--resume mixes"
    own = tuple(f"OUT.unfinished/{name}" for name in ("owner", "lock", "scratch"))
    changes = {
        "another hidden_act": config(hidden_act="relu"),
        "another rope_theta": config(rope_parameters={"rope_theta": 500.0, "rope_type": "default"}),
        "another rms_norm_eps": config(rms_norm_eps=0.1),
        "another number of heads": config(num_attention_heads=3, head_dim=64, num_key_value_heads=1),
        "another text": file("t.txt", "Other words. " * 300),
        "other weights": filled("layers.3.mlp.down_proj", b"\0\x3f"),
        "other weights of the norm": filled("model.norm", b"\0\x3f"),
    }
    go_on = usual("compress", more="--resume")
    for what, change in changes.items():
        yield Fault(kind, what, go_on, all_of(unfinished, change), may_change=own)
    yield Fault(kind, "another rank", usual("compress", more="--resume --rank 3"), unfinished, may_change=own)
    journal = "OUT.unfinished/progress.json"

    def part(**fields: Any) -> Any:
        return lambda content: content["parts"][-1].update(fields)

    tampered = {
        "a file /etc/hostname": part(file="/etc/hostname"),
        "a file ../../t.txt": part(file="../../t.txt"),
        "a file that is a number": part(file=3),
        "a file of no name": part(file=""),
        "a file of 5,000 letters": part(file="x" * 5000),
        "a file with an escape sequence": part(file=ESCAPE),
        "a size without a bound": part(tensors={"x": 10**400}),
        "a part that is a number": lambda content: content.update(parts=[3]),
        "parts that are none": lambda content: content.update(parts=None),
        "no parts": lambda content: content.pop("parts") and None,
        "an identity that is a list": lambda content: content.update(identity=[1]),
        "predictions that are a word": lambda content: content.update(predictions="x"),
        "the same part twice": lambda content: content["parts"].append(content["parts"][-1]),
    }
    for what, change in tampered.items():
        exits = EITHER
        yield Fault(
            kind,
            f"a journal with {what}",
            go_on,
            all_of(unfinished, edited(journal, change)),
            exits=exits,
            may_change=own,
        )
    yield Fault(kind, "a journal 100,000 deep", go_on, all_of(unfinished, file(journal, "[" * 100_000)), may_change=own)
    yield Fault(
        kind, "a journal that does not end", go_on, all_of(unfinished, link(journal, "/dev/zero")), may_change=own
    )
    yield Fault(kind, "a journal that is a pipe", go_on, all_of(unfinished, fifo(journal)), may_change=own)
    flip = lambda root, model: flipped(root / "OUT.unfinished/model")  # noqa: E731
    yield Fault(
        kind, "a flipped bit in a finished block", go_on, all_of(unfinished, flip), says="damaged", may_change=own
    )
    yield Fault(kind, "nothing changed", go_on, unfinished, exits=WORKS, may_change=("OUT.unfinished",))


def flipped(folder: Path) -> None:
    path = sorted(folder.glob("model-*"))[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def exchanged(path: Path) -> None:
    """Put another file in the place of this one."""
    path.with_name("n").write_bytes(b"x" * 5000)
    path.with_name("n").replace(path)


def shortened() -> Iterator[Fault]:
    kind = "weights change during a run"

    def each(change: Callable[[Path], None], folder: str) -> Callable[[Path, int], None]:
        return lambda root, pid: [change(path) for path in (root / folder).glob("*.safetensors")] and None

    changes: dict[str, Callable[[Path], None]] = {
        "cut to 4,096 bytes": lambda path: os.truncate(path, 4096),
        "emptied": lambda path: os.truncate(path, 0),
        "replaced by others": exchanged,
        "overwritten by zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    }
    for what, change in changes.items():
        now = During(opened(".safetensors"), each(change, "C"))
        yield Fault(
            kind, what, usual("evaluate", "generate", "chat", "export", "report"), during=now, exits=WORKS_OR_NOT
        )
        now = During(opened(".safetensors"), each(change, "M"))
        yield Fault(
            kind,
            what,
            {"compress": "{usual}", "plan": f"{USUAL['plan'].replace('--rank 2', '--size 5bits')}"},
            during=now,
            exits=WORKS_OR_NOT,
        )
        now = During(FIRST_BLOCK, each(change, "M"))
        yield Fault(kind, f"{what}, after a block", usual("compress"), during=now, exits=WORKS_OR_NOT)
        now = During(FIRST_BLOCK, each(change, "OUT.unfinished/model"))
        yield Fault(
            kind,
            f"finished blocks {what}",
            usual("compress"),
            during=now,
            exits=WORKS_OR_NOT,
            may_change=("OUT.unfinished",),
        )


def interruptions() -> Iterator[Fault]:
    kind = "interruptions"
    moments: dict[str, tuple[tuple[str, ...], Callable[[Path, int], bool]]] = {
        "at the start": (("compress", "plan", "export", "report", "generate", "evaluate", "demo"), worked(0.01)),
        "on the way": (("export", "evaluate", "generate", "report", "demo"), worked(0.1)),
        "after a block": (("compress",), FIRST_BLOCK),
    }
    for moment, (commands, when) in moments.items():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            for times in (1, 2):
                send = signals(getattr(signal, name), times)
                after = resumes_once(lambda root: None) if moment == "after a block" else None
                some = commands if times == 1 or moment == "after a block" else commands[:3]
                yield Fault(
                    kind,
                    f"{name} {moment}{', twice' * (times == 2)}",
                    usual(*some),
                    during=During(when, send),
                    exits=frozenset({128 + getattr(signal, name)}),
                    after=after,
                )
    yield Fault(
        kind,
        "SIGKILL after a block",
        usual("compress"),
        during=During(FIRST_BLOCK, signals(signal.SIGKILL, 1)),
        exits=frozenset({137}),
        after=resumes_once(lambda root: None),
    )


def signals(number: int, times: int) -> Callable[[Path, int], None]:
    """Send a signal; a second one follows when the process may have begun to end."""

    def send(root: Path, pid: int) -> None:
        os.kill(pid, number)
        if times == 2:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.03)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    return send
