"""Packed layers of random numbers: one for its products, and a whole model of them for its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hasslefree import Decomposition, LowRank, SemiStructured, SparseLowRankLinear
from hasslefree.folder.entries import entry_of
from hasslefree.folder.plugin import HasslefreeConfig
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.packed.kernels import Case, cuda, product
from hasslefree.packed.kernels.backends import BACKENDS
from hasslefree.packed.layouts import PackedGroups

RANK = 64
TWO_OF_FOUR = PackedGroups(2, 4)
# Two of four, as a code of two 2-bit positions: 0,1 · 0,2 · 0,3 · 1,2 · 1,3 · 2,3.
CODES = torch.tensor([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110], dtype=torch.uint8)


@dataclass(frozen=True)
class Layer:
    """A random layer, packed, and a dense one of the same shape."""

    values: Tensor
    positions: Tensor
    u: Tensor
    v: Tensor
    dense: Tensor
    converted: Tensor | None = None

    @classmethod
    def random(cls, out: int, width: int, dtype: torch.dtype, device: str, convert: bool) -> Layer:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype) / width**0.5

        codes = CODES.to(device)[torch.randint(len(CODES), (out, width // 4), device=device)]
        values, positions = normal(out, width // 2), codes[:, 0::2] | (codes[:, 1::2] << 4)
        converted = None
        if convert:
            pruned = normal(out, width).view(-1, 4)
            pruned[:, 2:] = 0
            converted = cuda.semi_structured(pruned.view(out, width))
        return cls(values, positions, normal(out, RANK), normal(RANK, width), normal(out, width), converted)

    def bytes(self, backend: str) -> int:
        """What a product reads of the layer."""
        tensors = [self.dense] if backend == "dense layer" else [self.values, self.positions, self.u, self.v]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def product(self, backend: str, x: Tensor) -> Tensor:
        if backend == "dense layer":
            return F.linear(x, self.dense)
        if backend == "semi-structured":
            assert self.converted is not None
            y = F.linear(x, self.converted)
        else:
            y = product(backend, x, self.values, self.positions, TWO_OF_FOUR)
        return y.addmm_(F.linear(x, self.v), self.u.T)


def possible(device: str, dtype: torch.dtype, tokens: int) -> list[str]:
    """The backends of the device that read S from a packed form."""
    case = Case(device, dtype, TWO_OF_FOUR, tokens, grad=False)
    return [
        backend
        for backend, obstacle in BACKENDS.items()
        if backend not in ("dense", "unpacked") and obstacle(case) is None
    ]


def random_layer(weight: Tensor) -> SparseLowRankLinear:
    """Magnitude's S of a weight, and factors of rank 64 that hold anything."""
    sparse = weight * SemiStructured(2, 4).mask(weight.square())
    factors = LowRank(weight[:, :RANK].clone(), weight[:RANK].clone())
    return SparseLowRankLinear.from_decomposition(Decomposition(sparse, factors, 0.0, 0.0, ()), None, "2:4")


# Sizes of Llamas by name, but for their blocks and vocabulary.
LLAMAS = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "Llama-3.2-1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64},
}


def write_models(folder: Path, blocks: int, like: str = "Llama-3-8B", vocabulary: int = 256) -> None:
    """The same random Llama twice: folder/dense and folder/packed."""
    sizes = LLAMAS[like] | {"vocab_size": vocabulary, "num_hidden_layers": blocks}
    config = LlamaConfig(**sizes, num_key_value_heads=8, tie_word_embeddings=True)  # type: ignore[arg-type]
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "dense")
    entries = {}
    decoder = find_blocks(model)
    for index, block in enumerate(decoder.modules):
        for name, site in find_sites(block).items():
            packed = random_layer(site.weight())
            site.replace(packed)
            entries[f"{decoder.prefix(index)}.{name}"] = entry_of(packed)
    model.config.quantization_config = HasslefreeConfig(entries)
    model.save_pretrained(folder / "packed")
