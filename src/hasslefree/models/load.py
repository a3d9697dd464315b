"""Load a causal language model and its tokenizer from a hub name or a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hasslefree.errors import HasslefreeError, ModelError


def load_config(name: str) -> Any:
    """The configuration of a model, after a look that it is a decoder.

    Raises:
        ModelError: no such model, or one that is no causal language model.
    """
    if not Path(name).is_dir() and name.count("/") > 1:
        raise ModelError(f"the model folder {name} does not exist")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelError(f"no model at {name!r}, neither as a folder nor on the hub: {_first_line(error)}") from error
    if config.is_encoder_decoder or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{name} is a {config.model_type} model, which is not a decoder; "
            "hasslefree compresses causal language models"
        )
    return config


def load_model(name: str, dtype: str = "auto", device: str | None = None) -> PreTrainedModel:
    """The model in evaluation mode.

    Args:
        dtype: "auto" for the checkpoint's, or "float32", "bfloat16", "float16".
        device: such as "cpu" or "cuda"; None for the GPU if there is one.
    """
    target = resolve_device(device)
    load_config(name)
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except HasslefreeError:
        raise
    except (OSError, RuntimeError, ValueError, ImportError, SafetensorError) as error:
        raise ModelError(f"the model {name!r} could not be loaded: {_first_line(error)}") from error
    model, info = found
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"the checkpoint {name!r} lacks {len(missing)} tensors: {', '.join(missing[:6])}; get it anew")
    return model.to(target).eval()


def load_tokenizer(name: str) -> Any:
    """The tokenizer that belongs to a model."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"no tokenizer at {name!r}: {_first_line(error)}") from error


def resolve_device(device: str | None) -> torch.device:
    """The device of this name; None means the first GPU if there is one."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ModelError(f"unknown device {device!r}; such as cpu, cuda or cuda:1") from None
    try:
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_first_line(error)}; use --device cpu") from None
    return chosen


def resolve_seqlen(model: nn.Module, asked: int | None) -> int:
    """The segment length: what was asked for, or 2048, or what the model takes if that is less.

    Raises:
        ModelError: more was asked for than the model has positions.
    """
    config: Any = model.config
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and asked is not None and asked > most:
        raise ModelError(f"the model takes at most {most} tokens at once, asked for {asked}; use --seqlen {most}")
    return min(2048, most or 2048) if asked is None else asked


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text of any length, special tokens as the tokenizer adds them by default."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
