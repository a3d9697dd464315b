"""Exported folders: other programs load them without hasslefree, and get the compressed model."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.errors import CheckpointError, ModelError, OutputError, UnknownNameError, WriteError
from hasslefree.exports import export as module
from hasslefree.exports.formats import adapter_config
from hasslefree.packed.linear import compressed_layers
from tests.tiny_models import FAMILIES, build, logits, segments

families = pytest.mark.parametrize("family", FAMILIES)


def with_biases(family, dtype=torch.float32, **changes):
    """A tiny model whose biases are not zero: an export that loses them is another model."""
    model = build(family, dtype, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def compress(model, folder, **recipe):
    hasslefree.compress(model, folder, Recipe(**({"rank": 2, "method": "eora"} | recipe)), segments=segments())
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """FAMILY/packed, FAMILY/dense, FAMILY/peft, and FAMILY/logits.pt with those of the compressed model."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        model = compress(with_biases(family), root / family / "packed")
        torch.save(logits(model, segments()), root / family / "logits.pt")
        for to in ("dense", "peft"):
            hasslefree.export(root / family / "packed", root / family / to, to)
    return root


FRESH = """
import sys, warnings, torch
from pathlib import Path
from peft import PeftModel
from transformers import AutoModelForCausalLM
warnings.filterwarnings("error", module="peft")
load = AutoModelForCausalLM.from_pretrained
tokens = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(0))
for folder in map(Path, sys.argv[1:]):
    want = torch.load(folder / "logits.pt")
    for way, made in {
        "dense": lambda: load(folder / "dense"),
        "peft": lambda: PeftModel.from_pretrained(load(folder / "peft" / "base"), folder / "peft"),
        "peft by transformers": lambda: load(folder / "peft"),
    }.items():
        with torch.no_grad():
            got = made()(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m: f"{folder}, {way}: {m}")
assert "hasslefree" not in sys.modules
"""


