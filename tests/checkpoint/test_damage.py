"""Damaged folders: an error that names the file and the tensor, before any weight is loaded."""

import json
import re
import struct
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hasslefree import Recipe
from hasslefree.checkpoint.inspect import inspect_folder
from hasslefree.errors import CheckpointError
from tests.tiny_models import in_one_file

NAME = "model.layers.1.mlp.up_proj"
ENTRY = {"pattern": "2:4", "shape": [48, 32], "rank": 2, "nonzeros": 768, "crc32": "00000000"}


EORA = Recipe(rank=2, method="eora")


@pytest.fixture
def folder(compressed_copy):
    return in_one_file(compressed_copy(EORA))


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch):
    """Reading the weights after an error in the folder would be half a model."""
    read = PreTrainedModel._load_pretrained_model
    loads = []
    monkeypatch.setattr(
        PreTrainedModel, "_load_pretrained_model", staticmethod(lambda *a, **k: (loads.append(1), read(*a, **k))[1])
    )
    return loads


def assert_refused(folder, message, loads, by_inspect=True):
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not loads, "weights were loaded"
    if by_inspect:
        with pytest.raises(CheckpointError, match=message):
            inspect_folder(folder)


def change_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


VERSIONS = {
    "newer": ({"version": 99}, "format version 99.*reads version 2.*update hasslefree"),
    "older": ({"version": 1, "layout": "unpacked"}, "version 1, layout 'unpacked'.*compress the model again"),
    "layout": ({"layout": "woven"}, "layout 'woven'.*update hasslefree"),
    "none": ({"version": None}, "version None"),
    "modules": ({"modules": None}, "no valid `modules`"),
}


@pytest.mark.parametrize(("change", "message"), VERSIONS.values(), ids=VERSIONS)
def test_another_version(change, message, folder, no_weight_is_read):
    change_config(folder, lambda c: c.update(change))
    assert_refused(folder, message, no_weight_is_read)


ENTRIES = {
    "no pattern": ({"pattern": None}, "pattern"),
    "unknown pattern": ({"pattern": "unstructred"}, "Did you mean 'unstructured'"),
    "another shape": ({"shape": [48]}, "shape"),
    "a shape that does not divide": ({"shape": [48, 30]}, "30 inputs, no multiple of 4"),
    "rank": ({"rank": -1}, "rank"),
    "count": ({"nonzeros": 767}, "48×32 weight of pattern 2:4 has 768 stored values, got 767"),
    "crc": ({"crc32": "12345"}, "crc32 must match pattern"),
}


@pytest.mark.parametrize(("change", "message"), ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_is_not_as_the_format_says(change, message, folder, no_weight_is_read):
    change_config(folder, lambda c: c["modules"][NAME].update(change))
    assert_refused(folder, f"entry {re.escape(NAME)}: .*{message}.*", no_weight_is_read)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        (
            "model.layers.9.x",
            ENTRY,
            r"model\.layers\.9\.x, but LlamaForCausalLM has no linear layer or embedding of that name",
        ),
        ("model.norm", ENTRY, "model.norm, but LlamaForCausalLM has no linear layer or embedding of that name"),
        (NAME, ENTRY | {"shape": [24, 64]}, r"up_proj has the shape \[24, 64\] .* but \[48, 32\] in the model"),
    ],
)
def test_an_entry_that_does_not_go_with_the_model(name, entry, message, folder, no_weight_is_read):
    change_config(folder, lambda c: c["modules"].update({name: entry}))
    assert_refused(folder, message, no_weight_is_read, by_inspect=False)


TENSORS = {
    "values": (lambda t: t.pop(f"{NAME}.values"), r"model\.safetensors: \S+up_proj\.values not found"),
    "positions": (lambda t: t.pop(f"{NAME}.positions"), r"model\.safetensors: \S+up_proj\.positions not found"),
    "factor": (lambda t: t.pop(f"{NAME}.low_rank_v"), r"model\.safetensors: \S+up_proj\.low_rank_v not found"),
    "shape": (
        lambda t: t.update({f"{NAME}.values": t[f"{NAME}.values"][:, :-1].clone()}),
        r"model\.safetensors: .*up_proj\.values has the shape \[48, 15\], but \[48, 16\] according to config\.json",
    ),
    "transposed": (
        lambda t: t.update({f"{NAME}.low_rank_u": t[f"{NAME}.low_rank_u"].T.contiguous()}),
        r"up_proj\.low_rank_u has the shape \[2, 48\], but \[48, 2\]",
    ),
    "index of another kind": (
        lambda t: t.update({f"{NAME}.positions": t[f"{NAME}.positions"].int()}),
        r"model\.safetensors: .*up_proj\.positions has the dtype torch.int32, expected torch.uint8",
    ),
    "values of another kind": (
        lambda t: t.update({f"{NAME}.values": t[f"{NAME}.values"].int()}),
        r"up_proj\.values has the dtype torch.int32, expected a float",
    ),
    "one too many": (
        lambda t: t.update({f"{NAME}.sparse": torch.zeros(48, 32)}),
        r"model\.safetensors: \S+up_proj\.sparse does not belong to the layer",
    ),
}


