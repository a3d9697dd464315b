"""The driver: the order of the work, against a slow reference that runs the whole model for every layer."""

import dataclasses
import filecmp
import json
from pathlib import Path
from unittest.mock import Mock

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe, SparseLowRankLinear
from hasslefree.errors import BudgetError, CalibrationError, MemoryShortError, ModelError, OutputError, RecipeError
from hasslefree.models import precision
from hasslefree.pipeline import compress as module
from hasslefree.pipeline.preflight import token_ids
from hasslefree.pipeline.text import read_texts
from hasslefree.recipe.resolve import with_defaults
from hasslefree.texts.segments import draw_segments
from hasslefree.texts.sources import calibration_documents
from tests import oracles
from tests.listeners import by_layer
from tests.tiny_models import NUMBERS, build, gram_of, logits, segments, tensors_of

ORDER = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
         ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]  # fmt: skip


def reference(model, tokens, sequential):
    """Algorithm: for every layer in order of data flow, its Gram in the model compressed so far, then its S and L.

    "block" takes the Grams of a block before any of its layers is replaced.
    """
    errors = {}
    for block in range(2):
        names = [[f"model.layers.{block}.{name}" for name in group] for group in ORDER]
        grams = {name: gram_of(model, name, tokens) for group in names for name in group}
        for group in names:
            if sequential == "layer":
                grams |= {name: gram_of(model, name, tokens) for name in group}
            for name in group:
                weight = model.get_submodule(name).weight.detach()
                result = hasslefree.decompose(weight, grams[name], "2:4", 2, method="eora")
                model.set_submodule(name, SparseLowRankLinear.from_decomposition(result, None, "2:4"))
                errors[name] = result.relative_error
    return errors


@pytest.mark.parametrize("sequential", ["layer", "block"])
def test_each_layer_sees_what_the_compressed_ones_before_it_put_out(sequential, tmp_path):
    tokens = segments(6)
    slow, fast = build("llama"), build("llama")
    expected = reference(slow, tokens, sequential)
    recipe = Recipe(rank=2, method="eora", sequential=sequential)
    report = hasslefree.compress(fast, tmp_path / "out", recipe, segments=tokens)
    assert {layer.name: layer.relative_error for layer in report.layers} == pytest.approx(expected, rel=2e-3)
    torch.testing.assert_close(logits(fast, tokens), logits(slow, tokens), rtol=1e-3, atol=1e-5)


def test_the_two_orders_differ():
    """Or the test above could not tell them apart."""
    tokens = segments(6)
    layer, block = (reference(build("llama"), tokens, s)["model.layers.0.mlp.down_proj"] for s in ("layer", "block"))
    assert abs(layer - block) > 5e-3 * layer


def test_what_depends_on_the_gram_is_done_once_for_layers_with_the_same_input(tmp_path, monkeypatch):
    prepared = []
    original = hasslefree.AlternatingMinimization.prepare
    monkeypatch.setattr(
        hasslefree.AlternatingMinimization,
        "prepare",
        lambda self, gram: (prepared.append(gram), original(self, gram))[1],
    )
    hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    assert len(prepared) == 2 * len(ORDER)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    recipe = Recipe(rank=2, rounds=2)
    for name in ("one", "two"):
        hasslefree.compress(build("llama"), tmp_path / name, recipe, segments=segments())
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", files, shallow=False) == (files, [], [])
    hasslefree.compress(build("llama"), tmp_path / "three", dataclasses.replace(recipe, seed=1), segments=segments())
    weights = [name for name in files if name.endswith(".safetensors")]
    same, *_ = filecmp.cmpfiles(tmp_path / "one", tmp_path / "three", weights, shallow=False)
    assert same == ["model-00001-of-00003.safetensors"], "the embeddings alone are the same"


def test_the_folder_tells_what_was_done(tmp_path):
    seen = []
    recipe = Recipe(pattern="row", sparsity=0.5, rank=2, method="hassle-free", rounds=3)
    report = hasslefree.compress(
        build("llama"),
        tmp_path / "out",
        recipe,
        segments=segments(),
        progress=by_layer(lambda layer, done, total: seen.append((layer.name, done, total))),
    )
    assert [done for _, done, _ in seen] == list(range(1, 15))
    assert {total for *_, total in seen} == {14}
    stored = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert stored["recipe"] == vars(with_defaults(recipe)) | {"leave_dense": []}
    assert stored["versions"].keys() == {"hasslefree", "torch", "transformers"}
    assert stored["mean_relative_error"] == report.mean_relative_error
    first = stored["layers"][0]
    assert (first["name"], first["out"], first["width"], first["rank"]) == (
        "model.layers.0.self_attn.q_proj",
        32,
        32,
        2,
    )
    assert first["nonzeros"] == 32 * 16
    assert len(first["history"]) == 3
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{report.kept_parameters:,} of {report.dense_parameters:,}" in card
    assert "given from Python" in card


