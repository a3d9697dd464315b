"""Whole compressions on a GPU, and what they leave; the CPU is the oracle."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import MemoryShortError
from hasslefree.packed.layouts import layout_of
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers, use_backend
from hasslefree.pipeline import preflight
from hasslefree.planning.memory import LIBRARY_BYTES, estimate, total
from tests.tiny_models import NO_TOKENIZER, build, logits, segments

# What a compression does beyond the solvers, which `test_solvers` runs one by one.
RECIPES = {
    "best": Recipe(rank=2, effort="best", rounds=5, match_predictions=64),
    "joint-grid": Recipe(
        rank=2,
        method="joint-grid",
        rounds=5,
        group_size=16,
        leave_dense=("*.self_attn.*", "*.gate_proj", "*.down_proj"),
    ),
    "8 bits": Recipe(rank=2, method="eora", rounds=2, factor_bits=8),
}


def compressed(tmp_path, recipe, device):
    """The record of a compression, by the name of a model in bfloat16, and the folder."""
    build("llama", torch.bfloat16, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    out = tmp_path / device
    return hasslefree.compress(
        tmp_path / "model", out, recipe, segments=segments(), tokenizer=NO_TOKENIZER, device=device
    ), out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "8 bits" else name for name in RECIPES]
)
def test_a_compression_comes_out_as_on_the_cpu(name, gpu, tmp_path, monkeypatch):
    """And it takes no more of the GPU than was estimated."""
    setups = []
    monkeypatch.setattr(preflight, "check_memory", lambda setup: setups.append(setup) or True)
    here, _ = compressed(tmp_path, RECIPES[name], "cpu")
    there, out = compressed(tmp_path, RECIPES[name], "cuda")
    assert there.device == "cuda"
    assert there.mean_relative_error == pytest.approx(here.mean_relative_error, rel=0.1)
    if gpu:
        assert gpu.peak <= total(estimate(setups[-1]).device) - LIBRARY_BYTES
    tokens = segments()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    plain = logits(loaded, tokens)
    torch.testing.assert_close(logits(loaded.to("cuda"), tokens.to("cuda")).cpu(), plain, rtol=0.05, atol=0.05)


def test_a_model_that_is_on_the_gpu_stays_there(gpu, tmp_path):
    model, tokens = build("llama", num_hidden_layers=1).cuda(), segments().cuda()
    report = hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora", rounds=2), segments=tokens)
    assert report.device == "cuda"
    assert model.device.type == "cuda"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").cuda()
    torch.testing.assert_close(logits(loaded, tokens).cpu(), logits(model, tokens).cpu(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A folder that was compressed on the CPU."""
    folder = tmp_path_factory.mktemp("pruned")
    build("llama").save_pretrained(folder / "model")
    hasslefree.compress(folder / "model", folder / "out", Recipe(rank=0, method="sparsegpt"), segments=segments(),
                        tokenizer=NO_TOKENIZER, device="cpu")  # fmt: skip
    return folder / "out"


@pytest.mark.parametrize("backend", [None, "dense", "unpacked"])
def test_every_backend_gives_the_same_logits(backend, pruned, gpu):
    """Oracle: the CPU."""
    loaded, tokens = AutoModelForCausalLM.from_pretrained(pruned), segments(1, 8)
    plain = logits(loaded, tokens)
    loaded = loaded.to("cuda")
    use_backend(loaded, backend)
    torch.testing.assert_close(logits(loaded, tokens.cuda()).cpu(), plain, rtol=1e-3, atol=1e-3)


def test_a_loaded_model_keeps_no_second_copy_of_s_unless_asked(pruned, gpu, monkeypatch):
    """Oracle: the bytes of living tensors on the GPU; and the dense product of what the layer holds now."""
    loaded = AutoModelForCausalLM.from_pretrained(pruned).to("cuda")
    layer = next(iter(compressed_layers(loaded).values()))
    dense_bytes = 4 * layer.in_features * layer.out_features
    x = torch.randn(40, layer.in_features).cuda()
    with torch.no_grad():
        before = living_bytes(gpu)
        y = layer(x)
        assert living_bytes(gpu) - before == y.nbytes
        layer.values.mul_(2)
        torch.testing.assert_close(layer(x), x @ layer.unpacked().T)
        before = living_bytes(gpu)
        layer.use("unpacked")
        assert living_bytes(gpu) - before == dense_bytes
        torch.testing.assert_close(layer(x), x @ layer.unpacked().T)
        layer.use(None)
        assert living_bytes(gpu) == before
        monkeypatch.setattr(SparseLowRankLinear, "unpacked", out_of_memory)
        with pytest.raises(MemoryShortError, match=r'use_backend\(model, "dense"\)'):
            layer.use("unpacked")


def living_bytes(gpu):
    return gpu.bytes if gpu else torch.cuda.memory_allocated()


def out_of_memory(layer):
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("pattern", ["2:4", "2:8", "3:8", "2:5", "row", "structured"])
def test_packing_gives_the_same_bytes_and_the_same_matrix(pattern, gpu):
    n, _, m = pattern.partition(":")
    sparse = torch.zeros(33, 120, dtype=torch.bfloat16)
    sparse.view(33, -1, int(m or 3))[..., : int(n) if m else 1] = -1.5
    layout = layout_of(pattern)
    here, there = layout.pack(sparse), layout.pack(sparse.cuda())
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
    assert torch.equal(layout.unpack(*there, 120).cpu(), sparse)
    layout.validate(there[1], 120, there[0].numel())
