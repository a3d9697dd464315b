"""Open a model, by name or as it was loaded, and read calibration segments."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.distributed import World
from hasslefree.errors import CalibrationError, ModelError, option
from hasslefree.models.experts import split_experts
from hasslefree.models.load import load_config, load_on_disk, refuse_compressed, resolve_seqlen
from hasslefree.models.tokenizer import (
    begin_with,
    encode,
    load_tokenizer,
    surrounding_tokens,
)
from hasslefree.models.walk import Walk
from hasslefree.pipeline.self_text import whole_model, written_segments
from hasslefree.progress import HELD_OUT_TEXT, REFERENCE_TEXT, TEXT, Phases
from hasslefree.recipe.fields import Fields
from hasslefree.texts.segments import disjoint_segments, draw_segments
from hasslefree.texts.sources import SELF, calibration_documents


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
    refuse_compressed(model.config, name)
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ModelError(
            f"the loaded model is {model.dtype}, but the recipe says {dtype}; cast the model first "
            f"(model.to(torch.{dtype})), or leave out {option('dtype')}"
        )
    split_experts(model)
    return name, model.eval(), tokenizer


def draw(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Fields,
    phases: Phases | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Draw the calibration segments.

    Args:
        recipe: names the text, and says how segments begin.
        phases: in which the segments are counted.
        device: where the model writes its own text, if its weights are on the disk.

    Returns:
        Token ids (samples, seqlen), int64.
    """
    seqlen = resolve_seqlen(model, recipe.seqlen)
    with (phases or Phases()).phase(TEXT, recipe.samples, "segments") as phase:
        if recipe.calibration == SELF:
            whole = whole_model(model, device or model.device)
            return written_segments(
                whole, tokenizer, recipe.samples, seqlen, recipe.seed, phase.advance
            )

        def encoded(document: str) -> Tensor:
            tokens = encode(tokenizer, document)
            if len(tokens) >= seqlen:
                phase.advance()
            return tokens

        documents = calibration_documents(recipe.calibration, seqlen)
        segments = draw_segments(documents, encoded, recipe.samples, seqlen, recipe.seed)
        return begin_with(segments, first_tokens(tokenizer, recipe))


def first_tokens(tokenizer: Any, recipe: Fields) -> list[int]:
    """The token ids that every segment of a text begins with, often none."""
    if not recipe.first_token:
        return []
    first, _ = surrounding_tokens(tokenizer)
    return first


def more_text(
    walk: Walk,
    recipe: Fields,
    tokenizer: Any,
    count: int,
    seqlen: int,
    used: Tensor | None = None,
) -> Tensor:
    """Read more of a text than its calibration segments.

    Args:
        used: all segments so far, (samples, seqlen), if the text is to be held out; None for the
            text to train on.

    Returns:
        Token ids (`count` or fewer, seqlen), int64.
    """
    name = REFERENCE_TEXT if used is None else HELD_OUT_TEXT
    with walk.phases.phase(name, count, "segments") as phase:
        if recipe.calibration == SELF:
            model = whole_model(walk.model, walk.weights.device)
            seed = recipe.seed + (1 if used is None else 2)
            return written_segments(model, tokenizer, count, seqlen, seed % 2**63, phase.advance)
        documents = calibration_documents(recipe.calibration, seqlen)
        encoded = partial(encode, tokenizer)
        segments = disjoint_segments(documents, encoded, count, seqlen, recipe.seed, used)
        return begin_with(segments, first_tokens(tokenizer, recipe))


def check_segments(model: PreTrainedModel, segments: Tensor, world: World) -> None:
    """Check calibration segments.

    Raises:
        CalibrationError: they are not (samples, seqlen) tokens of the model, at least one segment
            per process.
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
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.num_embeddings
    if segments.min() < 0 or segments.max() >= vocabulary:
        raise CalibrationError(
            "the calibration segments contain token ids outside the model's vocabulary (0 to"
            f" {vocabulary - 1}); use the tokenizer of this model"
        )
