"""A model whose codes are entropy-coded: its files, what is chosen within a size, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.allocate.ends import NEAR
from hasslefree.allocate.options import interpolated, measured_grids
from hasslefree.core.entropy import words_for_rate
from hasslefree.core.grids import BITS, RATES, Grid
from hasslefree.errors import HasslefreeError, ModelError, RecipeError
from tests.tiny_models import build, logits, segments, tensors_of

SIZED = {"size": "6bits", "coding": "entropy", "check": False}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_a_size_is_kept_and_the_folder_predicts_what_the_model_in_memory_does(effort, tied, tmp_path):
    """Oracles: the bytes of the tensors in the file, and the export whose weights are unpacked."""
    model = build("llama", tie_word_embeddings=tied)
    recipe = Recipe(**SIZED, effort=effort, match_predictions=None if effort == "fast" else 256)
    record = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    tensors = tensors_of(tmp_path / "out")
    rates = [layer.spec.grid.rate for layer in record.layers]
    assert max(rates) - min(rates) > 1
    specs = [layer.spec for layer in record.layers]
    room = 6 * sum(spec.dense_parameters for spec in specs) / 8

    def uniform_size(rate):
        return sum(4 * (words_for_rate(spec.dense_parameters, rate) + sum(spec.shape)) for spec in specs)

    uniform = max(rate for rate in RATES if uniform_size(rate) <= room)
    assert all(abs(layer.spec.grid.rate - uniform) <= NEAR for layer in record.outside)
    stored = 0
    for layer in record.layers:
        own = {name: t for name, t in tensors.items() if name.startswith(f"{layer.name}.")}
        rate = layer.spec.grid.rate
        assert rate in RATES
        assert len(own[f"{layer.name}.weight_packed"]) == words_for_rate(layer.spec.dense_parameters, rate)
        assert layer.bytes == sum(tensor.nbytes for tensor in own.values())
        stored += layer.bytes
    assert stored <= room
    assert len(record.layers) == 14 + (1 if tied else 2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = logits(loaded, segments())
    assert torch.equal(found, logits(model, segments()))
    hasslefree.export(tmp_path / "out", tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(found, logits(dense, segments()), rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = tensors_of(tmp_path / "again")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_bits_without_a_size_are_those_of_every_layer(tmp_path):
    recipe = Recipe(bits=5, rank=2, coding="entropy", effort="fast")
    record = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    assert {(layer.spec.grid.rate, layer.spec.rank) for layer in record.layers} == {(5.0, 2)}
    assert "rounded to 5 bits" in (tmp_path / "out" / "README.md").read_text()


def test_errors_between_measured_rates_are_interpolated():
    """Oracle: an error that a bit quarters, from measurements of some of the rates."""
    grids = [Grid.entropy_coded(rate) for rate in RATES]
    measured = measured_grids(grids)
    assert 2 < len(measured) < len(grids)
    assert {grids[0], grids[-1]} <= set(measured)
    found = interpolated({grid: 4.0**-grid.rate for grid in measured}, grids)
    assert found == pytest.approx({grid: 4.0**-grid.rate for grid in grids})
    assert list(found) == grids
    others = [Grid(bits) for bits in BITS]
    assert measured_grids(others)[-1] == others[-1]
    assert interpolated(dict.fromkeys(others, 1.0), others) == dict.fromkeys(others, 1.0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"group_size": 32, "scale_bits": 5}, "leave out group_size, scale_bits, or use coding='fixed'"),
        ({"engine": "llama.cpp"}, "llama.cpp cannot hold entropy-coded, 4 bits exactly; for llama.cpp, leave out cod"),
        ({"engine": "transformers"}, "transformers cannot hold entropy-coded.*leave out coding='entropy'"),
        ({"pattern": "2:4"}, "an entropy-coded grid keeps every one; use pattern='dense'"),
        ({"bits": 8}, "the rate of an entropy-coded grid must be from 1 to 7 bits a weight, got 8"),
        ({"embedding_bits": 8}, "the rate of an entropy-coded grid must be from 1 to 7 bits a weight, got 8"),
        ({"size": "5bits", "bits": 4}, "there is nothing left that a size could choose: leave out bits"),
        ({"method": "joint"}, "method 'joint' does not quantise S: leave out .* and coding, or use method"),
        ({"coding": "huffman"}, "coding .*'fixed' or 'entropy'"),
    ],
)
def test_what_it_does_not_go_with_is_said_before_the_work(fields, sentence, tmp_path):
    fields = {"coding": "entropy", "rank": 0} | fields
    with pytest.raises(HasslefreeError, match=sentence):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(**fields), segments=segments())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["mlx", "compressed-tensors"])
def test_engines_refuse_the_folder(to, tmp_path):
    recipe = Recipe(bits=5, rank=0, coding="entropy", effort="fast")
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    with pytest.raises(ModelError, match=r"cannot hold layer .* entropy-coded, 5 bits exactly"):
        hasslefree.export(tmp_path / "out", tmp_path / "there", to=to)


def test_bits_alone_say_all():
    """No size is left to reach, and no rank to choose."""
    resolved = Recipe(coding="entropy", bits=4).resolve()
    assert (resolved.size, resolved.rank, resolved.allocate) == (None, 0, "uniform")
    with pytest.raises(RecipeError, match="method joint-grid needs a budget"):
        Recipe(coding="entropy", pattern="dense").resolve()  # without bits, nothing says how many


@pytest.mark.parametrize("method", [None, "caldera", "loftq", "lq-lora", "gptq"])
def test_a_size_chooses_bits_and_no_rank(method):
    resolved = Recipe(coding="entropy", method=method, size="5.2bits").resolve()
    assert (resolved.fixed_rank, resolved.rank_on_grids, resolved.allocate) == (0, 0, "error")
    with pytest.raises(RecipeError, match="nothing left that a size could choose: leave out bits$"):
        Recipe(coding="entropy", method=method, size="5bits", bits=4).resolve()
