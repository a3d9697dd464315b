"""What a plan promises is what a run takes."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import hasslefree
from hasslefree import Recipe
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.errors import BudgetError, GridError, MemoryShortError, ModelError, UnknownNameError
from hasslefree.levers.masters import Masters
from hasslefree.levers.matching import Matching, match_block
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import find_blocks
from hasslefree.recipe.plan import make_plan
from hasslefree.recipe.resolved import filled
from hasslefree.run.estimate import LIBRARIES, estimate, estimate_model, to_dict
from hasslefree.run.flops import matching_passes
from hasslefree.run.machine import free_memory
from hasslefree.run.memory import as_run, check_memory, runs_beside
from hasslefree.run.tables import as_text, estimate_table
from hasslefree.solve.methods import METHODS
from hasslefree.solve.methods.prune import Prune
from tests.tiny_models import FAMILIES, build, segments, tensors_of

CPU = torch.device("cpu")


def set_free_memory(monkeypatch, free):
    for module in ("memory", "tables"):
        monkeypatch.setattr(f"hasslefree.run.{module}.free_memory", free)


def planned(folder, recipe=None, storage="device", processes=1, **changes):
    build("llama", **changes).save_pretrained(folder)
    return estimate_model(
        str(folder), recipe or Recipe(rank=2, effort="fast", samples=6, seqlen=16), CPU, storage, processes
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_the_layers_is_what_compress_makes(family, tmp_path):
    """Oracle: the folder that compress writes."""
    build(family).save_pretrained(tmp_path / "model")
    recipe = Recipe(rank=2, method="eora", samples=4, seqlen=16)
    found = estimate_model(str(tmp_path / "model"), recipe, CPU, "device")
    report = hasslefree.compress(build(family), tmp_path / "out", recipe, segments=segments())
    assert found.blocks == 2
    assert sum(count for *_, count in found.layers) == len(report.layers)
    assert (found.kept, found.dense) == (report.kept_parameters, report.dense_parameters)
    written = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert found.disk == written + 50_000_000


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "gptq"},
        {"method": "caldera", "rank": 2, "rounds": 1, "pattern": "2:4"},
        {"method": "rtn", "pattern": "row", "sparsity": 0.5, "symmetric": True},
        {"method": "joint-grid", "rank": 3, "rounds": 2, "pattern": "2:4", "factor_bits": 8},
    ],
    ids=lambda fields: fields["method"],
)
def test_bytes_of_a_grid_are_those_that_are_written(fields, tmp_path):
    """Oracle: the tensors of the folder. Where a pattern does not store zeros, rounding to zero makes it smaller."""
    recipe = Recipe(**fields, group_size=16, samples=4, seqlen=16)
    found = planned(tmp_path / "model", recipe)
    report = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    written = tensors_of(tmp_path / "out")
    total = sum(tensor.nbytes for tensor in written.values())
    assert (recipe.factor_bits == 8) == any(tensor.dtype == torch.int8 for tensor in written.values())
    assert found.disk - 50_000_000 == total if recipe.pattern != "row" else found.disk - 50_000_000 >= total > 0
    of_layers = sum(
        t.nbytes for name, t in written.items() if name.rpartition(".")[0] in {r.name for r in report.layers}
    )
    assert report.stored_bytes == sum(layer.bytes for layer in report.layers) == of_layers
    assert report.dense_bytes == 4 * report.dense_parameters
    stored = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert (stored["stored_bytes"], stored["dense_bytes"]) == (report.stored_bytes, report.dense_bytes)
    assert f"{report.stored_bytes:,} of {report.dense_bytes:,}" in (tmp_path / "out" / "README.md").read_text()
    text = as_text(estimate_table(found, CPU)).replace("\n", " ")
    assert "int4" in text
    assert to_dict(found)["layers"][0]["pattern"].startswith(f"{filled(recipe).pattern}, int4 in groups of 16")


def test_what_memory_holds_by_hand(tmp_path):
    """Llama in float32: width 32, MLP 48, vocabulary 64, two blocks; 6 × 16 tokens."""
    found = planned(tmp_path, tie_word_embeddings=False)
    assert found.activations == 6 * 16 * 32 * 4
    assert found.outside == 4 * (2 * 64 * 32 + 32)
    layers = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    packed = layers // 2 * 4 + layers // 2 * 2 // 8 + 4 * 2 * (2 * 64 + 2 * 48 + 3 * 80)
    assert found.block == 4 * (layers + 2 * 32) + packed
    assert found.beside == 4 * (layers + 2 * 32) + 2 * (4 * 2 * 32 + packed)  # a block is read, and one is written
    assert planned(tmp_path / "one", num_hidden_layers=1).beside == 0
    assert planned(tmp_path / "half", processes=2).activations == found.activations // 2


def test_where_the_activations_count(tmp_path):
    device, disk = (planned(tmp_path / storage, storage=storage) for storage in ("device", "disk"))
    assert device.ram_peak - disk.ram_peak == device.activations
    on_gpu = dataclasses.replace(device, device="cuda")
    moved = dataclasses.replace(on_gpu, storage="cpu")
    assert on_gpu.device_peak - moved.device_peak == on_gpu.activations == moved.ram_peak - on_gpu.ram_peak


def test_a_model_that_is_loaded_counts_whole(tmp_path, monkeypatch):
    """Oracle: the bytes of its parameters."""
    model, recipe = build("llama"), Recipe(rank=2, effort="fast").resolve(with_text=False)
    blocks = find_blocks(model)
    loaded = estimate(model, blocks, make_plan(blocks, recipe), recipe, (6, 16), CPU, "device")
    whole, block = (sum(p.nbytes for p in part.parameters()) for part in (model, model.model.layers[0]))
    assert loaded.resident == whole - block
    assert loaded == dataclasses.replace(planned(tmp_path), resident=whole - block, beside=loaded.beside)
    assert planned(tmp_path).beside == loaded.beside + block  # which is not read
    on_disk = dataclasses.replace(loaded, storage="disk", streams=0, probes=0, beside=0)
    set_free_memory(monkeypatch, lambda device: on_disk.ram_peak - 1)
    with pytest.raises(MemoryShortError, match="it fits with (.|\n)*folder in the place of the loaded model"):
        check_memory(on_disk, CPU)


def test_a_run_that_will_not_fit_is_refused_with_the_way_out(tmp_path, monkeypatch):
    found = dataclasses.replace(planned(tmp_path), streams=8 * 10**9)
    room = found.ram_peak - 10**9
    set_free_memory(monkeypatch, lambda device: room)
    with pytest.raises(MemoryShortError, match=r"with activations='disk'(.|\n)*parameters kept(.|\n)*peak of RAM"):
        check_memory(found, CPU)
    check_memory(dataclasses.replace(found, streams=0), CPU)


def test_where_memory_is_short_blocks_are_read_and_written_before_and_after_the_work(tmp_path, monkeypatch, caplog):
    """Oracle: the peaks of the footprint, on a CPU and beside a GPU."""
    found = planned(tmp_path)
    for device in (CPU, torch.device("cuda")):
        here = dataclasses.replace(found, device=device.type, storage="disk")
        lean = dataclasses.replace(here, beside=0)
        assert here.ram_peak == lean.ram_peak + here.beside > lean.ram_peak
        set_free_memory(monkeypatch, lambda _, room=here.ram_peak: room)
        assert runs_beside(here, device)
        assert as_run(here, device) == here
        set_free_memory(monkeypatch, lambda _, room=here.ram_peak - 1: room)
        check_memory(here, device)
        with caplog.at_level("INFO", "hasslefree"):
            assert not runs_beside(here, device)
        assert "not enough memory to read and write blocks in the background" in caplog.text
        assert as_run(here, device) == lean
        caplog.clear()


def test_what_a_gpu_has_no_room_for_may_fit_into_ram(tmp_path, monkeypatch):
    found = dataclasses.replace(planned(tmp_path), device="cuda", solving=10 * 10**9)
    gpu = torch.device("cuda")
    set_free_memory(monkeypatch, lambda device: 10**9 if device == gpu else 20 * 10**9)
    monkeypatch.setattr("hasslefree.run.tables.product_rate", lambda device: 1e9)
    with pytest.raises(MemoryShortError, match="it fits with device='cpu'"):
        check_memory(found, gpu)


def test_compress_refuses_before_the_work(tmp_path, monkeypatch):
    set_free_memory(monkeypatch, lambda device: 10**8)
    with pytest.raises(MemoryShortError, match="a machine with more memory"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2, rounds=1), segments=segments())
    assert not list(tmp_path.iterdir())


def test_wrong_plans(tmp_path):
    with pytest.raises(BudgetError, match="rank 20 is larger"):
        planned(tmp_path, Recipe(rank=20))
    with pytest.raises(
        GridError, match=r"does not divide the 32 inputs of the layer; use group_size=32.*model\.layers\.0\.\S*q_proj"
    ):
        planned(tmp_path, Recipe(method="gptq"))
    with pytest.raises(UnknownNameError, match="storage of activations 'attic'"):
        planned(tmp_path, storage="attic")
    with pytest.raises(ModelError, match="takes at most 64 tokens"):
        planned(tmp_path, Recipe(rank=2, seqlen=65))


def test_the_table_and_the_json_tell_the_same(tmp_path):
    found = planned(tmp_path)
    text, content = as_text(estimate_table(found, CPU)), json.loads(json.dumps(to_dict(found)))
    for part in ("q_proj", "48×32", "2:4", "parameters kept", "peak of RAM", "about", "weights of OUT"):
        assert part in text
    assert content["ram_peak"] == found.ram_peak
    assert sum(layer["count"] for layer in content["layers"]) == 14
    assert math.prod(content["layers"][0]["shape"]) == 32 * 32


def test_the_plan_names_what_is_done_beyond_the_layer(tmp_path):
    def told(**changes):
        return as_text(estimate_table(planned(tmp_path, Recipe(rank=2, samples=6, seqlen=16, **changes)), CPU))

    assert "beyond the layer" not in told(effort="fast")
    assert all(word in told(effort="best") for word in ("allocation error", "block matching", "prediction matching"))


def test_ram_counts_beside_a_gpu(tmp_path, monkeypatch):
    free = {"cpu": 10**10, "cuda": 10**12}
    set_free_memory(monkeypatch, lambda device: free[device.type])
    monkeypatch.setattr("hasslefree.run.tables.product_rate", lambda device: 1e12)
    gpu = torch.device("cuda")
    found = dataclasses.replace(planned(tmp_path), device="cuda", storage="cpu", streams=10**9)
    check_memory(found, gpu)
    with pytest.raises(MemoryShortError, match="it fits with activations='disk'"):
        check_memory(dataclasses.replace(found, streams=2 * 10**10), gpu)


def test_the_hidden_states_that_allocation_keeps_count(tmp_path, monkeypatch):
    """Oracle: what is taken for hidden states by the allocation, before the compression begins with its own."""
    taken, make = [], Activations.__init__
    monkeypatch.setattr("hasslefree.models.moments.PROBED", 32)
    monkeypatch.setattr(
        Activations, "__init__", lambda self, *its: make(self, *its) or taken.append(self.states.nbytes)
    )
    recipe = Recipe(rank=2, allocate="error", effort="fast", samples=6, seqlen=16, rounds=1)
    found = planned(tmp_path / "model", recipe)
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments(6, 16))
    assert found.activations == sum(taken[:-1])
    assert planned(tmp_path / "one", dataclasses.replace(recipe, allocate="uniform")).activations == taken[-1]
    wide = planned(tmp_path / "wide", recipe, vocab_size=10**6, tie_word_embeddings=True)
    assert wide.logits > 4 * 10**6 * 16 * 3
    assert wide.device_peak == LIBRARIES + wide.activations + 2 * wide.outside + wide.logits


def test_probes_that_do_not_fit_have_a_remedy(tmp_path):
    found = planned(tmp_path, Recipe(rank=2, allocate="error", match_predictions=0, samples=6, seqlen=16))
    assert dataclasses.replace(found, probes=10**15).activations == 10**15
    found = dataclasses.replace(found, logits=10**15)
    with pytest.raises(MemoryShortError, match="it fits with effort='fast', which runs no probes"):
        check_memory(found, CPU)


def test_what_prediction_matching_holds_counts_and_has_a_remedy(tmp_path, monkeypatch):
    """Oracle: what the masters, their units and Adam's moments take in a run, and all compressed blocks."""
    made, keep = [], Masters.__init__

    def noted(self, *args, **kwargs):
        keep(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Masters, "__init__", noted)
    recipe = Recipe(rank=2, effort="fast", match_predictions=64, samples=6, seqlen=16)
    found = planned(tmp_path / "model", recipe)
    report = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments(6, 16))
    adam = [t for m in made[-2:] for state in m.optimizer.state.values() for t in state.values() if t.ndim]
    held = [*adam, *(t for m in made[-2:] for t in [*m.masters, *m.units] if t.ndim)]
    assert found.masters >= sum(t.nbytes for t in held) > 0.7 * found.masters
    assert found.whole > report.stored_bytes
    monkeypatch.setattr("hasslefree.run.estimate.in_one_pass", lambda *args: False)
    assert report.stored_bytes < planned(tmp_path / "wide", recipe).whole < found.whole
    for much in ({"whole": 10**15}, {"masters": 10**15}):
        with pytest.raises(MemoryShortError, match="it fits with match_predictions=0, which keeps one block in memory"):
            check_memory(dataclasses.replace(found, **much), CPU)
    gpu = dataclasses.replace(found, device="cuda", whole=10**9, masters=10**9)
    assert dataclasses.replace(gpu, storage="cpu").device_peak == gpu.device_peak - 10**9 - gpu.activations
    assert dataclasses.replace(gpu, storage="disk").ram_peak == gpu.ram_peak + 10**9


