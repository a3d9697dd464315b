"""The plan of every layer, from shapes alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import BudgetError, GridError, ModelError, PatternError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.experts import split_experts
from hasslefree.models.sites import find_sites
from hasslefree.planning import uniform
from hasslefree.planning.disk import weights_on_disk
from hasslefree.planning.fit import plan_layer
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan, plan_of, select_and_plan
from hasslefree.recipe.engines import block_of
from tests.tiny_models import build, segments, tensors_of

# Every default, within a size and without one.
RECIPES = [
    {"scale_bits": 16},
    {"size": "6bits"},
    {"size": "6bits", "coding": "fixed"},
    {"bits": 4, "rank": 8},
    {"pattern": "2:4", "rank": 8},
]


def with_thin_layers(shape=(4, 4)):
    """A Llama with a matrix of a few entries beside the MLP of each block, which adds little to it."""
    model = build("llama")
    out, width = shape

    class Thin(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp, self.mix = mlp, nn.Linear(width, out, bias=False)

        def forward(self, x):
            small = self.mix(x[..., :width])
            return self.mlp(x) + nn.functional.pad(small, (0, x.shape[-1] - out))

    for layer in model.model.layers:
        layer.mlp = Thin(layer.mlp)
    return model


def layers_of(model, **fields):
    """The reasons for what stays dense, and the plans of all other layers by their names in the model."""
    resolved = Recipe(**fields).resolve(with_text=False)
    selection = select(find_blocks(model), resolved)
    plan = plan_of(model, selection, resolved)
    named = {f"{i}.{name}": layer for i, layers in enumerate(plan.blocks) for name, layer in layers.items()}
    return selection.dense, named


@pytest.mark.parametrize("fields", RECIPES, ids=str)
def test_a_thin_matrix_does_not_decide_for_the_others(fields):
    """Oracle: the plan of the model without it."""
    dense, plan = layers_of(with_thin_layers(), **fields)
    _, without = layers_of(build("llama"), **fields)
    assert {name.rpartition(".")[2] for name in dense} == {"mix"}
    kept = {name: layer for name, layer in plan.items() if not name.endswith("mix")}
    assert {name.replace("mlp.mlp", "mlp"): layer.kind for name, layer in kept.items()} == {
        name: layer.kind for name, layer in without.items()
    }
    if "size" not in fields and fields:  # a size is shared with the bytes of the dense one
        assert [layer.rank for layer in plan.values()] == [layer.rank for layer in without.values()]


@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (16, 1)])
def test_a_matrix_that_is_too_small_for_entropy_coding_stays_dense(shape, tmp_path):
    """Of (16, 1), the codes with their scales take more bytes than the weights."""
    recipe = Recipe(size="6bits", effort="fast")
    record = hasslefree.compress(with_thin_layers(shape), tmp_path / "out", recipe, segments=segments())
    assert not [layer.name for layer in record.layers if layer.name.endswith("mix")]
    dense, _ = layers_of(with_thin_layers(shape), size="6bits")
    assert set(dense.values()) == {"too small for entropy coding"}
    dense, _ = layers_of(with_thin_layers((8, 32)), size="6bits")
    assert not dense


def test_a_rank_that_a_thin_layer_cannot_have_leaves_it_dense(tmp_path, caplog):
    dense, plan = layers_of(with_thin_layers(), rank=5)
    assert set(dense.values()) == {"narrower than rank 5"}
    assert {layer.rank for layer in plan.values()} == {5}
    with caplog.at_level("INFO", "hasslefree"):
        recipe = Recipe(rank=5, method="eora")
        record = hasslefree.compress(with_thin_layers(), tmp_path / "out", recipe, segments=segments())
    assert set(record.dense) == set(dense)
    assert "narrower than rank 5" in caplog.text


def test_a_rank_that_fits_too_few_layers_is_an_error_with_the_narrowest():
    blocks = find_blocks(build("llama"))
    limits = [min(site.shape) for block in blocks.modules for site in find_sites(block).values()]
    dense, plan = layers_of(build("llama"), rank=min(limits))
    assert not dense
    assert {layer.rank for layer in plan.values()} == {min(limits)}
    with pytest.raises(BudgetError, match=rf"use rank={min(limits)} or less .*k_proj"):
        layers_of(build("llama"), rank=min(limits) + 1)


def test_within_a_size_a_narrow_layer_does_not_cap_the_rank_of_others():
    """2×2 entries allow rank 2."""
    dense, plan = layers_of(with_thin_layers((2, 4)), size="24bits", method="joint", pattern="2:4")
    assert not dense
    ranks = {name: layer.rank for name, layer in plan.items()}
    narrow = [rank for name, rank in ranks.items() if name.endswith("mix")]
    others = [rank for name, rank in ranks.items() if not name.endswith("mix")]
    assert set(narrow) == {2}
    assert min(others) > 2


def test_a_pattern_that_does_not_fit_leaves_a_layer_dense():
    dense, _ = layers_of(with_thin_layers((2, 2)), pattern="2:4", rank=2)
    assert set(dense.values()) == {"the pattern does not fit its 2 inputs"}
    with pytest.raises(PatternError, match="does not fit a layer of 32 inputs"):
        layers_of(build("llama"), pattern="5:11", rank=2)


@pytest.mark.parametrize("size", ["6bits", None])
def test_odd_inputs_get_a_group_that_divides_them(size, tmp_path):
    """90 inputs in groups of 64 are none: the largest divisor from 16 to 64 is 45; 96 inputs have 48."""
    odd = {"hidden_size": 90, "intermediate_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
    model = build("llama", **odd)
    fields = {"scale_bits": 16} | ({"size": size} if size else {"bits": 4, "rank": 0})
    dense, plan = layers_of(model, **fields)
    assert not dense
    assert {layer.shape[1]: layer.grid.group for layer in plan.values()} == {90: 45, 96: 48}
    record = hasslefree.compress(model, tmp_path / "out", Recipe(effort="fast", **fields), segments=segments())
    assert all(math.isfinite(layer.relative_error) for layer in record.layers)
    with pytest.raises(
        GridError, match="group_size 64 does not divide the.*; or leave out group_size=: each layer then"
    ):
        layers_of(build("llama", **odd), group_size=64, **fields)


def test_a_group_that_divides_no_layer_for_an_engine_is_an_error():
    model = build("llama", hidden_size=90, intermediate_size=90, num_attention_heads=3, num_key_value_heads=3)
    for engine in ("transformers", "mlx", "vllm", "llama.cpp"):
        for fields in ({}, {"bits": 4}, {"bits": 4, "group_size": 0}):
            message = f"{engine} needs a multiple of 32 inputs, and the layer has 90; .*layers.0.self_attn.q_proj"
            with pytest.raises(GridError, match=message):
                layers_of(model, engine=engine, **fields)


@pytest.mark.parametrize("engine", ["transformers", "mlx", "vllm", "llama.cpp"])
@pytest.mark.parametrize("fields", [{}, {"bits": 4, "rank": 0}, {"bits": 4, "rank": 0, "group_size": 0}], ids=str)
def test_inputs_that_an_engine_cannot_group_leave_a_layer_dense(engine, fields):
    """The 90 inputs of down_proj; those of the others get a group of the engine that divides them."""
    model = build("llama", hidden_size=96, intermediate_size=90)
    dense, plan = layers_of(model, engine=engine, **(fields or {"size": "9bits"}))
    assert {reason for name, reason in dense.items() if "down_proj" in name} == {
        f"its 90 inputs are no multiple of 32, as {engine} needs"
    }
    assert {layer.shape[1] for layer in plan.values()} == {96}
    groups = {layer.grid.group for layer in plan.values()}
    assert groups == ({None} if "group_size" in fields else {32})


@pytest.mark.parametrize("engine", ["mlx", "vllm", "llama.cpp"])
def test_experts_are_refused_for_an_engine_whose_export_takes_none(engine):
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    split_experts(model)
    with pytest.raises(ModelError, match=rf"experts.0.gate_proj, cannot be exported to {engine} .*leave out engine="):
        layers_of(model, engine=engine, bits=4, rank=0)
    _, plan = layers_of(model, engine=engine, bits=4, rank=0, leave_dense=("*.experts.*",))
    assert len(plan) == 2 * 4


@pytest.mark.parametrize(("width", "group"), [(94, 47), (1022, 73), (34, 17), (86, 43), (62, 31)])
def test_inputs_without_a_smaller_divisor_get_a_larger_group(width, group):
    """By hand: 94 = 2 · 47, 1022 = 2 · 7 · 73, 34 = 2 · 17; the default is 32."""
    dense, plan = layers_of(build("llama", intermediate_size=width), bits=4, rank=0)
    assert not dense
    assert {layer.grid.group for layer in plan.values() if layer.shape[1] == width} == {group}


def test_llama_cpp_s_types_follow_the_length_of_rows():
    """The best uniform plan of 5.2 bits: Q6_K and Q8_0 take more, Q4_K and Q4_0 take 4.5."""
    model = build("llama", hidden_size=64, intermediate_size=256)
    _, plan = layers_of(model, engine="llama.cpp", size="5.2bits")
    assert {layer.shape[1]: block_of(layer.grid) for layer in plan.values()} == {64: "Q4_0", 256: "Q4_K"}
    assert not any(layer.rank for layer in plan.values())
    _, plan = layers_of(model, engine="llama.cpp", size="12bits", rank=8)
    assert {layer.rank for layer in plan.values()} == {8}


def test_embedding_and_head_have_the_largest_type_of_llama_cpp_with_the_layers():
    """Q8_0, in which all matrices take 8.5 bits; Q5_1 is none of the types from which a size chooses."""
    model = build("llama", torch.bfloat16, hidden_size=64, intermediate_size=256)
    resolved = Recipe(engine="llama.cpp", size="8.6bits", allocate="uniform").resolve(with_text=False)
    plan = plan_of(model, select(find_blocks(model), resolved), resolved)
    assert {block_of(matrix.grid) for matrix in plan.ends.values()} == {"Q8_0"}
    assert {block_of(matrix.grid) for matrix in plan.layers} == {"Q8_0"}


def test_a_rank_with_which_no_size_is_possible_is_the_problem():
    """The least size is larger than the dense model, so that it would be refused too."""
    with pytest.raises(BudgetError, match="rank 32.; the uncompressed model takes less; give a smaller .*rank"):
        layers_of(build("llama", torch.bfloat16, hidden_size=64), engine="llama.cpp", size="12bits", rank=32)


def test_a_recipe_in_a_file_needs_no_text_if_the_segments_are_given(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(f"rank: 2\nmethod: eora\ncalibration: {tmp_path / 'missing.txt'}\n")
    hasslefree.compress(build("llama"), tmp_path / "out", path, segments=segments())
    assert (tmp_path / "out" / "compression.json").exists()


def test_the_plan_is_made_from_shapes():
    with torch.device("meta"):
        model = build("llama")
    resolved = Recipe(rank=2).resolve(with_text=False)
    assert len(make_plan(select(find_blocks(model), resolved), resolved).layers) == 14


def test_layers_of_one_kind_are_planned_once(monkeypatch):
    """Oracle: the plan of each layer by itself."""
    model = build("mixtral")
    split_experts(model)
    resolved = Recipe(rank=2, pattern="2:4").resolve(with_text=False)
    selection = select(find_blocks(model), resolved)
    planned = []
    monkeypatch.setattr(uniform, "plan_layer", lambda *given: planned.append(given) or plan_layer(*given))
    found = make_plan(selection, resolved)
    for index, matrices in enumerate(selection.sites):
        alone = {name: plan_layer(selection.blocks, index, matrix, resolved) for name, matrix in matrices.items()}
        assert found.blocks[index] == alone
    assert len(planned) == len({matrix.shape for _, _, matrix, _ in planned}) < len(found.layers)


@pytest.mark.parametrize("family", ["minimax", "gpt2"])
def test_the_planned_bytes_are_those_of_the_tensors_in_the_files(family, tmp_path):
    """MiniMax stores the decays of its linear attention as buffers, and GPT-2 ties its head."""
    model = build(family)
    recipe = Recipe(pattern="2:4", rank=2, method="eora")
    split_experts(model)
    resolved = recipe.resolve(with_text=False)
    plan = plan_of(model, select(find_blocks(model), resolved), resolved)
    planned = weights_on_disk(model, plan)
    hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    assert planned == sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())


@pytest.mark.parametrize(
    ("size", "coding", "expected", "said"),
    [
        ("5bits", None, "entropy", ""),
        (
            "75kB",
            None,
            "fixed",
            "than the size of 75.0 kB: coding fixed is used, which has up to 8 bits",
        ),
        ("23kB", None, "entropy", "the result will be smaller. For a larger file, use coding fixed"),
        ("75kB", "entropy", "entropy", "the result will be smaller. For a larger file, use coding fixed"),
    ],
)
def test_a_size_that_entropy_coding_does_not_fill_gets_longer_codes_if_that_is_open(
    size, coding, expected, said, caplog
):
    given = Recipe(size=size, coding=coding)
    model = build("llama")
    with caplog.at_level("INFO", "hasslefree"):
        resolved, selection, plan = select_and_plan(model, given.resolve(with_text=False))
    assert resolved.coding == expected
    assert said in caplog.text
    asked = Recipe(size=size, coding=expected).resolve(with_text=False)
    assert resolved.to_dict() == asked.to_dict()
    assert plan == plan_of(model, select(find_blocks(model), asked), asked)
    assert selection.dense == {}
