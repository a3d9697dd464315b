"""Tiny randomly initialised decoders of many families, built from their configs."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hasslefree import Gram

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = SIZES | {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}

FAMILIES: dict[str, dict] = {
    "llama": ROTARY,
    "qwen3": ROTARY | {"head_dim": 8},
    "mistral": ROTARY | {"sliding_window": 8},
    # Every second layer attends globally, so that the blocks are called with different masks and rotary embeddings.
    "gemma3_text": ROTARY
    | {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 0,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64},
    "gpt_neox": SIZES | {"vocab_size": 64, "max_position_embeddings": 64},
    "phi3": ROTARY,
}  # fmt: skip

# Not compressed by the tests of all families: a mixture, and two whose blocks put out more than their hidden states.
OTHERS: dict[str, dict] = {
    "mixtral": ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bamba": ROTARY | {"mamba_n_heads": 8, "mamba_d_state": 4, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 2, "time_step_rank": 4},
    "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 2, "time_step_rank": 4},
    "olmo2": ROTARY,  # norms over all heads together
    "phi": ROTARY,  # a head with a bias
    "falcon": ROTARY | {"new_decoder_architecture": True, "num_kv_heads": 2},  # a linear layer of its own kind
    "flint": ROTARY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []},
    # stored buffers
    "minimax": ROTARY
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"]},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
}


# Blocks that are given more than hidden states: inputs and keys of other layers, tokens, embeddings, positions that an
# earlier one chose; in several streams, two of them.
SHARING = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * ["sliding_attention", "full_attention"],
    "head_dim": 8, "sliding_window": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48,
}  # fmt: skip
BESIDE: dict[str, dict] = {
    "gemma4_text": ROTARY | SHARING | {"global_head_dim": 8},
    "gemma3n_text": ROTARY | SHARING
    | {"intermediate_size": [48] * 4, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "glm_moe_dsa": ROTARY | LATENT | {"num_key_value_heads": 4, "index_topk": 4},
    "deepseek_v4": ROTARY | LATENT
    | {"num_local_experts": 8, "moe_intermediate_size": 256, "intermediate_size": 256, "o_lora_rank": 4, "head_dim": 8},
    "zamba2": ROTARY
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "mamba_d_state": 4},
}  # fmt: skip

# Mixtures of experts, of all layouts.
MIXTURE = ROTARY | {"head_dim": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
MIXTURES: dict[str, dict] = {
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},  # interleaved, transposed, biases
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},  # transposed
    "nemotron_h": {  # no gate
        "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16, "layers_block_type": ["moe", "attention"],
    },
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},  # a shared expert, and its gate
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8},  # in one batch
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A model of this family, the same at every call."""
    mixtures = {name: MIXTURE | sizes for name, sizes in MIXTURES.items()}
    settings = (FAMILIES | mixtures | OTHERS | BESIDE)[family]
    config = AutoConfig.for_model(family, **(settings | changes), bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def number_tokenizer(template: str = "$A", **settings: object) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the numbers 3 to 63, which are their own ids.

    template: what it puts around a text, such as "<s> $A </s>". settings: of transformers, such as add_bos_token.
    """
    names = ["<unk>", "<s>", "</s>", *map(str, range(3, 64))]
    made = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, "<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    if template != "$A":
        made.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )


# For that tokenizer.
NUMBERS = " ".join(str(3 + (7 * i * i) % 61) for i in range(500))

# For models that are compressed by their name, and have none.
NO_TOKENIZER = type("Tokenizer", (), {"save_pretrained": lambda self, folder: None})()


def segments(samples: int = 4, seqlen: int = 16, seed: int = 0) -> torch.Tensor:
    """Random tokens (samples, seqlen)."""
    return torch.randint(3, 64, (samples, seqlen), generator=torch.Generator().manual_seed(seed))


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, whatever its files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def in_one_file(folder: Path) -> Path:
    """The same model folder with all tensors in model.safetensors."""
    tensors = tensors_of(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def gram_of(model: PreTrainedModel, name: str, tokens: torch.Tensor) -> Gram:
    """The Gram of one layer's inputs, from whole forward passes of the model as it is now."""
    rows = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda m, args: rows.append(args[0].reshape(-1, args[0].shape[-1])))
    logits(model, tokens)
    handle.remove()
    return Gram.from_activations(torch.cat(rows))


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
