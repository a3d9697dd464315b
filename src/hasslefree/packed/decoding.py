"""Decode the entropy-coded layers of a model when it is loaded, several at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from transformers.utils import logging

from hasslefree.errors import CheckpointError, GridError
from hasslefree.packed.kernels.arrays import give_up_pages
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers

# Layers decoded at a time, at most: each takes 16 bytes per code of a chunk.
THREADS = 8


def decode_layers(model: nn.Module) -> None:
    """Decode the codes of all layers of a model, which saves the first call the time.

    Layers on the meta device are skipped: they are decoded at a call, once they are loaded.

    Raises:
        CheckpointError: the codes of a layer are damaged.
    """
    layers = dict(entropy_coded(model))
    if not layers:
        return
    # The first layer makes the tables of the coder, which all layers share.
    decode_layer(*layers.popitem())
    with ThreadPoolExecutor(min(torch.get_num_threads(), THREADS)) as pool:
        decoded = pool.map(decode_layer, layers, layers.values())
        bar = logging.tqdm(decoded, total=len(layers) + 1, initial=1, desc="Decoding weights")
        list(bar)  # raises the first error, in the order of the layers


def entropy_coded(model: nn.Module) -> Iterator[tuple[str, SparseLowRankLinear]]:
    """The layers with entropy-coded codes in memory, by name."""
    for name, layer in compressed_layers(model).items():
        grid = layer.spec.grid
        if grid is not None and grid.rate is not None and not layer.weight.is_meta:
            yield name, layer


def decode_layer(name: str, layer: SparseLowRankLinear) -> None:
    """Decode the codes of one layer, which keeps them. name: of the layer in the model."""
    tensors = layer.tensors()
    try:
        layer.codes(tensors)
    except GridError as error:
        raise CheckpointError(f"{name}: {error.message}") from None
    if layer.weight.is_cpu:
        give_up_pages(tensors["weight_packed"])
