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
from harness.record import RESULTS, resumed, write
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hasslefree
from hasslefree.errors import HasslefreeError
from hasslefree.models.blocks import find_blocks

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
FIXES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1},
}
# What is no longer tiny is not built.
MOST = 20_000_000


def configuration(family: str) -> Any:
    """The tiny configuration of a family: what its class takes of the sizes."""
    known = AutoConfig.for_model(family)
    names = set(known.to_dict()) | set(getattr(known, "attribute_map", {}))
    sizes = {name: size for name, size in SIZES.items() if name in names}
    if "kv_lora_rank" in sizes:  # every head has keys of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= FIXES.get(family, {})
    lists = {name: value[: sizes.get("num_hidden_layers", 2)] for name, value in known.to_dict().items()
             if isinstance(value, list) and len(value) == getattr(known, "num_hidden_layers", None)}  # fmt: skip
    return AutoConfig.for_model(family, **(lists | sizes))


def outcome(family: str) -> dict[str, Any]:
    """What becomes of a family."""
    try:
        config = configuration(family)
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        if size > MOST:
            return {"outcome": "not built", "error": f"{size:,} parameters, in spite of the sizes that are known here"}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
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
        loaded = AutoModelForCausalLM.from_pretrained(f"{scratch}/out")
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
        process = multiprocessing.get_context("spawn").Process(target=into, args=(family, file.name))
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
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
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
