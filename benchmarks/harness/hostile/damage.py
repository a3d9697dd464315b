"""What is done to a folder before a command runs in it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.hostile.fault import Damage

ESCAPE = "\x1b]0;title\x07"  # sets the title of a terminal's window
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def all_of(*parts: Damage) -> Damage:
    def damage(root: Path, model: str) -> None:
        for part in parts:
            part(root, model)

    return damage


def place(root: Path, model: str, name: str) -> Path:
    """A file by its name, in which {model} is the folder of the model that the command reads."""
    return root / name.replace("{model}", model)


def file(name: str, content: str | bytes | Callable[[], str] = "mine\n") -> Damage:
    """A file with this content, which is given as a function if it is large; the folders above it are made."""

    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = content() if callable(content) else content
        path.write_bytes(made.encode() if isinstance(made, str) else made)

    return damage


def link(name: str, target: str) -> Damage:
    """A symbolic link in place of whatever is there."""

    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return damage


def fifo(name: str) -> Damage:
    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return damage


def folder(name: str) -> Damage:
    """An empty folder in place of a file."""

    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)

    return damage


def sparse(name: str, size: int) -> Damage:
    """A file of so many zeros, which takes no room on the disk."""

    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        path.unlink(missing_ok=True)
        with path.open("wb") as handle:
            handle.truncate(size)

    return damage


def moved(name: str, to: str) -> Damage:
    def damage(root: Path, model: str) -> None:
        path = place(root, model, to)
        path.parent.mkdir(parents=True, exist_ok=True)
        place(root, model, name).rename(path)

    return damage


def copied(name: str, to: str) -> Damage:
    def damage(root: Path, model: str) -> None:
        source, path = place(root, model, name), place(root, model, to)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)

    return damage


def gone(name: str) -> Damage:
    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def unfinished(root: Path, model: str) -> None:
    """A run that was killed after its first block waits at OUT.unfinished."""
    shutil.copytree(root / "U", root / "OUT.unfinished")


def edited(name: str, edit: Callable[[Any], Any]) -> Damage:
    """A JSON file, changed in place or replaced by what `edit` returns."""

    def damage(root: Path, model: str) -> None:
        path = place(root, model, name)
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(edit(content) or content), encoding="utf-8")

    return damage


def with_fields(name: str, **fields: Any) -> Damage:
    """A JSON file with other values of these fields."""
    return edited(name, lambda content: {**content, **fields})


def config(**fields: Any) -> Damage:
    return with_fields("{model}/config.json", **fields)


def weights(change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> Damage:
    """The weight file with another header, or other bytes: of M the only one, of C the first."""

    def damage(root: Path, model: str) -> None:
        path = sorted((root / model).glob("*.safetensors"))[0]
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header, rest = change(json.loads(data[8 : 8 + length]), data[8 + length :])
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + rest)

    return damage


def raw_weights(change: Callable[[bytes], bytes]) -> Damage:
    def damage(root: Path, model: str) -> None:
        path = sorted((root / model).glob("*.safetensors"))[0]
        path.write_bytes(change(path.read_bytes()))

    return damage


def shaped(shape: list[int]) -> Damage:
    """The first tensor claims another shape."""

    def change(header: dict[str, Any], rest: bytes) -> tuple[dict[str, Any], bytes]:
        name = next(name for name in header if name != "__metadata__")
        header[name]["shape"] = shape
        return header, rest

    return weights(change)


def filled(pattern: str, value: bytes) -> Damage:
    """The first number of each tensor whose name contains the pattern, in bfloat16 or float32."""

    def damage(root: Path, model: str) -> None:
        for path in (root / model).glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            (length,) = struct.unpack("<Q", data[:8])
            for name, entry in json.loads(data[8 : 8 + length]).items():
                if pattern in name:
                    start = 8 + length + entry["data_offsets"][0]
                    number = value if entry["dtype"] == "BF16" else b"\0\0" + value
                    data[start : start + len(number)] = number
            path.write_bytes(data)

    return damage


def renamed_everywhere(old: str, new: str) -> Damage:
    """A word in every JSON file and every header of a model folder."""

    def damage(root: Path, model: str) -> None:
        escaped_new = json.dumps(new)[1:-1]
        for path in (root / model).glob("*.json"):
            path.write_text(path.read_text(encoding="utf-8").replace(old, escaped_new), encoding="utf-8")
        for path in (root / model).glob("*.safetensors"):
            data = path.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            header = data[8 : 8 + length].replace(old.encode(), escaped_new.encode())
            path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])

    return damage