def test_an_output_folder_in_use_needs_overwrite_and_survives_a_failure(tmp_path, monkeypatch):
    out, recipe = tmp_path / "out", Recipe(method="wanda")
    hasslefree.compress(build("llama"), out, Recipe(method="sparsegpt"), segments=segments())
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OutputError, match=r"not empty; use overwrite=True"):
        hasslefree.compress(build("llama"), out, recipe, segments=segments())

    # An OSError of our own, and the plain exception that the tokenizers library raises.
    for full in (OSError(28, "No space left"), Exception("No space left on device (os error 28)")):
        with monkeypatch.context() as patch:
            patch.setattr("hasslefree.pipeline.metadata.restore_keys", Mock(side_effect=full))
            with pytest.raises(OutputError, match="No space left.*finished blocks are kept.*resume=True"):
                hasslefree.compress(build("llama"), out, recipe, segments=segments(), overwrite=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.unfinished"]
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before

    hasslefree.compress(build("llama"), out, recipe, segments=segments(), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert '"wanda"' in (out / "compression.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters()


def test_a_disk_that_is_too_small_is_seen_before_the_work(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match="0 MB free and 50 MB are needed"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(method="wanda"), segments=segments())


def test_output_is_a_file_or_not_writable(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        hasslefree.compress(build("llama"), tmp_path / "file", Recipe(method="wanda"), segments=segments())


def test_recipe_and_text_are_checked_before_the_model_is_loaded(tmp_path):
    with pytest.raises(RecipeError, match="does not exist"):
        hasslefree.compress("no/such/model", tmp_path / "out", Recipe(rank=2, calibration=str(tmp_path / "no.txt")))


def test_a_short_text_says_how_short(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("7 8 9 " * 10)
    model = build("llama")
    recipe = Recipe(rank=2, calibration=str(text), samples=4, seqlen=16)
    with pytest.raises(CalibrationError, match="4 samples × 16 = 64 tokens are needed, .* have 30 in total"):
        hasslefree.compress(
            model, tmp_path / "out", recipe, tokenizer=lambda t, **options: {"input_ids": [int(w) for w in t.split()]}
        )


def words(text, **options):
    """A tokenizer of numbers."""
    return {"input_ids": [int(word) for word in text.split()]}


def test_the_calibration_segments_are_those_that_the_recipe_asks_for(tmp_path):
    """Oracle: `draw_segments` itself with the recipe's figures."""
    text = tmp_path / "text.txt"
    text.write_text(NUMBERS)
    documents = calibration_documents(str(text))
    for seed in (0, 5):
        recipe = Recipe(method="wanda", calibration=str(text), samples=3, seqlen=20, seed=seed)
        expected = draw_segments(documents, lambda t: words(t)["input_ids"], 3, 20, seed)
        model = build("llama")
        assert torch.equal(read_texts(model, words, recipe, model.device).draw(), expected)


@pytest.mark.parametrize(
    "recipe",
    [Recipe(rank=16, method="eora"), Recipe(pattern="3:8", method="wanda"),
     Recipe(pattern="row", sparsity=0.5, method="wanda"), Recipe(pattern="structured", sparsity=0.5, method="wanda")],
    ids=lambda recipe: recipe.pattern,
)  # fmt: skip
def test_the_room_that_is_asked_for_is_that_of_the_weights(recipe, tmp_path, monkeypatch):
    """Oracle: the bytes of the safetensors file; 50 MB are for the rest."""
    asked = []
    monkeypatch.setattr(module, "check_output", lambda folder, overwrite, size=0, source=None: asked.append(size))
    hasslefree.compress(build("gpt2"), tmp_path / "out", recipe, segments=segments())
    written = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert asked == [0, written + 50_000_000]


def test_the_report_gives_the_error_after_the_cast_first(tmp_path, monkeypatch):
    """Oracle: the error of the layer as it stands in the model, from its own tensors.

    On every processor as on one whose products are float32, so that the inputs are the oracle's.
    """
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: False)
    dense, model, tokens = build("llama", torch.bfloat16), build("llama", torch.bfloat16), segments()
    name = "model.layers.0.self_attn.q_proj"
    gram = gram_of(build("llama", torch.bfloat16).float(), name, tokens)  # norms are computed in float32
    report = hasslefree.compress(model, tmp_path / "out", Recipe(rank=4, method="eora"), segments=tokens)
    layer = model.get_submodule(name)
    weight = dense.get_submodule(name).weight.detach().double()
    residual = weight - layer.unpacked().double() - layer.low_rank_u.double() @ layer.low_rank_v.double()
    residual = residual.detach()
    error = oracles.loss(residual, gram.matrix) / oracles.loss(weight, gram.matrix)
    first = report.layers[0]
    assert first.name == name
    assert first.relative_error == pytest.approx(error, rel=2e-5)
    assert first.relative_error_before_cast != pytest.approx(error, rel=2e-5)


def test_the_old_folder_comes_back_if_the_last_step_fails(tmp_path, monkeypatch):
    out = tmp_path / "out"
    hasslefree.compress(build("llama"), out, Recipe(method="magnitude"), segments=segments())
    before = (out / "compression.json").read_bytes()
    rename = Path.rename

    def fail(self, target):
        if self.name == "model":
            raise OSError(28, "No space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OutputError, match=r"The new folder is complete; once .*out is free: mv .*model .*out"):
        hasslefree.compress(build("llama"), out, Recipe(method="wanda"), segments=segments(), overwrite=True)
    assert (out / "compression.json").read_bytes() == before


def test_a_place_that_is_not_writable_is_seen_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr(module, "compress_blocks", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(OutputError, match="is not writable"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(method="wanda"), segments=segments())


def test_a_pruner_alone_refuses_the_rank_that_a_ratio_gives(tmp_path):
    recipe = Recipe(method="wanda", ratio=0.4)
    with pytest.raises(BudgetError, match=r"no low-rank part, so rank must be 0, got \d.*k_proj"):
        hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.arange(16), "segments must be a tensor of integer token ids"),
        (torch.zeros(2, 1, dtype=torch.int64), "seqlen at least 2"),
        (torch.zeros(2, 16), "segments must be a tensor of integer token ids"),
        (torch.zeros(2, 16, dtype=torch.bool), "segments must be a tensor of integer token ids"),
        (torch.zeros(2, 16, dtype=torch.complex64), "segments must be a tensor of integer token ids"),
        (torch.full((2, 16), 64, dtype=torch.uint8), r"vocabulary \(0 to 63\)"),
        (torch.full((2, 16), 64), r"vocabulary \(0 to 63\)"),
        (torch.full((2, 16), -1), r"vocabulary \(0 to 63\)"),
    ],
)
def test_segments_that_are_none(tokens, message, tmp_path):
    with pytest.raises(CalibrationError, match=message):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(method="wanda"), segments=tokens)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16])