def test_the_passes_of_matching_are_those_it_makes():
    """Oracle: the calls that are counted, one with gradients as three."""
    block, settings, seen = nn.Linear(4, 4), Matching(epochs=3, held_out=0.25, retreats=0, patience=9), []

    class Counted:
        batched = False

        def run(self, block, hidden):
            seen.append(3 if torch.is_grad_enabled() else 1)
            return block(hidden)

    x = [torch.randn(1, 5, 4) for _ in range(8)]
    match_block(block, Counted(), x, x, settings, seed=0, parameters=list(block.parameters()))
    assert sum(seen) == 8 * matching_passes(settings, 8)


def test_free_memory_is_what_the_machine_has():
    assert 10**8 < free_memory(CPU) < 10**14


class Unstated(Pruner):
    """A pruner of a user's, which does not say what it costs."""

    def prepare(self, gram):
        return None

    def prune(self, target, prepared, pattern):
        return Pruned(target * pattern.mask(target.square()))


def test_a_plug_in_that_states_no_cost_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "own", Prune(Unstated()))
    found = planned(tmp_path, Recipe(method="own", samples=6, seqlen=16))
    assert "Unstated states no cost: memory and time are those of the most expensive plug-in" in " ".join(
        as_text(estimate_table(found, CPU)).replace("│", " ").split()
    )
    assert found.flops == planned(tmp_path, Recipe(method="alps", samples=6, seqlen=16)).flops
    assert "states no cost" not in as_text(estimate_table(planned(tmp_path), CPU))
