"""A reader of compressed folders that knows docs/reference/format.md, JSON and NumPy, and constriction for streams.

`read` gives each S, `factors` u and v.
"""

import json
import struct
from statistics import NormalDist

import constriction
import numpy as np

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1", "I8": "i1", "I32": "<i4"}


def tensors(file):
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    for name in header.keys() - {"__metadata__"}:
        (first, stop), kind = (start + offset for offset in header[name]["data_offsets"]), header[name]["dtype"]
        array = np.frombuffer(data[first:stop], TYPES[kind]).reshape(header[name]["shape"])
        yield name, (array.astype("<u4") << 16).view("<f4") if kind == "BF16" else array


def kept(index, pattern, width):
    bits = np.unpackbits(index, axis=1, bitorder="little")
    n, m = map(int, pattern.split(":")) if ":" in pattern else (width, 1)
    groups, b = (len(index), width // m), (m - 1).bit_length()
    if ":" not in pattern or n * b > m or m > 256:
        return bits[:, :width] == 1
    places = bits[:, : groups[1] * n * b].reshape(*groups, n, b) @ (1 << np.arange(b))
    return (places[..., None] == np.arange(m)).any(2).reshape(-1, width)


def codes(words, bits):
    return (words[..., None] >> np.arange(0, 32, bits) & (1 << bits) - 1).reshape(*words.shape[:-1], -1)


def probabilities(k):
    edges = [(a - 127.5) / 2 ** (k / 8 - 3) for a in range(255)]
    masses = np.diff([0.0, *map(NormalDist().cdf, edges), 1.0])
    rounded = np.maximum(np.rint(masses * 2**20), 1) / 2**20
    return constriction.stream.model.Categorical(rounded.astype("f4"), perfect=False)


def stream(words, shape):
    header = words[:1].view("u1")
    stack = constriction.stream.stack.AnsCoder(words[1:].view("u4"))
    numbers = []
    for length, mean, k in zip(shape, header[::2].view("i1"), header[1::2], strict=True):
        numbers.append(stack.decode(probabilities(k), length) - 128 + int(mean))
    classes = np.clip(numbers[0][:, None] + numbers[1] + 24, 0, 87)
    height = max(1, 2**22 // shape[1])
    found = np.zeros(shape, int)
    for first in range(0, shape[0], height):
        part, of = found[first : first + height], classes[first : first + height]
        for k in range(88):
            if (of == k).any():
                part[of == k] = stack.decode(probabilities(k), int((of == k).sum()))
    left = stack.get_compressed()
    assert left[-2:].tolist() == [0, 1]
    assert not left[:-2].any()
    return found


def whole(folder):
    return {name: array for file in folder.glob("*.safetensors") for name, array in tensors(file)}


def small(held, name, grid, width):
    multiples = codes(held[f"{name}_packed"], grid["scale_bits"])[:, : width // grid["group"]]
    return multiples * held[name][:, None].astype("f8") / 2 ** grid["scale_bits"]


def factors(folder):
    held = whole(folder)
    for name, entry in json.loads((folder / "config.json").read_text())["quantization_config"]["modules"].items():
        found = [held[f"{name}.low_rank_{leaf}"].astype("f8") for leaf in "uv" if entry["rank"]]
        if entry.get("factor_bits"):
            scales = [held[f"{name}.low_rank_{leaf}_scale"].astype("f8") for leaf in "uv"]
            found = [factor * scale[:, None] for factor, scale in zip(found, scales, strict=True)]
        yield name, found


def read(folder):
    held = whole(folder)
    for name, entry in json.loads((folder / "config.json").read_text())["quantization_config"]["modules"].items():
        pattern, (out, width), grid = entry["pattern"], entry["shape"], entry.get("grid")
        if pattern == "structured":
            places = np.isin(np.arange(width), held[f"{name}.columns"])[None].repeat(out, 0)
        elif pattern == "dense":
            places = np.ones((out, width), bool)
        else:
            index = held[f"{name}.positions" if ":" in pattern else f"{name}.mask"]
            places = kept(index, pattern, width)
        sparse = np.zeros((out, width))
        if grid is None:
            sparse[places] = held[f"{name}.values"].ravel()
        elif "rate" in grid:
            scale, inputs = (held[f"{name}.{leaf}"].astype("f8") for leaf in ("weight_scale", "weight_input_scale"))
            sparse = (stream(held[f"{name}.weight_packed"], (out, width)) - 128) * scale * inputs
        else:
            packed, scale = codes(held[f"{name}.weight_packed"], grid["bits"]), held[f"{name}.weight_scale"]
            if "scale_bits" in grid:
                scale = small(held, f"{name}.weight_scale", grid, width)
            of_group = np.arange(width) // (grid["group"] or width)
            zero = np.full(scale.shape, 1 << grid["bits"] - 1)
            if "offset" in grid:
                offset = -small(held, f"{name}.weight_offset", grid, width)
                yield name, packed[:, :width] * scale[:, of_group].astype("f8") + offset[:, of_group]
                continue
            if not grid["symmetric"]:
                zero = codes(held[f"{name}.weight_zero_point"].T, grid["bits"]).T[:out]
            last = entry["nonzeros"] if packed.ndim == 1 else entry["nonzeros"] // out
            steps = zero[:, of_group].astype(int)
            steps[places] = packed[..., :last].ravel()
            sparse = (steps - zero[:, of_group]) * scale[:, of_group].astype("f8")
        yield name, sparse
