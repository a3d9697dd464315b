"""Open a model, by name or as it was loaded, and check calibration segments."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.distributed import World, local_device
from hasslefree.errors import CalibrationError, ModelError, option
from hasslefree.models.experts import split_experts
from hasslefree.models.load import (
    check_ids,
    load_config,
    load_on_disk,
    quantization,
    refuse_adapters,
    refuse_compressed,
    resolve_device,
    resolve_seqlen,
    stored_dtype,
)
from hasslefree.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def target_of(model: str | Path | PreTrainedModel, device: str | None) -> torch.device:
    """Where to compute: a loaded model stays where it is, and each process of torchrun has a GPU.

    Args:
        device: None for the GPU if there is one.

    Raises:
        ModelError: a loaded model is on several devices, or the device has no float64.
    """
    if isinstance(model, PreTrainedModel):
        places = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
        if len(places) > 1 or model.device.type == "meta":
            raise ModelError(
                "the loaded model is offloaded, or spread over several devices; give its name or"
                " folder instead, which is read block by block, or move it to one device"
            )
        target = model.device
    else:
        target = resolve_device(device or local_device())
    try:
        torch.zeros(1, device=target, dtype=torch.float64)
    except (TypeError, RuntimeError) as error:
        raise ModelError(  # such as Apple's GPU
            f"the device {target} has no float64, which the solvers need; use"
            f" {option('device', 'cpu')}"
        ) from error
    return target


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
        if dtype == "auto":
            warn_of_dtype(loaded)
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


def warn_of_dtype(model: PreTrainedModel) -> None:
    """Warn if the config.json of a model asks for another dtype than its weights are stored in: the
    run rounds them, or takes and counts more bytes.
    """
    if quantization(model.config):
        return
    stored = stored_dtype(Path(str(model.name_or_path)))
    if stored != model.dtype:
        logger.warning(
            "the weights are stored in %s, but config.json says %s, in which the model is run,"
            " written and counted; the dtype %s takes them as they are stored",
            stored,
            model.dtype,
            str(stored).removeprefix("torch."),
        )


def token_ids(segments: Tensor) -> Tensor:
    """A copy of calibration segments that were given, in int64.

    Raises:
        CalibrationError: they are not integers of shape (samples, seqlen).
    """
    has_shape = segments.ndim == 2 and len(segments) >= 1 and segments.shape[1] >= 2
    is_integer = not (
        segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool
    )
    if not (has_shape and is_integer):
        raise CalibrationError(
            "segments must be a tensor of integer token ids of shape (samples, seqlen), seqlen at"
            f" least 2; got {segments.dtype} of shape {tuple(segments.shape)}"
        )
    # An inference tensor could not be saved for a gradient.
    return segments.to(torch.int64, copy=True)


def check_segments(model: PreTrainedModel, segments: Tensor, world: World) -> None:
    """Check that calibration segments (samples, seqlen) hold tokens of the model, and that there is
    one for each process; a CalibrationError otherwise.
    """
    if len(segments) < world.size:
        raise CalibrationError(
            f"{world.size} processes need at least {world.size} calibration segments, and there are"
            f" {len(segments)}; use fewer processes, or more {option('samples')}"
        )
    resolve_seqlen(model, segments.shape[1])
    try:
        check_ids(model, segments)
    except ModelError as error:
        raise CalibrationError(error.message) from None
