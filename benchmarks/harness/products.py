"""Packed layers of random numbers: one for its products, and a whole model of them for its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hasslefree import Decomposition, LowRank, SemiStructured, SparseLowRankLinear
from hasslefree.checkpoint.entries import Entry, checksum
from hasslefree.checkpoint.plugin import HasslefreeConfig
from hasslefree.core.grids import Grid, Quantised
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.packed.kernels.backends import BACKENDS, Case
from hasslefree.packed.layouts import PackedGroups
from hasslefree.packed.spec import LayerSpec

RANK, RANK_ON_GRID = 64, 16
TWO_OF_FOUR = PackedGroups(2, 4)
# Two of four, as a code of two 2-bit positions: 0,1 · 0,2 · 0,3 · 1,2 · 1,3 · 2,3.
CODES = torch.tensor([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110], dtype=torch.uint8)


@dataclass(frozen=True)
class Layer:
    """A random dense layer (out, in), and a compressed one of its shape for each backend, which share their tensors."""

    dense: Tensor
    packed: dict[str, SparseLowRankLinear]

    @classmethod
    def random(cls, out: int, width: int, dtype: torch.dtype, device: str, backends: list[str]) -> Layer:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype) / width**0.5

        codes = CODES.to(device)[torch.randint(len(CODES), (out, width // 4), device=device)]
        tensors = {
            "values": normal(out, width // 2),
            "positions": codes[:, 0::2] | (codes[:, 1::2] << 4),
            "low_rank_u": normal(out, RANK),
            "low_rank_v": normal(RANK, width),
        }
        packed = {}
        for backend in backends:
            spec = LayerSpec("2:4", (out, width), RANK, out * width // 2)
            packed[backend] = SparseLowRankLinear(spec, bias=False, dtype=dtype, device="meta")
            packed[backend].load_state_dict(tensors, assign=True)
            packed[backend].requires_grad_(False).use(backend)
        return cls(normal(out, width), packed)

    def bytes(self, backend: str) -> int:
        """What a product reads of the layer."""
        packed = next(iter(self.packed.values()))
        return self.dense.nbytes if backend == "dense layer" else packed.stored_bytes

    def product(self, backend: str, x: Tensor) -> Tensor:
        found: Tensor = F.linear(x, self.dense) if backend == "dense layer" else self.packed[backend](x)
        return found


def possible(device: str, dtype: torch.dtype) -> list[str]:
    """The backends of the device that read S from a packed form."""
    case = Case(device, dtype, TWO_OF_FOUR, grad=False)
    return [
        backend
        for backend, obstacle in BACKENDS.items()
        if backend not in ("dense", "unpacked") and obstacle(case) is None
    ]


def random_layer(weight: Tensor, grid: Grid | None = None) -> SparseLowRankLinear:
    """Magnitude's S of a weight with rank 64, or its nearest on a grid with rank 16; the factors hold anything."""
    rank = RANK if grid is None else RANK_ON_GRID
    factors = LowRank(weight[:, :rank].clone(), weight[:rank].clone())
    if grid is None:
        sparse = weight * SemiStructured(2, 4).mask(weight.square())
        return SparseLowRankLinear.from_decomposition(Decomposition(sparse, factors, 0.0, 0.0, ()), None, "2:4")
    scaling = grid.scaling(weight.float())
    codes = Quantised.of(scaling.nearest(weight.float()), scaling, weight.dtype)
    result = Decomposition(codes.values(), factors, 0.0, 0.0, (), quantised=codes)
    return SparseLowRankLinear.from_decomposition(result, None, "dense")


# Sizes of Llamas by name, but for their blocks and vocabulary.
LLAMAS = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "Llama-3.2-1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64},
}


def write_models(
    folder: Path, blocks: int, like: str = "Llama-3-8B", vocabulary: int = 256, bits: int | None = None
) -> None:
    """The same random Llama twice: folder/dense and folder/packed, with 2:4 + rank 64, or with all matrices on the
    grid of transformers with these bits.
    """
    sizes = LLAMAS[like] | {"vocab_size": vocabulary, "num_hidden_layers": blocks}
    config = LlamaConfig(**sizes, num_key_value_heads=8, tie_word_embeddings=True)  # type: ignore[arg-type]
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "dense")
    if bits is not None:
        write_on_grid(folder / "packed", model, Grid(bits, 32, offset=True, scale_bits=5))
        return
    entries = {}
    decoder = find_blocks(model)
    for index, block in enumerate(decoder.modules):
        for name, site in find_sites(block).items():
            packed = random_layer(site.weight())
            site.replace(packed)
            entries[f"{decoder.prefix(index)}.{name}"] = Entry.of(packed).to_dict()
    model.config.quantization_config = HasslefreeConfig(entries)
    model.save_pretrained(folder / "packed")


def write_on_grid(folder: Path, model: LlamaForCausalLM, grid: Grid) -> None:
    """A folder with random numbers in the place of all matrices, the tied embedding among them, on a grid."""
    tensors, entries = {}, {}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        if weight.ndim == 1:
            tensors[name] = weight
        elif name != "lm_head.weight":
            spec = LayerSpec("dense", tuple(weight.shape), 0, weight.numel(), grid)
            drawn = random_tensors(spec)
            tensors |= {f"{module}.{part}": tensor for part, tensor in drawn.items()}
            entries[module] = Entry(spec, checksum([drawn[spec.layout.index]])).to_dict()
    model.config.quantization_config = HasslefreeConfig(entries)
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def random_tensors(spec: LayerSpec) -> dict[str, Tensor]:
    """The tensors of S with any codes, in bfloat16."""
    tensors = {}
    for part, (shape, stored) in spec.sparse_tensors().items():
        if stored is None:
            tensors[part] = torch.rand(shape).bfloat16() / 64
        else:
            tensors[part] = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32).to(stored)
    return tensors