def test_token_ids_of_every_integer_dtype_are_taken(dtype):
    assert torch.equal(token_ids(segments().to(dtype)), segments())


def test_a_loaded_model_that_is_offloaded_is_refused(tmp_path):
    model = accelerate.cpu_offload(build("llama"))
    with pytest.raises(ModelError, match="is offloaded, or spread over several devices; give its name or folder"):
        hasslefree.compress(model, tmp_path / "out", Recipe(method="wanda"), segments=segments())


def test_a_device_without_float64_is_refused(monkeypatch, tmp_path):
    """As Apple's GPUs are; torch says it in these words."""

    def zeros(*sizes, dtype=None, **options):
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return torch.empty(*sizes, dtype=dtype, **options).zero_()

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ModelError, match="the device cpu has no float64, which the solvers need"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(method="wanda"), segments=segments())


def test_a_loaded_model_keeps_its_dtype(tmp_path):
    with pytest.raises(ModelError, match="recipe says bfloat16; cast the model first"):
        hasslefree.compress(
            build("llama"), tmp_path / "out", Recipe(method="wanda", dtype="bfloat16"), segments=segments()
        )


def test_places_that_cannot_be_written_to_are_seen_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(module, "compress_blocks", lambda *_: pytest.fail("work was begun"))
    for out, message in [
        (tmp_path / "file" / "out", "not writable"),
        (".", "holds the current folder, or is a mount point"),
    ]:
        with pytest.raises(OutputError, match=message):
            hasslefree.compress(build("llama"), out, Recipe(method="wanda"), segments=segments())