@pytest.mark.parametrize(("edit", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_not_as_config_json_says(edit, message, folder, no_weight_is_read):
    change_tensors(folder, edit)
    assert_refused(folder, message, no_weight_is_read)


GRID_TROUBLES = {
    "bits": ({"bits": 7, "group": 16, "symmetric": False}, "bits must be one of 2, 3, 4, 5, 6, 8, got 7"),
    "group": ({"bits": 4, "group": 5, "symmetric": False}, "group_size 5 does not divide the 32 inputs"),
    "no object": (4, "grid|group"),
    "a field too few": (
        {"bits": 4, "group": 16},
        r"up_proj: grid must have the fields bits, group[^;:]*\. Download or copy config\.json again$",
    ),
    "a truth value": ({"bits": 4, "group": True, "symmetric": False}, "grid|group"),
    "another group": (
        {"bits": 4, "group": 8, "symmetric": False},
        r"weight_scale has the shape \[48, 2\], but \[48, 4\]",
    ),
    "symmetric": ({"bits": 4, "group": 16, "symmetric": True}, "weight_zero_point does not belong to the layer"),
    "none": (None, r"up_proj\.values.* not found"),
}


@pytest.mark.parametrize(("grid", "message"), GRID_TROUBLES.values(), ids=GRID_TROUBLES)
def test_a_grid_that_is_not_that_of_the_tensors(grid, message, compressed_copy, no_weight_is_read):
    folder = in_one_file(compressed_copy(Recipe(method="gptq", pattern="2:4", group_size=16)))
    change_config(folder, lambda c: c["modules"][NAME].update(grid=grid))
    assert_refused(folder, message, no_weight_is_read)
    change_config(folder, lambda c: c["modules"][NAME].update(grid={"bits": 4, "group": 16, "symmetric": False}))
    inspect_folder(folder)
    change_tensors(folder, lambda t: t.update({f"{NAME}.weight_packed": t[f"{NAME}.weight_packed"].float()}))
    assert_refused(
        folder, r"up_proj\.weight_packed has the dtype torch.float32, expected torch.int32", no_weight_is_read
    )


FACTOR_TROUBLES = {
    "bits": (4, "factor_bits must be 8, got 4"),
    "no number": (True, "factor_bits"),
    "none": (None, "low_rank_u has the dtype torch.int8, expected a float"),
}


@pytest.mark.parametrize(("bits", "message"), FACTOR_TROUBLES.values(), ids=FACTOR_TROUBLES)
def test_factors_that_are_not_those_of_the_tensors(bits, message, compressed_copy, no_weight_is_read):
    folder = in_one_file(compressed_copy(Recipe(rank=2, method="eora", factor_bits=8)))
    change_config(folder, lambda c: c["modules"][NAME].update(factor_bits=bits))
    assert_refused(folder, message, no_weight_is_read)
    change_config(folder, lambda c: c["modules"][NAME].update(factor_bits=8, rank=0))
    assert_refused(folder, "with rank 0 there are none", no_weight_is_read)
    change_config(folder, lambda c: c["modules"][NAME].update(rank=2))
    inspect_folder(folder)
    change_tensors(folder, lambda t: t.update({f"{NAME}.low_rank_v": t[f"{NAME}.low_rank_v"].float()}))
    assert_refused(folder, r"up_proj\.low_rank_v has the dtype torch.float32, expected torch.int8", no_weight_is_read)
    change_tensors(folder, lambda t: t.pop(f"{NAME}.low_rank_u_scale"))
    assert_refused(folder, r"up_proj\.low_rank_u_scale not found", no_weight_is_read)


def test_codes_where_config_json_says_floats(folder, no_weight_is_read):
    change_tensors(folder, lambda t: t.update({f"{NAME}.low_rank_u": t[f"{NAME}.low_rank_u"].char()}))
    assert_refused(folder, r"up_proj\.low_rank_u has the dtype torch.int8, expected a float", no_weight_is_read)


def test_a_bias_that_the_model_has_and_the_file_does_not(compressed_copy, no_weight_is_read):
    folder = in_one_file(compressed_copy(EORA, "opt"))
    change_tensors(folder, lambda t: t.pop("model.decoder.layers.1.fc1.bias"))
    message = r"model\.decoder\.layers\.1\.fc1\.bias not found"
    assert_refused(folder, message, no_weight_is_read, by_inspect=False)


def test_a_shard_cut_short_is_named(compressed_copy, no_weight_is_read):
    """At every place where something new is cut: in the length, in the header, in a tensor, by one byte."""
    folder = compressed_copy(EORA)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for size in (0, 7, 8, header - 1, header, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:size])
        assert_refused(folder, f"{re.escape(str(shard))} is truncated", no_weight_is_read)
    for damaged in (whole + b"\0", whole[:8] + b"[" + whole[9:]):
        shard.write_bytes(damaged)
        assert_refused(folder, f"{re.escape(str(shard))} is truncated, or not a safetensors file", no_weight_is_read)


def test_a_shard_that_lacks_what_the_index_lists(compressed_copy, no_weight_is_read):
    """Also a tensor of which the compressed layers know nothing."""
    folder = compressed_copy(EORA)
    shard = next(file for file in folder.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    assert_refused(
        folder,
        rf"{shard.name} does not contain model\.norm\.weight, which model\.safetensors\.index\.json",
        no_weight_is_read,
    )
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        inspect_folder(folder)


def of_pattern(pattern):
    return Recipe(rank=2, method="eora", pattern=pattern, sparsity=None if ":" in pattern else 0.5)


def place(folder, leaf):
    """The file and the byte range of a tensor of the layer NAME, by safetensors' own header."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    first, stop = json.loads(data[8 : 8 + length])[f"{NAME}.{leaf}"]["data_offsets"]
    return file, 8 + length + first, 8 + length + stop


@pytest.mark.parametrize(("pattern", "leaf", "step"), [("2:4", "positions", 401), ("3:8", "positions", 401),
                                                      ("row", "mask", 401), ("structured", "columns", 41)])  # fmt: skip
def test_a_flipped_bit_of_an_index_is_found(pattern, leaf, step, compressed_copy, no_weight_is_read):
    """A sample of the bits, and the first and the last; CRC-32 finds any one."""
    folder = in_one_file(compressed_copy(of_pattern(pattern)))
    file, start, stop = place(folder, leaf)
    whole, bits = file.read_bytes(), 8 * (stop - start)
    for bit in {0, bits - 1, *range(0, bits, step)}:
        data = bytearray(whole)
        data[start + bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        message = rf"{re.escape(str(file))}: {re.escape(NAME)}\.{leaf} is damaged: its CRC-32"
        assert_refused(folder, message, no_weight_is_read, by_inspect=False)


IMPOSSIBLE = [("2:4", "positions", 0), ("3:8", "positions", 255), ("row", "mask", 255), ("structured", "columns", 255)]


@pytest.mark.parametrize(("pattern", "leaf", "byte"), IMPOSSIBLE)
def test_codes_that_no_pattern_has_are_found_though_their_crc_is_right(
    pattern, leaf, byte, compressed_copy, no_weight_is_read
):
    """A kernel that trusts them would read beyond the row."""
    folder = in_one_file(compressed_copy(of_pattern(pattern)))
    file, start, stop = place(folder, leaf)
    data = bytearray(file.read_bytes())
    data[stop - 1] = byte
    file.write_bytes(data)
    change_config(folder, lambda c: c["modules"][NAME].update(crc32=f"{zlib.crc32(data[start:stop]):08x}"))
    message = rf"{re.escape(str(file))}: {re.escape(NAME)}\.{leaf} was written wrongly: its CRC-32 is right"
    assert_refused(folder, message, no_weight_is_read, by_inspect=False)


def test_pickled_weights_are_not_read(folder, no_weight_is_read):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_refused(
        folder, "pytorch_model.bin is truncated, or not a safetensors file", no_weight_is_read, by_inspect=False
    )


def test_the_folder_itself_is_sound(folder, no_weight_is_read):
    """Or nothing above would show anything."""
    AutoModelForCausalLM.from_pretrained(folder)
    assert no_weight_is_read
    assert inspect_folder(folder).layers
