"""docs/reference/format.md: its test vectors are the library's, and a reader that follows it reads what was written."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hasslefree import Grid, Recipe, SparseLowRankLinear
from hasslefree.checkpoint.entries import checksum
from hasslefree.packed.layouts import layout_of
from hasslefree.packed.spec import LayerSpec
from tests.checkpoint import numpy_reader
from tests.checkpoint.test_loading import RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"


def vectors():
    """The blocks of the page: word → the lines that begin with it."""
    for block in re.findall(r"```vectors\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        lines = [line.partition(" ") for line in block.strip().split("\n")]
        yield {word: [rest for other, _, rest in lines if other == word] for word, _, _ in lines}


@pytest.mark.parametrize("vector", list(vectors()), ids=lambda vector: vector["pattern"][0])
def test_the_vectors_of_the_page(vector):
    """Oracle: the page."""
    (pattern,), (crc,) = vector["pattern"], vector["crc32"]
    if "grid" in vector:
        return assert_vector_on_a_grid(vector, pattern, crc)
    layout = layout_of(pattern)
    sparse = torch.tensor([[float(word) for word in row.split()] for row in vector["S"]], dtype=torch.bfloat16)
    values, index = layout.pack(sparse)
    assert values.view(torch.uint8).flatten().tolist() == list(bytes.fromhex(vector["values"][0]))
    assert index.view(torch.uint8).flatten().tolist() == list(bytes.fromhex(vector[layout.index][0]))
    assert checksum([index]) == crc
    unpacked = layout.unpack(values, index, sparse.shape[1])
    assert torch.equal(unpacked.view(torch.int16), sparse.view(torch.int16))


def assert_vector_on_a_grid(vector, pattern, crc):
    bits, group, symmetric = vector["grid"][0].split()
    grid = Grid(int(bits), int(group), symmetric == "symmetric")
    spec = LayerSpec(pattern, (2, 16), 0, int(vector["nonzeros"][0]), grid)
    tensors = {
        name: torch.frombuffer(bytearray.fromhex(vector[name][0]), dtype=dtype or torch.bfloat16).view(shape)
        for name, (shape, dtype) in spec.tensors().items()
        if name in vector
    }
    index = tensors.setdefault(spec.layout.index, torch.zeros(2, 0, dtype=torch.uint8))
    sparse = torch.tensor([[float(word) for word in row.split()] for row in vector["S"]], dtype=torch.bfloat16)
    assert torch.equal(spec.unpack(tensors), sparse)
    assert checksum([index]) == crc


def test_the_page_has_a_vector_for_each_way_to_store():
    assert [vector["pattern"][0] for vector in vectors()] == ["2:4", "3:8", "row", "structured", "dense", "2:4"]


CASES = [
    *((recipe, torch.bfloat16) for recipe in RECIPES.values()),
    *((RECIPES[name], dtype) for name in ("2:4", "int8 rows") for dtype in (torch.float32, torch.float16)),
    (Recipe(pattern="1:1", method="wanda"), torch.bfloat16),
]


@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_a_reader_of_numpy_alone_reads_what_the_library_reads(recipe, dtype, compressed_once):
    """Oracle: the library, through transformers. Both, one and several files."""
    folder = compressed_once(recipe, "gpt2", dtype)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLowRankLinear)}
    found = dict(numpy_reader.read(folder))
    assert found.keys() == layers.keys()
    for name, layer in layers.items():
        # On a grid the layer rounds the product to its dtype, and the reader does not.
        expected = layer.unpacked().detach()
        assert torch.equal(torch.from_numpy(found[name]).to(dtype if layer.spec.grid else torch.float64).double(),
                           expected.double()), name  # fmt: skip
    for name, pair in numpy_reader.factors(folder):
        for read, own in zip(pair, layers[name].factors() or (), strict=True):
            assert torch.equal(torch.from_numpy(read).to(dtype), own), name
