"""Every family of decoders that transformers knows: built tiny from its configuration, compressed, loaded and run.

    python benchmarks/families.py [--only NAME …] [--seconds 180]

Each has a process of its own. A family is built with the sizes of `SIZES`, as far as its configuration has them, and
those of `FIXES`. Outcomes: "compresses", with the share of the parameters in the blocks that is compressed; "refused",
with the message; "not built", with the error of transformers; "fails", with the error; "slow", after so many seconds.
Outcomes that the output file already holds are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import hasslefree
from harness.record import RESULTS, resumed, write
from hasslefree.errors import HasslefreeError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.load import auto_class

# Whatever a configuration calls them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 2),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("embed_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("laurel_rank", "o_lora_rank"), 4),
    "mamba_d_head": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "global_head_dim": 8,
    "head_dim": 8,
    "rotary_dim": 4,
    "vocab_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family needs beside that.
HYBRID = ["linear_attention", "full_attention"]
SLIDING = ["sliding_attention", "full_attention"]
SHARED = {"num_hidden_layers": 4, "layer_types": 2 * SLIDING, "num_kv_shared_layers": 2}
ROPES = {"rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4} for name in SLIDING}}
COMPASS = {"layer_types": SLIDING} | ROPES
INKLING = {
    "num_hidden_layers": 6,
    "layer_types": [*["hybrid_sliding"] * 5, "hybrid"],
    "rel_extent": 8,
    "n_layers_per_attn_res_block": 2,
}
# Rotary embeddings over time, height and width, where the code alone says how many dimensions each has.
MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}}
FIXES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": COMPASS,
    "cohere_compass": {"text_config": COMPASS},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "deepseek_v4": {"moe_intermediate_size": 256, "intermediate_size": 256, "num_local_experts": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 32}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_output_size": 32},
    },
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [24, 24]}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "nemo_speechlm": {"head_config": {"audio_hidden_size": 32}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "gemma3n_text": SHARED | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": SHARED,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4": {"intermediate_size": 256, "moe_intermediate_size": 128},
    "inkling2": {"text_config": INKLING, "vision_config": {"text_hidden_size": 32}},
    "inkling2_text": INKLING,
    "falcon_mamba": {"hidden_size": 64},
    "mamba": {"hidden_size": 64},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "olmo_hybrid": {"layer_types": HYBRID},
    "phi4_multimodal": {"audio_config": {"hidden_size": 16, "nemo_conv_channels": 16, "num_blocks": 1}},
    "recurrent_gemma": {"num_attention_heads": 8, "intermediate_size": 192},
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl"), MROPE),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), MROPE),
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}
# The classes of transformers that make a model of a family: of text alone, and of images or sound too.
CAUSAL: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL: dict[str, str] = dict(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
# At the end of a name: the other class of a family that has two.
TOWERS = " with towers"
# What configurations call the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Processes that have imported what all families need.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["hasslefree", "transformers.modeling_utils", "transformers.generation"])
# What is no longer tiny is not built.
MOST = 150_000_000


def configuration(name: str) -> Any:
    """The tiny configuration of a family, or of one with `TOWERS`: what its class takes of the sizes."""
    family = name.removesuffix(TOWERS)
    config = tiny(type(AutoConfig.for_model(family)), FIXES.get(family, {}))
    classes = MULTIMODAL if name.endswith(TOWERS) else MULTIMODAL | CAUSAL
    config.architectures = [classes[family]]
    return config


def tiny(kind: Any, fixes: dict[str, Any]) -> Any:
    """A configuration of a class, and of the configurations in it. fixes: of its fields; of a part, by its name."""
    known = kind()
    fields = known.to_dict()
    names = set(fields) | set(getattr(known, "attribute_map", {}))
    sizes = {name: size for name, size in SIZES.items() if name in names}
    if "kv_lora_rank" in sizes:  # every head has keys of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in known.sub_configs:
        inner = getattr(known, name, None)
        if inner is not None:
            sizes[name] = tiny(type(inner), fixes.get(name, {}))
    layers = next((getattr(known, name) for name in LAYERS if isinstance(getattr(known, name, None), int)), None)
    lists = {name: value[:2] for name, value in fields.items() if isinstance(value, list) and len(value) == layers}
    return kind(**(lists | sizes | {name: value for name, value in fixes.items() if name not in known.sub_configs}))


def outcome(family: str) -> dict[str, Any]:
    """What becomes of a family."""
    try:
        config = configuration(family)
        with torch.device("meta"):
            shapes = auto_class(config).from_config(config)
            auto_class(shapes.config).from_config(shapes.config)  # as it is saved, it is of a class that loads it
        size = shapes.num_parameters()
        if size > MOST:
            return {"outcome": "not built", "error": f"{size:,} parameters, in spite of the sizes that are known here"}
        torch.manual_seed(0)
        model = auto_class(config).from_config(config).eval()
        tokens = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(input_ids=tokens[:1], use_cache=False)
    except Exception as error:
        return {"outcome": "not built", "error": first_line(error)}
    try:
        return compressed(model, tokens)
    except HasslefreeError as error:
        return {"outcome": "refused", "error": first_line(error)}
    except Exception as error:
        return {"outcome": "fails", "error": first_line(error)}


def compressed(model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Compress, load, and compare with what is in memory; then generate."""
    inside = sum(p.numel() for block in find_blocks(model).modules for p in block.parameters())
    recipe = hasslefree.Recipe(pattern="2:4", rank=2, effort="fast", rounds=3)
    can_generate = generates(model, tokens)
    with tempfile.TemporaryDirectory() as scratch:
        report = hasslefree.compress(model, f"{scratch}/out", recipe, segments=tokens)
        loaded = auto_class(model.config).from_pretrained(f"{scratch}/out")
        with torch.no_grad():
            expected, found = (each(input_ids=tokens[:1], use_cache=False).logits for each in (model, loaded))
        generated = generates(loaded, tokens)
    if can_generate and not generated:
        return {"outcome": "fails", "error": "the dense model generates, and the loaded one does not"}
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
        off = (found - expected).abs().max().item()
        return {"outcome": "fails", "error": f"the loaded model's logits are off by {off:.2g}"}
    share = report.dense_parameters / inside
    return {"outcome": "compresses", "share": round(share, 4), "layers": len(report.layers), "dense": len(report.dense)}


