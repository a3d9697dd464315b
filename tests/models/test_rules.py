"""Which matrices are compressed, and the reasons of those that stay dense."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hasslefree.errors import ModelError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.experts import split_experts
from hasslefree.models.rules import EXCLUDED, ROUTER, SHARED, TIME_STEP, select_sites
from tests.tiny_models import ROTARY, build

MIXTURE = ROTARY | {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
# Mixtures by where their routers are: sizes, globs of experts that are no linear layers, and the routers of a block.
ROUTERS = {
    "afmoe": ({"num_experts": 4, "num_dense_layers": 0}, (), {"mlp.router.gate"}),
    "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2}, (), {"mlp.gate.wg"}),
    "gemma4_text": (
        {
            "num_experts": 4, "top_k_experts": 2, "enable_moe_block": True, "global_head_dim": 16,
            "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
        },
        (), {"router.proj"},
    ),
    "zaya": (
        {"num_experts": 4, "num_experts_per_tok": 1},
        (), {f"mlp.gate.{name}" for name in ("down_proj", "router_mlp.fc1", "router_mlp.fc2", "router_mlp.out_proj")},
    ),
    "jetmoe": (
        {"num_local_experts": 4, "kv_channels": 16},
        ("*linear.weight",), {"mlp.router.layer", "self_attention.experts.router.layer"},
    ),
    "dbrx": (
        {
            "d_model": 64, "n_heads": 4, "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
        ("*.experts.mlp*",), {"ffn.router.layer"},
    ),
    "qwen2_moe": (
        {"num_experts": 4, "shared_expert_intermediate_size": 48},
        (), {"mlp.gate.weight", "mlp.shared_expert_gate"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_stay_dense_wherever_a_family_has_them(family):
    """Oracle: the names of the routers in the code of transformers."""
    sizes, globs, routers = ROUTERS[family]
    config = AutoConfig.for_model(family, **(MIXTURE | sizes), bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    split_experts(model)
    blocks = find_blocks(model)
    selection = select_sites(blocks, globs)
    found = {name for name, reason in selection.dense.items() if reason == ROUTER}
    assert found == {f"{blocks.prefix(index)}.{name}" for index in range(2) for name in routers}
    assert all(not routers & sites.keys() for sites in selection.sites)


def test_the_gate_of_experts_in_a_module_list_stays_dense():
    """Code that comes with a model keeps its experts so, as transformers did before it fused them."""
    blocks = find_blocks(build("llama"))
    for block in blocks.modules:
        block.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        block.mlp.gate = torch.nn.Linear(32, 4)
    selection = select_sites(blocks)
    assert selection.dense == {f"model.layers.{index}.mlp.gate": ROUTER for index in range(2)}


def test_every_matrix_is_selected_or_has_a_reason():
    blocks = find_blocks(build("llama"))
    selection = select_sites(blocks, ("*.0.*.q_proj",))
    assert selection.dense == {"model.layers.0.self_attn.q_proj": EXCLUDED}
    assert selection.automatically_dense == []
    assert [len(sites) for sites in selection.sites] == [6, 7]


def test_shared_weights_and_projections_of_time_steps_stay_dense():
    reasons = select_sites(find_blocks(build("mamba"))).dense
    assert reasons["backbone.layers.1.mixer.dt_proj"] == TIME_STEP
    shared = [name for name, reason in select_sites(find_blocks(build("zamba2"))).dense.items() if reason == SHARED]
    assert {name.split(".")[2] for name in shared} == {"1", "3"}


def test_large_weights_that_are_no_linear_layers_are_refused_by_name():
    """Beside linear layers, and in a module of experts that holds something else."""
    model = build("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.extra = torch.nn.Parameter(torch.zeros(4, 24))
        layer.self_attn.extra = torch.nn.Parameter(torch.zeros(40, 32, 32))
    split_experts(model)
    blocks = find_blocks(model)
    with pytest.raises(
        ModelError, match=r"6 weights are not linear layers .*attn\.extra \(40, 32, 32\).*experts\.gate_up"
    ) as e:
        select_sites(blocks)
    assert "leave_dense" in str(e.value)
    globs = ("*.experts.*", "*.extra")
    assert len(select_sites(blocks, globs).sites[0]) == 4
    for wrong, message in (
        (("*.nothing",), "matches no layer"),
        (("*",), "every matrix stays dense: excluded by the user"),
    ):
        with pytest.raises(ModelError, match=message):
            select_sites(blocks, (*globs, *wrong))