def test_a_link_to_the_output_folder_stays_a_link(tmp_path):
    hasslefree.compress(build("llama"), tmp_path / "real", Recipe(method="sparsegpt"), segments=segments())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    hasslefree.compress(build("llama"), tmp_path / "link", Recipe(method="wanda"), segments=segments(), overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "real").num_parameters()


def test_the_model_card_says_what_stayed_dense_and_names_no_local_folder_as_a_hub_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build("llama").save_pretrained("sub/model")
    tokenizer = type("Tokenizer", (), {"save_pretrained": lambda self, folder: None})()
    recipe = Recipe(method="wanda", leave_dense=("*.0.*",))
    hasslefree.compress("sub/model", "out", recipe, segments=segments(), tokenizer=tokenizer, device="cpu")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in card
    assert "7 matrices were pruned (2:4), all of them in the blocks" in card
    assert r"Left unchanged: \*.0.\*." in card


def test_a_recipe_file_needs_no_text_beside_given_segments(tmp_path):
    """Oracle: the same fields as a `Recipe`."""
    fields = {"rank": 2, "effort": "fast", "calibration": str(tmp_path / "missing.txt")}
    (tmp_path / "r.yaml").write_text(json.dumps(fields))
    report = hasslefree.compress(build("llama"), tmp_path / "a", tmp_path / "r.yaml", segments=segments())
    expected = hasslefree.compress(build("llama"), tmp_path / "b", Recipe(**fields), segments=segments())
    assert report.mean_relative_error == expected.mean_relative_error


def test_a_picture_that_cannot_be_drawn_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    """The engine that draws it needs more address space than a batch system may allow."""

    def no_memory(definition):
        raise MemoryShortError("not enough memory to draw")

    monkeypatch.setattr("hasslefree.report.drawing._vega_svg", no_memory)
    hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    assert (tmp_path / "out" / "compression.json").exists()
    assert not (tmp_path / "out" / "relative_error.png").exists()
    assert "relative_error.png" not in (tmp_path / "out" / "README.md").read_text()
    assert "the model card has no picture" in caplog.text


@pytest.mark.parametrize("loaded_inside", [False, True])
def test_a_call_within_inference_mode_works_or_names_the_remedy(loaded_inside, tmp_path):
    """Oracle: the same call outside of it. A model that was loaded inside has weights without gradients."""
    recipe = Recipe(rank=2, rounds=2, allocate="error", match_predictions=32)
    hasslefree.compress(build("llama"), tmp_path / "outside", recipe, segments=segments())
    model = build("llama")
    with torch.inference_mode():
        if loaded_inside:
            with pytest.raises(ModelError, match=r"torch\.inference_mode\(\).* load it outside"):
                hasslefree.compress(build("llama"), tmp_path / "inside", recipe, segments=segments())
            return
        hasslefree.compress(model, tmp_path / "inside", recipe, segments=segments())
    expected, found = tensors_of(tmp_path / "outside"), tensors_of(tmp_path / "inside")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layer", ["layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"])
def test_a_loaded_model_that_was_compressed_in_part_is_refused(layer, tmp_path):
    def stop(step):
        if step.layer is not None and step.layer.name.endswith(layer):
            raise KeyboardInterrupt

    model = build("llama")
    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(model, tmp_path / "out", Recipe(method="wanda"), segments=segments(), progress=stop)
    with pytest.raises(ModelError, match="an earlier compression has replaced.* load the model again"):
        hasslefree.compress(model, tmp_path / "out", Recipe(method="wanda"), segments=segments(), overwrite=True)


def test_a_loaded_mixture_that_is_refused_stays_as_it_was(tmp_path):
    model = build("mixtral")
    before = list(model.state_dict())
    with pytest.raises(BudgetError):
        hasslefree.compress(model, tmp_path / "out", Recipe(size="1kB"), segments=segments())
    assert list(model.state_dict()) == before


def test_a_generation_config_that_transformers_finds_inconsistent_fails_no_run(tmp_path):
    """Oracle: the value itself. Published models have a temperature without sampling, which strict checks refuse."""
    model = build("llama")
    model.generation_config.temperature = 0.3
    hasslefree.compress(model, tmp_path / "out", Recipe(method="wanda"), segments=segments())
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.3


def test_a_card_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    def broken(*args):
        raise ValueError("no such licence")

    monkeypatch.setattr("hasslefree.pipeline.metadata.model_card", broken)
    hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    assert (tmp_path / "out" / "compression.json").exists()
    assert not (tmp_path / "out" / "README.md").exists()
    assert "no model card was written (ValueError: no such licence)" in caplog.text
