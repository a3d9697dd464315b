"""Open a model, by name or as it was loaded, and check calibration segments."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.distributed import World
from hasslefree.errors import CalibrationError, ModelError, option
from hasslefree.models.experts import split_experts
from hasslefree.models.load import (
    check_ids,
    load_config,
    load_on_disk,
    refuse_adapters,
    refuse_compressed,
    resolve_seqlen,
)
from hasslefree.models.tokenizer import load_tokenizer


def open_model(
    model: str | Path | PreTrainedModel,
    dtype: str,
    scratch: Path,
    tokenizer: Any,
    trust_remote_code: bool,
) -> tuple[str, PreTrainedModel, Any]:
    """Open a model by name, with its weights on the disk, or take a loaded model as it is.

    Args:
        scratch: an empty folder, for weights that have to be converted.

    Returns:
        The name, the model and the tokenizer.
    """
    if isinstance(model, str | Path):
        name = str(model)
        refuse_compressed(load_config(name, trust_remote_code), name)
        tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
        loaded = load_on_disk(name, dtype, scratch, trust_remote_code)
        split_experts(loaded)
        return name, loaded, tokenizer
    name = model.config._name_or_path or type(model).__name__
    refuse_compressed(model.config, name, loaded=True)
    refuse_adapters(model)
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ModelError(
            f"the loaded model is {model.dtype}, but the recipe says {dtype}; cast the model first "
            f"(model.to(torch.{dtype})), or leave out {option('dtype')}"
        )
    split_experts(model)
    return name, model.eval(), tokenizer


def check_segments(model: PreTrainedModel, segments: Tensor, world: World) -> None:
    """Check calibration segments.

    Raises:
        CalibrationError: they are not (samples, seqlen) tokens, at least one segment per process.
        ModelError: they are not tokens of the model.
    """
    has_shape = segments.ndim == 2 and len(segments) >= 1 and segments.shape[1] >= 2
    if not has_shape or segments.is_floating_point():
        raise CalibrationError(
            "segments must be a tensor of integer token ids of shape (samples, seqlen), seqlen at"
            f" least 2; got {segments.dtype} of shape {tuple(segments.shape)}"
        )
    if len(segments) < world.size:
        raise CalibrationError(
            f"{world.size} processes need at least {world.size} calibration segments, and there are"
            f" {len(segments)}; use fewer processes, or more {option('samples')}"
        )
    resolve_seqlen(model, segments.shape[1])
    check_ids(model, segments)
