"""Which grids engines hold. Oracle: every value of a grid, among those that a format can write for one scale."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from hasslefree.core.grids import BITS, Grid
from hasslefree.packed.spec import LayerSpec
from hasslefree.recipe.engines import (
    ENGINES,
    K_TYPES,
    block_of,
    fused_name,
    grid_for,
    kind_of,
    refusal,
    type_like,
    types_for,
    vllm_kernels,
)

SERVE = Path(__file__).parents[2] / "docs" / "howto" / "serve.md"
KINDS = {"symmetric": {"symmetric": True}, "offset": {"offset": True}, "whole zero": {}}
GRIDS = [Grid(bits, group, **kind) for bits in BITS for group in (None, 32, 48, 64, 96, 128) for kind in KINDS.values()]

# The multiples of the scale that blocks of llama.cpp hold, without and with a minimum (ggml-common.h), smallest first.
SIGNED = {"Q4_0": range(-8, 8), "Q5_0": range(-16, 16), "Q8_0": range(-128, 128)}
WITH_MINIMUM = {"Q4_1": range(16), "Q5_1": range(32)}


def multiples(grid):
    """The multiples of the scale among the values of a grid, beyond its offset."""
    top = 2**grid.bits
    zeros = [top // 2] if grid.symmetric else [0] if grid.offset else range(top)
    return {code - zero for code in range(top) for zero in zeros}


@pytest.mark.parametrize("grid", [Grid(bits, 32, **kind) for bits in BITS for kind in KINDS.values()], ids=str)
def test_the_smallest_block_that_has_every_value_is_taken(grid):
    blocks = WITH_MINIMUM if grid.offset else SIGNED
    assert block_of(grid) == next((name for name, held in blocks.items() if multiples(grid) <= set(held)), None)


@pytest.mark.parametrize("name", [*K_TYPES, *SIGNED, *WITH_MINIMUM])
def test_a_layer_takes_the_bytes_of_its_type(name):
    """Oracle: the package gguf."""
    gguf = pytest.importorskip("gguf")
    simple = [Grid(bits, 32, symmetric=not offset, offset=offset) for bits in (4, 5, 8) for offset in (False, True)]
    grids = {block_of(grid): grid for grid in (*K_TYPES.values(), *simple)}
    entries, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    # Rows of eight blocks, so that no word of 32 bits is filled up.
    spec = LayerSpec("dense", (3, 8 * entries), 0, 24 * entries, grids[name])
    assert spec.bytes(torch.bfloat16) == 24 * size


def test_types_follow_the_length_of_rows():
    for width in (32, 64, 256, 288, 512):
        types = types_for(width)
        assert all(ENGINES["llama.cpp"].holds(grid) and width % (grid.block or 32) == 0 for grid in types)
        sizes = [LayerSpec("dense", (1, 9 * width), 0, 9 * width, grid).bytes(torch.bfloat16) for grid in types]
        assert sizes == sorted(sizes)
        assert not {"Q4_1", "Q5_1", "Q5_K"} & {block_of(grid) for grid in types}
        for grid in types_for(256):
            assert type_like(grid, width) in types
            assert type_like(grid, width).bits >= grid.bits
    assert not ENGINES["llama.cpp"].holds(Grid(4, 32, offset=True, scale_bits=5, block=256))
    assert not ENGINES["mlx"].holds(K_TYPES["Q4_K"])


# What the formats' own documentation says: MLX's quantize, WNA16_SUPPORTED_TYPES_MAP and WNA16_ZP_SUPPORTED_TYPES_MAP
# of vLLM 0.33 for compressed-tensors' pack-quantized, torch's _weight_int4pack_mm with one or two nibbles for a code.
HELD = {
    "mlx": {("symmetric", bits) for bits in BITS} | {("offset", bits) for bits in BITS},
    "vllm": {(kind, bits) for kind in ("symmetric", "whole zero") for bits in BITS},
    "transformers": {(kind, bits) for kind in KINDS for bits in BITS},
    "llama.cpp": {(kind_of(grid), grid.bits) for grid in GRIDS if block_of(grid)},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_refusal_names_engines_that_can_and_a_change_that_helps(name):
    for grid in GRIDS:
        held = (kind_of(grid), grid.bits) in HELD[name] and (grid.group or 32) % 32 == 0
        message = refusal(name, grid)
        assert (message is None) == held == ENGINES[name].holds(grid), grid
        if message is None:
            continue
        advice = message.split(f"; for {name}, ")[1]
        able = set(match[1].split(" and ")) if (match := re.search(r"\(([\w. ]*) can\)", message)) else set()
        assert able == {other for other in ENGINES if refusal(other, grid) is None}
        fields = {"bits": grid.bits, "group": grid.group, "symmetric": grid.symmetric, "offset": grid.offset}
        used, _, left = advice.partition("leave out")
        for field in ("symmetric", "offset"):
            fields[field] = (fields[field] or f"{field}=True" in used) and f"{field}=True" not in left
        for field, key in (("bits", "bits"), ("group", "group_size")):
            if match := re.search(rf"{key}=(\d+)", used):
                fields[field] = int(match[1])
        assert refusal(name, Grid(**fields)) is None, advice


@pytest.mark.parametrize("name", ENGINES)
def test_a_grid_for_an_engine_is_one_that_it_holds_and_has_what_was_given(name):
    options = itertools.product((None, *BITS), (None, 0, 32, 64, 80), (None, True, False), (None, True, False))
    for bits, group, symmetric, offset in options:
        if symmetric and offset:
            continue
        grid = grid_for(name, bits, group, symmetric, offset)
        possible = [
            other
            for other in GRIDS
            if (bits or 4) == other.bits
            and group in (None, other.group or 0)
            and symmetric in (None, other.symmetric)
            and offset in (None, other.offset)
            and (kind_of(other), other.bits) in HELD[name]
            and (other.group or 32) % 32 == 0
        ]
        assert (grid is None) == (not possible)
        assert grid is None or grid in possible


@pytest.mark.parametrize("name", ENGINES)
def test_groups_that_an_engine_lacks_are_repeated(name):
    """Oracle: the largest size that divides both."""
    for group, width in ((32, 96), (64, 192), (96, 192), (None, 576), (128, 256), (256, 512)):
        expected = max(size for size in ENGINES[name].groups if (group or width) % size == 0)
        assert ENGINES[name].group_for(Grid(4, group), width) == expected


def test_layers_that_vllm_fuses_have_one_name():
    """Oracle: packed_modules_mapping of Llama, Qwen3.5, LFM2 and DeepSeek in vLLM 0.33."""
    for fused, parts in {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "feed_forward.w13": ("feed_forward.w1", "feed_forward.w3"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }.items():
        assert {fused_name(part) for part in parts} == {fused}
    for alone in ("self_attn.o_proj", "mlp.down_proj", "feed_forward.w2", "self_attn.qkv_proj", "q_b_proj"):
        assert fused_name(alone) == alone


def test_the_kernels_of_vllm():
    """Oracle: the quantities that `can_implement` of each kernel accepts in vLLM 0.33, in the order of its choice."""
    signed, zeros = "symmetric", "whole zero"
    machete = {(4, signed), (8, signed), (4, zeros), (8, zeros)}  # Hopper
    marlin = {(4, signed), (8, signed), (4, zeros)}
    cpu = {(4, signed), (4, zeros)}
    for bits, kind in itertools.product(BITS, (signed, zeros)):
        found = vllm_kernels(bits, kind == signed)
        assert ("Machete" in found) == ((bits, kind) in machete)
        assert ("Marlin" in found) == ((bits, kind) in marlin)
        assert ("Humming" in found) == ((bits, kind) not in marlin)
        assert ("on a CPU" in found) == ((bits, kind) in cpu) != ("on a GPU only" in found)


def test_the_table_of_the_documentation_is_that_of_the_code():
    text = SERVE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    expected = []
    for name, engine in ENGINES.items():
        held = [[str(bits) for bits in BITS if engine.holds(Grid(bits, 32, **kind))] for kind in KINDS.values()]
        bits = [", ".join(each) or "none" for each in held]
        expected.append((name, *bits, ", ".join(map(str, sorted(engine.groups)))))
    assert rows == expected
    blocks = re.findall(r"`(Q\d_\d)` \(([^)]*)\)", " ".join(text.split()))
    found = {name: {kind: re.findall(r"\d", part) for kind, part in re.findall(r"([a-z ]+?) ((?:\d(?:, )?)+)", its)}
             for name, its in blocks}  # fmt: skip
    for name, kinds in found.items():
        held = {kind: [str(bits) for bits in BITS if block_of(Grid(bits, 32, **KINDS[kind])) == name] for kind in KINDS}
        assert {kind.strip(): bits for kind, bits in kinds.items()} == {k: b for k, b in held.items() if b}
    assert found.keys() == SIGNED.keys() | WITH_MINIMUM.keys()
