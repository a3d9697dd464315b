"""The size of a compressed model on the disk, before it is compressed."""

import torch
from transformers import PreTrainedModel

from hasslefree.models.blocks import Blocks
from hasslefree.models.unloaded import copied_bytes
from hasslefree.planning.plan import Plan
from hasslefree.recipe.resolve import Resolved

# Bytes of the other files in OUT: the tokenizer, the reports, the model card.
ROOM = 50_000_000


def bytes_to_write(model: torch.nn.Module, blocks: Blocks, plan: Plan, resolved: Resolved) -> int:
    """The largest size of the folder: trained blocks are written before the blocks they replace are
    removed.
    """
    taken = bytes_on_disk(model, plan)
    if resolved.match_predictions:
        for block, plans in zip(blocks.modules, plan.blocks, strict=True):
            taken += weights_on_disk(block, Plan([plans]))
    return taken


def bytes_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of the folder: all weights, and room for the other files."""
    return ROOM + weights_on_disk(model, plan)


def weights_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of all tensors of a model or a block in the files: dense, copied and packed ones.

    Stored buffers count: each block of MiniMax has one of heads × 256 × 256 numbers.
    """
    # Tied parameters are one object under two names.
    stored = {id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
    taken = sum(stored.values()) + plan.size - plan.dense_size
    if isinstance(model, PreTrainedModel):
        taken += copied_bytes(model)
    return taken
