"""A model whose codes are entropy-coded: its files, what is chosen within a size, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Gram, Recipe
from hasslefree.allocate.ends import NEAR
from hasslefree.allocate.options import errors_on, interpolated
from hasslefree.allocate.sensitivity import ROUGH, bits_and_error, probe_method
from hasslefree.core.entropy import encode, words_for_rate
from hasslefree.core.grids import BITS, RATES, Grid
from hasslefree.core.patterns import Unstructured
from hasslefree.errors import HasslefreeError, ModelError, RecipeError
from hasslefree.solve import at_rate
from hasslefree.solve.decompose import approximation
from hasslefree.solve.methods import joint_on_grid
from tests import oracles
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_is_solved_some_rows_at_a_time(tied, tmp_path, monkeypatch):
    """Oracle: all rows at once: as many bits, nearly the same errors, and the predictions of the dense export."""
    recipe = Recipe(bits=4, rank=0, embedding_bits=4, coding="entropy", effort="fast", check=False)
    whole = hasslefree.compress(
        build("llama", tie_word_embeddings=tied), tmp_path / "whole", recipe, segments=segments()
    )
    for module in (at_rate, joint_on_grid):
        monkeypatch.setattr(module, "ROWS", 24)
    parts = hasslefree.compress(
        build("llama", tie_word_embeddings=tied), tmp_path / "parts", recipe, segments=segments()
    )
    assert len(parts.outside) == (1 if tied else 2)
    for found, expected in zip(parts.outside, whole.outside, strict=True):
        assert found.spec == expected.spec
        assert found.bytes == expected.bytes
        assert found.relative_error == pytest.approx(expected.relative_error, rel=0.02)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    hasslefree.export(tmp_path / "parts", tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(loaded, segments()), logits(dense, segments()), rtol=1e-5, atol=1e-5)


def test_bits_without_a_size_are_those_of_every_layer(tmp_path):
    recipe = Recipe(bits=5, rank=2, coding="entropy", effort="fast")
    record = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    assert {(layer.spec.grid.rate, layer.spec.rank) for layer in record.layers} == {(5.0, 2)}
    assert "rounded to 5 bits" in (tmp_path / "out" / "README.md").read_text()


def test_errors_between_measured_rates_are_interpolated():
    """Oracle: an error that a bit quarters, from measurements that miss the bits of some of the rates."""
    grids = [Grid.entropy_coded(rate) for rate in RATES]
    measured = []

    def measure(grid):
        measured.append(grid)
        bits = grid.rate - 0.2 * (-1) ** len(measured)
        return bits, 4.0**-bits

    found = errors_on(grids, measure)
    assert found == pytest.approx({grid: 4.0**-grid.rate for grid in grids})
    assert list(found) == grids
    assert 2 < len(measured) < len(grids)
    assert {grids[0], grids[-1]} <= set(measured)


def test_errors_beyond_the_measured_rates_go_on_as_before():
    """Oracles: a bit that takes a third of the error off; and at most a quarter is left, as for one point alone."""
    grids = [Grid.entropy_coded(rate) for rate in (2.0, 6.0)]
    assert list(interpolated([(3.0, 9.0), (4.0, 6.0)], grids).values()) == pytest.approx([13.5, 6 * (2 / 3) ** 2])
    for points in ([(3.0, 9.0), (4.0, 1.0)], [(3.0, 9.0)], [(3.0, 9.0), (3.0, 9.0)]):
        assert interpolated(points, grids)[grids[0]] == pytest.approx(36)
    assert interpolated([(3.0, 0.0), (3.0, 0.0)], grids)[grids[1]] == pytest.approx(0)
    assert interpolated([(3.0, 1.0), (3.1, 2.0)], grids)[grids[1]] == 2


def test_errors_on_codes_of_one_length_are_measured():
    grids = [Grid(bits) for bits in BITS]
    assert errors_on(grids, lambda grid: (grid.stored_bits, 1.0 / grid.bits)) == {g: 1 / g.bits for g in grids}


def test_a_first_look_tells_the_bits_that_it_takes_and_its_error():
    """Oracle: the words of the stream of the codes of S, which are found by their scales anew."""
    weight, h = oracles.problem(256, 128)
    gram = Gram(h, 200)
    kept = Unstructured(weight.numel())
    for rate in (1.5, 4.0, 6.5):
        grid = Grid.entropy_coded(rate)
        method = probe_method(grid)
        prepared = method.prepare(gram)
        bits, error = bits_and_error(weight, gram, prepared, kept, grid)
        sparse = approximation(method, weight, gram, prepared, kept, 0, 0).sparse
        steps = [column.unique().diff().min() for column in sparse.T]
        scaled = sparse / torch.stack(steps)
        codes = scaled.round()
        torch.testing.assert_close(scaled, codes, rtol=0, atol=0.02)
        words = len(encode((codes + 128).to(torch.uint8)))
        assert bits == pytest.approx(32 * words / weight.numel(), rel=1e-3)
        assert bits == pytest.approx(rate, rel=ROUGH)
        assert error == pytest.approx(oracles.loss(weight - sparse, gram.shrunk().matrix), rel=1e-4)
    fixed = Grid(4, 32)
    assert bits_and_error(weight, gram, probe_method(fixed).prepare(gram), kept, fixed)[0] == fixed.stored_bits


@pytest.mark.parametrize("allocate", ["error", "uniform"])
def test_inputs_that_are_always_zero_take_no_bits(allocate, tmp_path):
    """As those of ReLU may be: what is left gets their bits, as far as codes of eight bits use them."""
    model = build("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[:20] = 0
            block.post_attention_layernorm.weight[:31] = 0
    recipe = Recipe(size="5bits", effort="fast", check=False, allocate=allocate)
    record = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    assert max(layer.relative_error for layer in record.layers if "gate_proj" in layer.name) < 1e-3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"group_size": 32, "scale_bits": 5}, "leave out group_size, scale_bits, or use coding='fixed'"),
        ({"engine": "llama.cpp"}, "llama.cpp cannot hold entropy-coded, 4 bits exactly; for llama.cpp, leave out cod"),
        ({"engine": "transformers"}, "transformers cannot hold entropy-coded.*leave out coding='entropy'"),
        ({"pattern": "2:4"}, "an entropy-coded grid keeps every one; use pattern='dense'"),
        ({"bits": 8}, "the rate of an entropy-coded grid must be from 1 to 7 bits per weight, got 8"),
        ({"embedding_bits": 8}, "the rate of an entropy-coded grid must be from 1 to 7 bits per weight, got 8"),
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


@pytest.mark.parametrize("to", ["mlx", "compressed-tensors", "gguf"])
def test_engines_refuse_the_folder(to, tmp_path):
    recipe = Recipe(bits=5, rank=0, coding="entropy", effort="fast")
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    for shard in (tmp_path / "out").glob("*.safetensors"):
        shard.unlink()  # it is said before the weights are read
    message = r"^cannot export layer .*: \S+ cannot hold entropy-coded, 5 bits exactly; .*, or export with to='dense'$"
    with pytest.raises(ModelError, match=message):
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