def generates(model: Any, tokens: torch.Tensor) -> bool:
    """Whether a model generates: transformers' caches do not take every tiny one."""
    try:
        model.generate(tokens[:1], max_new_tokens=4, do_sample=False)
    except (ValueError, RuntimeError, IndexError, AttributeError):
        return False
    return True


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:240]


def into(family: str, file: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    Path(file).write_text(json.dumps(outcome(family)))


def alone(family: str, seconds: float) -> dict[str, Any]:
    """The outcome of a family, from a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        process = SERVER.Process(target=into, args=(family, file.name))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return {"outcome": "slow"}
        text = Path(file.name).read_text()
        return json.loads(text) if text else {"outcome": "fails", "error": f"exit code {process.exitcode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = {name for name in CAUSAL.keys() & MULTIMODAL.keys() if CAUSAL[name] != MULTIMODAL[name]}
    families = sorted({*CAUSAL, *MULTIMODAL, *(name + TOWERS for name in both)})
    parser.add_argument("--only", nargs="+", default=families, choices=families, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each")
    parser.add_argument("--output", type=Path, default=RESULTS / "families.json")
    args = parser.parse_args()
    content = resumed(args.output, {}, "results")
    for family in args.only:
        if family not in content["results"]:
            content["results"][family] = alone(family, args.seconds)
            write(args.output, content)
            print(family, content["results"][family], flush=True)


if __name__ == "__main__":
    main()
