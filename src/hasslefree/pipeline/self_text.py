"""Calibration text that the dense model writes itself, so that none has to be found or downloaded.

Tokens are drawn from the model's own predictions, at temperature 1 and with none ruled out (arXiv
2410.17711). A text begins with the token that begins texts; that of a chat model with what its
template puts before a question, so that the model writes both the question and the answer (arXiv
2406.08464).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hasslefree.core.products import fast_products
from hasslefree.errors import CalibrationError, MemoryShortError, option
from hasslefree.models.calls import replaced
from hasslefree.models.load import check_ids, load_model
from hasslefree.models.tokenizer import encode, surrounding_tokens, written
from hasslefree.models.unloaded import is_on_disk
from hasslefree.planning.machine import free_memory
from hasslefree.units import size

# Segments that are written at a time.
BATCH = 32
# The smallest share of tokens that differ from the most frequent one.
VARIED = 0.25


def whole_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model with all of its weights in memory.

    It is the model itself, or, if its weights are on the disk, another copy loaded by its name.
    """
    if not is_on_disk(model):
        return model
    check_memory(model, device)
    own_code = type(model).__module__.startswith("transformers_modules")
    return load_model(
        model.config._name_or_path, str(model.dtype).removeprefix("torch."), str(device), own_code
    )


def check_writer(model: PreTrainedModel, tokenizer: Any, device: torch.device) -> None:
    """Raise an error if a model cannot write its own text: see `beginning` and `check_memory`."""
    check_ids(model, torch.tensor(beginning(tokenizer)), tokenizer)
    if is_on_disk(model):
        check_memory(model, device)


def check_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Raise a MemoryShortError if another copy of a model does not fit in memory."""
    need = sum(parameter.nbytes for parameter in model.parameters())
    free = free_memory(device)
    if need > free:
        raise MemoryShortError(
            "to write its own calibration text, the model must be in memory as a whole:"
            f" {size(need)} of {size(free)} available on {device}; give a text"
            f" ({option('calibration', 'FILE')})"
        )


def written_segments(
    model: PreTrainedModel,
    tokenizer: Any,
    count: int,
    seqlen: int,
    seed: int,
    advance: Callable[[int], None] = lambda written: None,
) -> Tensor:
    """Let a model in memory write segments.

    Args:
        advance: called after each batch, with the number of its segments.

    Returns:
        Token ids (count, seqlen), int64.

    Raises:
        CalibrationError: the tokenizer has no token to begin with, or the model repeats one token.
    """
    start = beginning(tokenizer)[: seqlen - 1]
    segments: list[Tensor] = []
    embeddings: Any = model.get_input_embeddings()
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=seqlen - len(start),
        # no token: after the end of a text, another one begins
        eos_token_id=embeddings.num_embeddings,
        pad_token_id=start[0],
    )
    # What `settings` leaves open would come from the model's own generation_config.json: penalties,
    # suppressed tokens, beams. These are plain samples.
    plain = replaced(model, "generation_config", GenerationConfig())
    with plain, torch.random.fork_rng(), torch.no_grad(), fast_products(model):
        torch.manual_seed(seed)
        for first in range(0, count, BATCH):
            prompts = torch.tensor([start] * min(BATCH, count - first), device=model.device)
            generate: Any = model.generate
            text = generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
            )
            segments.append(text.cpu())
            check_variety(text[:, len(start) :], tokenizer)
            advance(len(text))
    return torch.cat(segments)


def beginning(tokenizer: Any) -> list[int]:
    """The token ids that a text begins with, first those that the tokenizer puts there."""
    first, _ = surrounding_tokens(tokenizer)
    if tokenizer.chat_template is not None:
        mark = "QUESTION"
        text = written(tokenizer, [{"role": "user", "content": mark}]).partition(mark)[0]
        ids: list[int] = encode(tokenizer, text, special_tokens=False).tolist()
        if ids[: len(first)] != first:  # not every template writes them
            ids = first + ids
        if ids:
            return ids
    if first:
        return first
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise CalibrationError(
        "the tokenizer has no token that begins or ends a text, so the model cannot write its own"
        f" calibration text; give one ({option('calibration', 'FILE')})"
    )


def check_variety(tokens: Tensor, tokenizer: Any) -> None:
    """Check that a text is not one token again and again.

    Raises:
        CalibrationError: nearly all tokens of the text are one.
    """
    most = tokens.flatten().mode().values
    share = float((tokens == most).float().mean())
    if share > 1 - VARIED:
        raise CalibrationError(
            f"the model writes little but {tokenizer.decode([int(most)])!r} ({share:.0%} of its"
            " tokens), which says nothing about its layers; give a text"
            f" ({option('calibration', 'FILE')})"
        )