def test_a_process_without_hasslefree_gets_the_logits_of_the_compressed_model(folders):
    arguments = [str(folders / family) for family in FAMILIES]
    done = subprocess.run([sys.executable, "-c", FRESH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@families
@pytest.mark.parametrize("to", ["dense", "peft/base"])
def test_a_plain_checkpoint_differs_from_the_original_in_nothing_but_values(folders, tmp_path, family, to):
    """Oracle: what transformers writes for the model before its compression: config, names, shapes, what is tied."""
    with_biases(family).save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        exported, original = (json.loads((folder / file).read_text()) for folder in (folders / family / to, tmp_path))
        assert {name: exported[name] for name in original} == original
        assert exported.keys() - original.keys() <= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    found, expected = (load_file(f / "model.safetensors") for f in (folders / family / to, tmp_path))
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    layers = compressed_layers(AutoModelForCausalLM.from_pretrained(folders / family / "packed"))
    for name in found:
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_sum_is_rounded_once(dtype, compressed_once, tmp_path):
    """Oracle: S + u v in float64. One rounding is wrong by at most half a unit in the last place."""
    packed = compressed_once(Recipe(rank=2, method="eora"), "llama", dtype)
    layers = compressed_layers(AutoModelForCausalLM.from_pretrained(packed))
    hasslefree.export(packed, tmp_path / "dense", "dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    for name, layer in layers.items():
        exact = layer.unpacked().double() + layer.low_rank_u.double() @ layer.low_rank_v.double()
        assert found[f"{name}.weight"].dtype == dtype
        error = (found[f"{name}.weight"].double() - exact).abs()
        # Beside that half, the three roundings of the sum itself, in float32 at least; and float16 has subnormals.
        own, wide = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
        rounding = own.eps / 2 * exact.abs().clamp(min=own.tiny) + 4 * wide.eps * exact.abs().max()
        assert (error <= rounding).all(), name


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_tied_weights_stay_tied(family, tied, tmp_path):
    compress(build(family, tie_word_embeddings=tied), tmp_path / "packed")
    hasslefree.export(tmp_path / "packed", tmp_path / "dense", "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "dense" / "model.safetensors")) == (not tied)


def test_shards(compressed_once, tmp_path):
    packed = compressed_once(Recipe(rank=2, method="eora"))
    model = AutoModelForCausalLM.from_pretrained(packed)
    hasslefree.export(packed, tmp_path / "dense", "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(again, segments()), logits(model, segments()), rtol=1e-5, atol=1e-6)


# Shares at which the layers of this Llama get different ranks: at 0.68 k and v get none at all.
@pytest.mark.parametrize(("ratio", "ranks"), [(0.6, {1, 2}), (0.68, {0, 1})])
def test_every_layer_of_the_adapter_has_its_own_rank_and_scaling_1(ratio, ranks, tmp_path):
    """Oracle: PEFT's own layers, against those of the compressed model."""
    model = compress(build("llama"), tmp_path / "packed", rank=None, pattern="2:8", ratio=ratio)
    layers = compressed_layers(model)
    assert {layer.spec.rank for layer in layers.values()} == ranks
    hasslefree.export(tmp_path / "packed", tmp_path / "peft", "peft")
    adapted = with_adapter(tmp_path / "peft")
    found = {n: m for n, m in adapted.get_base_model().named_modules() if hasattr(m, "lora_A")}
    assert {n: m.r["default"] for n, m in found.items()} == {n: m.spec.rank for n, m in layers.items() if m.spec.rank}
    assert {m.scaling["default"] for m in found.values()} == {1.0}
    for name, adapter in found.items():
        assert torch.equal(adapter.lora_A["default"].weight, layers[name].low_rank_v)
        assert torch.equal(adapter.lora_B["default"].weight, layers[name].low_rank_u)
    torch.testing.assert_close(logits(adapted, segments()), logits(model, segments()), rtol=1e-5, atol=1e-6)


def with_adapter(folder, **kwargs):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder, **kwargs)


# Names that are ends, or regular expressions, of one another.
NAMES = st.text("ab.+*", min_size=1, max_size=4)


@given(st.dictionaries(NAMES, st.integers(1, 3), min_size=1, max_size=6))
def test_a_name_in_the_adapter_s_config_stands_for_itself_alone(ranks):
    """Oracle: PEFT's own look-up."""
    config = adapter_config(ranks, "base", False)
    for name, rank in ranks.items():
        for pattern, otherwise in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            assert config[pattern].get(get_pattern_key(config[pattern], name), config[otherwise]) == rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", ["dense", "peft"])
def test_half_precision(dtype, to, compressed_once, tmp_path):
    """Both exports round otherwise than the compressed model: by a few units in the last place of the largest logit."""
    packed = compressed_once(Recipe(rank=2, method="eora"), "llama", dtype)
    model = AutoModelForCausalLM.from_pretrained(packed)
    hasslefree.export(packed, tmp_path / to, to)
    other = with_adapter(tmp_path / to) if to == "peft" else AutoModelForCausalLM.from_pretrained(tmp_path / to)
    expected = logits(model, segments())
    close = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(logits(other, segments()), expected, rtol=0, atol=close)


@pytest.mark.parametrize("pattern", ["dense", "2:4"])
@pytest.mark.parametrize(("family", "bits"), [("llama", None), ("llama", 8), ("gpt2", None)])
def test_a_model_on_a_grid_is_exported_as_any_other(pattern, family, bits, tmp_path):
    """Oracle: the compressed model."""
    grid = {"method": "caldera", "rounds": 2, "group_size": 16, "pattern": pattern, "factor_bits": bits}
    model = compress(with_biases(family), tmp_path / "packed", **grid)
    expected = logits(model, segments())
    for to in ("dense", "peft"):
        hasslefree.export(tmp_path / "packed", tmp_path / to, to)
        other = with_adapter(tmp_path / to) if to == "peft" else AutoModelForCausalLM.from_pretrained(tmp_path / to)
        torch.testing.assert_close(logits(other, segments()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_a_folder_that_was_moved_and_merged_is_the_dense_export(folders, family, tmp_path):
    """Oracle: the dense export. The two-step load asks nothing of the path in adapter_config.json, nor of DEST."""
    shutil.copytree(folders / family / "peft", tmp_path / "moved")
    assert not (tmp_path / "moved" / "config.json").exists()
    (tmp_path / "moved" / "adapter_config.json").write_text(
        (tmp_path / "moved" / "adapter_config.json").read_text().replace(str(folders), "/gone")
    )
    merged = with_adapter(tmp_path / "moved").merge_and_unload().state_dict()
    dense = AutoModelForCausalLM.from_pretrained(folders / family / "dense").state_dict()
    assert merged.keys() == dense.keys()
    for name, weight in dense.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-7)


def test_an_adapter_moves_with_the_directory_in_which_its_folder_was_named(folders, tmp_path, monkeypatch):
    """Oracle: the logits of the compressed model; transformers resolves the path of the base."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hasslefree.export(folders / "llama" / "packed", "DEST", "peft")
    text = Path("DEST/adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == str(Path("DEST/base"))
    assert str(tmp_path) not in text
    monkeypatch.chdir((tmp_path / "here").rename(tmp_path / "there"))
    found = logits(AutoModelForCausalLM.from_pretrained("DEST"), segments())
    torch.testing.assert_close(found, torch.load(folders / "llama" / "logits.pt"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_the_adapter_is_trained_on_and_the_base_stays_sparse(folders, family):
    model = with_adapter(folders / family / "peft", is_trainable=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name, _ in trainable)
    optimizer = torch.optim.AdamW([p for _, p in trainable], lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=segments(), labels=segments()).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name
    for name, layer in compressed_layers(AutoModelForCausalLM.from_pretrained(folders / family / "packed")).items():
        weight = model.get_base_model().get_submodule(name).base_layer.weight
        assert (weight == 0).sum() == layer.in_features * layer.out_features // 2, name


def test_a_model_without_low_rank_parts_has_no_adapter(tmp_path):
    model = compress(build("llama"), tmp_path / "packed", rank=0, method="wanda")
    with pytest.raises(ModelError, match="nothing to write as an adapter; use to='dense'"):
        hasslefree.export(tmp_path / "packed", tmp_path / "out", "peft")
    assert {path.name for path in tmp_path.iterdir()} == {"packed"}
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(dense, segments()), logits(model, segments()), rtol=1e-5, atol=1e-6)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_does_not_fit_is_refused_before_anything_is_written(folders, tmp_path):
    packed = folders / "llama" / "packed"
    build("llama").save_pretrained(tmp_path / "plain")
    before = contents(packed)
    for source, target, to, error, message in [
        (
            packed,
            tmp_path / "out",
            "densely",
            UnknownNameError,
            "unknown export format 'densely'. Did you mean 'dense'",
        ),
        (tmp_path / "none", tmp_path / "out", "dense", ModelError, "none does not exist"),
        (tmp_path / "plain", tmp_path / "out", "dense", ModelError, "is not compressed by hasslefree"),
        (packed, packed, "dense", OutputError, "holds the model .* itself"),
        (packed, packed.parent, "dense", OutputError, "holds the model .* itself"),
    ]:
        with pytest.raises(error, match=message):
            hasslefree.export(source, target, to, overwrite=True)
    with pytest.raises(OutputError, match="use overwrite=True"):
        hasslefree.export(packed, tmp_path / "plain", "dense")
    with pytest.raises(OutputError, match="max_shard_size="):
        hasslefree.export(packed, tmp_path / "out", "dense", max_shard_size="big")
    assert contents(packed) == before
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


@pytest.mark.parametrize("to", ["dense", "peft"])
def test_the_destination_is_replaced_whole_or_not_at_all(folders, tmp_path, monkeypatch, to):
    out = tmp_path / "out"
    hasslefree.export(folders / "gpt2" / "packed", out, to)
    before = contents(out)

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_rest", full)
        with pytest.raises(WriteError, match="its previous content is unchanged"):
            hasslefree.export(folders / "llama" / "packed", out, to, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert contents(out) == before
    hasslefree.export(folders / "llama" / "packed", out, to, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert contents(out).keys() == contents(folders / "llama" / to).keys()
    assert contents(out) != before


def test_a_disk_that_is_too_small_is_seen_before_the_export(folders, tmp_path, monkeypatch):
    """Oracle for the size: the files that are written."""
    packed = folders / "gpt2" / "packed"
    model = AutoModelForCausalLM.from_pretrained(packed)
    tensors = {
        to: sum(t.nbytes for f in (folders / "gpt2" / to).rglob("*.safetensors") for t in load_file(f).values())
        for to in ("dense", "peft")
    }
    assert module.bytes_needed(model) == tensors["peft"] + 50_000_000 > tensors["dense"]
    usage = module.check_output.__globals__["shutil"].disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=40_000_000))
    with pytest.raises(OutputError, match="50 MB are needed"):
        hasslefree.export(packed, tmp_path / "out", "dense")


def test_every_file_and_folder_has_the_modes_of_the_umask(folders, tmp_path):
    before = os.umask(0o027)
    try:
        hasslefree.export(folders / "llama" / "packed", tmp_path / "out", "peft")
    finally:
        os.umask(before)
    paths = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in paths} == {(True, 0o750), (False, 0o640)}


def test_tokenizer_record_and_card_come_along(tmp_path):
    blocks = ("*.0.*", "*.1.*", "*.2.*")  # one of four, to save time
    recipe = Recipe(rank=2, method="eora", leave_dense=blocks, calibration=str(CALIBRATION), samples=2, seqlen=32)
    hasslefree.compress(MODEL, tmp_path / "packed", recipe, device="cpu")
    words = AutoTokenizer.from_pretrained(MODEL)("a sparse matrix and a low-rank one")["input_ids"]
    for to in ("dense", "peft"):
        out = tmp_path / to
        hasslefree.export(tmp_path / "packed", out, to)
        assert (out / "compression.json").read_bytes() == (tmp_path / "packed" / "compression.json").read_bytes()
        for folder in [out] if to == "dense" else [out, out / "base"]:
            assert AutoTokenizer.from_pretrained(folder)("a sparse matrix and a low-rank one")["input_ids"] == words
            card = (folder / "README.md").read_text()
            assert "import hasslefree" not in card
            assert ("The base alone lacks L." in card) == (folder.name == "peft")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dense").dtype == torch.bfloat16


def test_a_damaged_record_is_not_passed_on(tmp_path):
    compress(with_biases("llama"), tmp_path / "packed")
    (tmp_path / "packed" / "compression.json").write_text('{"\0": 1}')
    with pytest.raises(CheckpointError, match="compression.json cannot be read"):
        hasslefree.export(tmp_path / "packed", tmp_path / "dense", "dense")
    assert not (tmp_path / "dense").exists()
