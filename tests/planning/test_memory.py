"""What a plan promises is what a run takes."""

import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import BudgetError, GridError, MemoryShortError, ModelError, UnknownNameError
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import find_blocks
from hasslefree.planning.machine import free_memory
from hasslefree.planning.memory import (
    LIBRARIES,
    Setup,
    check_memory,
    estimate,
    flops_by_phase,
    remedies,
    setup_of,
    without_prefetch_if_tight,
)
from hasslefree.planning.plan import make_plan, select
from hasslefree.planning.schedule import segments_for
from hasslefree.planning.tables import plan_summary, plan_table
from hasslefree.progress import ALLOCATION, CHECK, INPUTS, PREDICTIONS, PROBES, REFERENCE, SOLVING
from hasslefree.units import size
from tests.tiny_models import FAMILIES, build, segments, tensors_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FAST = Recipe(rank=2, effort="fast", samples=6, seqlen=16, check=False)


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free, in bytes, on every device or by type of device."""

    def set_free(memory):
        found = memory if isinstance(memory, dict) else dict.fromkeys(("cpu", "cuda"), memory)
        monkeypatch.setattr("hasslefree.planning.memory.free_memory", lambda device, processes: found[device.type])

    return set_free


@pytest.fixture(autouse=True)
def large_machine(monkeypatch):
    """Every device has a terabyte, and a known speed."""
    monkeypatch.setattr("hasslefree.planning.machine.total_memory", lambda device: 10**12)
    monkeypatch.setattr("hasslefree.planning.tables.product_rate", lambda device: 1e12)


def planned(folder, recipe=FAST, storage="device", processes=1, device=CPU, **changes):
    build("llama", **changes).save_pretrained(folder)
    return setup_of(str(folder), recipe, device, storage, processes)


def as_text(setup):
    console = Console(file=io.StringIO(), width=100)
    console.print(plan_table(setup))
    return console.file.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_the_layers_is_what_compress_makes(family, tmp_path):
    """Oracle: the folder that compress writes."""
    build(family).save_pretrained(tmp_path / "model")
    recipe = Recipe(rank=2, method="eora", samples=4, seqlen=16)
    plan = plan_summary(setup_of(str(tmp_path / "model"), recipe, CPU, "device"))
    report = hasslefree.compress(build(family), tmp_path / "out", recipe, segments=segments())
    assert plan["blocks"] == 2
    assert sum(kind["count"] for kind in plan["layers"]) == len(report.layers)
    assert (plan["kept"], plan["dense"]) == (report.kept_parameters, report.dense_parameters)
    written = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert plan["disk"] == written + 50_000_000


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
    setup = planned(tmp_path / "model", recipe)
    disk = estimate(setup).disk - 50_000_000
    report = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    written = tensors_of(tmp_path / "out")
    total = sum(tensor.nbytes for tensor in written.values())
    assert (recipe.factor_bits == 8) == any(tensor.dtype == torch.int8 for tensor in written.values())
    assert disk == total if recipe.pattern != "row" else disk >= total > 0
    of_layers = sum(
        t.nbytes for name, t in written.items() if name.rpartition(".")[0] in {r.name for r in report.layers}
    )
    assert report.stored_bytes == sum(layer.bytes for layer in report.layers) == of_layers
    assert report.dense_bytes == 4 * report.dense_parameters
    stored = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert (stored["stored_bytes"], stored["dense_bytes"]) == (report.stored_bytes, report.dense_bytes)
    sizes = f"| {size(report.dense_bytes)} → {size(report.stored_bytes)} ("
    assert sizes in (tmp_path / "out" / "README.md").read_text()
    assert "int4" in as_text(setup)
    assert "int4 in groups of 16" in plan_summary(setup)["layers"][0]["pattern"]


def test_the_terms_by_hand(tmp_path, free):
    """Llama in float32: width 32, MLP 48, vocabulary 64, two blocks; 6 × 16 tokens at once; joint at rank 2."""
    setup = planned(tmp_path, tie_word_embeddings=False)
    layers = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    packed = layers // 2 * 4 + layers // 2 * 2 // 8 + 4 * 2 * (2 * 64 + 2 * 48 + 3 * 80)
    down = 4 * (11 * 48 * 48 + 12 * 32 * 48 + 8 * (32 + 48) * 2) + 20 * 4 * 48 * 48
    footprint = estimate(setup)
    assert {name: term for name, term in footprint.ram.items() if term} == {
        "libraries": LIBRARIES,
        "block": 4 * (layers + 2 * 32) + packed,
        "forward pass": 5 * 4 * 48 * 6 * 16,
        "Gram matrices and solver": round(1.2 * (4 * 48 * 48 + 4 * 32 * 48 + down)),
        "prefetch": 4 * (layers + 2 * 32) + 2 * packed,
        "hidden states": 6 * 16 * 32 * 4,
    }
    assert footprint.ram_peak == footprint.device_peak == sum(footprint.device.values())
    assert "prefetch" not in estimate(planned(tmp_path / "one", num_hidden_layers=1)).ram
    assert estimate(dataclasses.replace(setup, processes=2)).activations == footprint.activations // 2
    assert estimate(dataclasses.replace(setup, width=64)).activations == footprint.activations * 2
    wide = estimate(planned(tmp_path / "wide", vocab_size=10**6))
    assert wide.device_peak == LIBRARIES + 2 * 4 * (2 * 10**6 * 32 + 32) + wide.ram["prefetch"] + wide.activations


def test_what_a_check_takes_by_hand(tmp_path):
    """Its 32 segments of 16 tokens are kept for both models; 16 rows of logits over 10⁶ tokens are in memory."""
    plain, checked = (
        estimate(planned(tmp_path / str(check), vocab_size=10**6, recipe=dataclasses.replace(FAST, check=check)))
        for check in (False, True)
    )
    assert checked.activations - plain.activations == 2 * 32 * 16 * 32 * 4
    assert checked.ram["logits"] == 5 * 4 * 16 * 10**6
    assert "logits" not in plain.ram


def test_where_the_activations_count(tmp_path):
    device, disk = (estimate(planned(tmp_path / storage, storage=storage)) for storage in ("device", "disk"))
    assert device.ram_peak - disk.ram_peak == device.activations
    on_gpu, moved = (estimate(planned(tmp_path / "gpu", storage=storage, device=GPU)) for storage in ("device", "cpu"))
    assert on_gpu.device_peak - moved.device_peak == on_gpu.activations == moved.ram_peak - on_gpu.ram_peak


def test_a_model_that_is_loaded_counts_whole(free):
    """Oracle: the bytes of its parameters."""
    model, resolved = build("llama"), FAST.resolve(with_text=False)
    blocks = find_blocks(model)
    loaded = Setup(
        model, blocks, make_plan(select(blocks, resolved), resolved), resolved, (6, 16), CPU, "disk", prefetch=False
    )
    whole, block = (sum(p.nbytes for p in part.parameters()) for part in (model, model.model.layers[0]))
    assert estimate(loaded).ram["loaded model"] == whole - block
    assert estimate(dataclasses.replace(loaded, by_name=True)).ram["loaded model"] == 0
    read = estimate(dataclasses.replace(loaded, by_name=True, prefetch=True)).ram["prefetch"]
    assert read - estimate(dataclasses.replace(loaded, prefetch=True)).ram["prefetch"] == block  # which is not read
    free(estimate(loaded).ram_peak - 1)
    with pytest.raises(MemoryShortError, match="it fits with .*folder in the place of the loaded model"):
        check_memory(loaded)


def test_a_run_that_will_not_fit_is_refused_with_an_option_that_fits(tmp_path, free):
    setup = dataclasses.replace(planned(tmp_path), tokens=(10**6, 16))
    disk = dataclasses.replace(setup, storage="disk", prefetch=False)
    free(estimate(disk).ram_peak)
    with pytest.raises(MemoryShortError, match=r"fits with activations='disk'\n(.|\n)*peak of RAM: .* available: "):
        check_memory(setup)
    assert check_memory(disk) == disk


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_if_memory_is_short_nothing_is_read_or_written_in_the_background(device, tmp_path, free, caplog):
    """Oracle: the peaks of the footprint."""
    setup = planned(tmp_path, storage="disk", device=device)
    lean = dataclasses.replace(setup, prefetch=False)
    peak = estimate(setup).ram_peak
    assert peak == estimate(lean).ram_peak + estimate(setup).ram["prefetch"] > estimate(lean).ram_peak
    free(peak)
    assert check_memory(setup) == without_prefetch_if_tight(setup) == setup
    free(peak - 1)
    with caplog.at_level("INFO", "hasslefree"):
        assert check_memory(setup) == lean
    assert "not enough memory to read and write blocks in the background" in caplog.text
    assert without_prefetch_if_tight(setup) == lean


def test_what_a_gpu_has_no_room_for_may_fit_into_ram(tmp_path, free):
    free({"cuda": 10**8, "cpu": 20 * 10**9})
    with pytest.raises(MemoryShortError, match=r"it fits with device='cpu'\npeak of cuda: "):
        check_memory(planned(tmp_path, device=GPU))


def test_ram_counts_beside_a_gpu(tmp_path, free):
    setup = planned(tmp_path, storage="cpu", device=GPU)
    free({"cuda": 10**12, "cpu": 10**10})
    check_memory(setup)
    with pytest.raises(MemoryShortError, match="it fits with activations='disk'"):
        check_memory(dataclasses.replace(setup, tokens=(10**7, 16)))


def test_compress_refuses_before_the_work(tmp_path, free):
    free(10**8)
    with pytest.raises(MemoryShortError, match="a machine with more memory"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2, rounds=1), segments=segments())
    assert not list(tmp_path.iterdir())


def test_wrong_plans(tmp_path):
    with pytest.raises(BudgetError, match="rank 99 is larger"):
        planned(tmp_path, Recipe(rank=99))
    with pytest.raises(
        GridError, match=r"does not divide the 32 inputs of the layer; use group_size=32.*model\.layers\.0\.self_attn"
    ):
        planned(tmp_path, Recipe(method="gptq", group_size=64))
    with pytest.raises(UnknownNameError, match="storage of activations 'attic'"):
        planned(tmp_path, storage="attic")
    with pytest.raises(ModelError, match="takes at most 64 tokens"):
        planned(tmp_path, Recipe(rank=2, seqlen=65))


def test_the_table_and_the_json_agree(tmp_path):
    setup = planned(tmp_path)
    text, content = as_text(setup), json.loads(json.dumps(plan_summary(setup)))
    for part in ("q_proj", "48×32", "2:4", "parameters kept", "peak of RAM", "about", "weights"):
        assert part in text
    assert content["ram_peak"] == estimate(setup).ram_peak == sum(content["memory"]["ram"].values())
    assert sum(layer["count"] for layer in content["layers"]) == 14
    assert content["layers"][0]["shape"] == [32, 32]


def last_line(setup):
    assert (plan_summary(setup)["problem"] is None) == ("It fits" in as_text(setup))
    return " ".join(as_text(setup).rpartition("\n\n")[2].split())


def test_a_plan_ends_with_whether_it_fits_and_what_to_change(tmp_path, free, monkeypatch):
    """Oracle: what `check_memory` accepts, and the bytes that are free."""
    setup = planned(tmp_path)
    assert last_line(setup).startswith("It fits, in memory and on this disk, and takes about ")
    large = dataclasses.replace(setup, tokens=(10**6, 16))
    disk = dataclasses.replace(large, storage="disk", prefetch=False)
    free(estimate(disk).ram_peak)
    assert last_line(large) == "It does not fit in memory; it fits with --activations disk."
    free(1)
    assert last_line(large) == "It does not fit in memory; it needs a machine with more memory."
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=estimate(setup).disk - 1))
    assert "This disk has 50.1 MB free of the 50.1 MB needed" in last_line(large)
    free(10**15)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=estimate(setup).disk))
    assert "It fits" in last_line(setup)
    trained = planned(tmp_path / "trained", dataclasses.replace(FAST, match_predictions=64))
    assert "This disk has" in last_line(trained), "blocks are written twice"


def test_the_plan_names_what_is_done_beyond_the_layer(tmp_path):
    fast, best = as_text(planned(tmp_path)), as_text(planned(tmp_path, Recipe(rank=2, effort="best", seqlen=16)))
    assert [step in fast for step in (ALLOCATION, PREDICTIONS)] == [False, False]
    assert [step in best for step in (ALLOCATION, PREDICTIONS)] == [True, True]


def test_flops_by_hand(tmp_path, free):
    """Oracle: the parameters of Llama: two blocks, a head, and layers with 32 and with 48 inputs."""
    recipe = Recipe(rank=2, allocate="error", match_predictions=64, rounds=20, samples=6, seqlen=16)
    flops = flops_by_phase(planned(tmp_path / "dense", recipe))
    block, head, tokens = 7_744, 64 * 32, 6 * 16
    volume = 2 * (2 * 32 * 32**2 + 2 * 16 * 32**2 + 2 * 48 * 32**2 + 32 * 48**2)
    checked = 2 * 32 * 16  # of both models
    assert flops[INPUTS] == 2 * tokens * (2 * (6 * 32**2 + 48**2) + 2 * block) + 2 * checked * 2 * block
    assert flops[CHECK] == 2 * checked * head
    assert flops[SOLVING] == 2 * 20 * volume
    assert flops[PROBES] == 2 * tokens * (2 * block + head)
    assert flops[ALLOCATION] > 2 * flops[PROBES]
    assert flops[REFERENCE] == 2 * segments_for(64, 16) * 16 * 2 * block
    assert flops[PREDICTIONS] == 2 * segments_for(64, 16) * 16 * (8 * block + 3 * head)


def test_the_hidden_states_that_allocation_keeps_count(tmp_path, monkeypatch):
    """Oracle: what is taken for hidden states by the allocation, before the compression begins with its own."""
    taken, make = [], Activations.__init__
    monkeypatch.setattr("hasslefree.models.calibrate.PROBED", 32)
    monkeypatch.setattr(
        Activations, "__init__", lambda self, *its: make(self, *its) or taken.append(self.states.nbytes)
    )
    recipe = Recipe(rank=2, allocate="error", effort="fast", samples=6, seqlen=16, rounds=1, check=False)
    setup = planned(tmp_path / "model", recipe)
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments(6, 16))
    assert estimate(setup).activations == sum(taken[:-1])
    uniform = planned(tmp_path / "one", dataclasses.replace(recipe, allocate="uniform"))
    assert estimate(uniform).activations == taken[-1]
    wide = estimate(planned(tmp_path / "wide", recipe, vocab_size=10**6))
    assert wide.device["logits"] == 5 * 4 * 16 * 10**6


def test_what_prediction_matching_holds_counts_and_has_a_remedy(tmp_path, free, monkeypatch):
    recipe = dataclasses.replace(FAST, match_predictions=64)
    setup = planned(tmp_path / "model", recipe, num_hidden_layers=8)
    kept = sum(layer.spec.parameters for layer in setup.layers)
    terms = estimate(setup).ram
    assert terms["masters"] == 4 * 4 * kept
    assert terms["compressed blocks"] == sum(layer.bytes for layer in setup.layers)
    blockwise, _ = next(option for option in remedies(setup) if "match_predictions" in option[1])
    free(estimate(dataclasses.replace(blockwise, prefetch=False)).ram_peak + 10)
    with pytest.raises(MemoryShortError, match="it fits with match_predictions=0, which keeps one block in memory"):
        check_memory(dataclasses.replace(setup, storage="disk"))
    monkeypatch.setattr("hasslefree.planning.memory.in_one_pass", lambda *args: False)
    assert estimate(setup).ram["training step"] < terms["training step"]
    on_gpu = [dataclasses.replace(setup, device=GPU, storage=storage) for storage in ("device", "cpu")]
    assert [estimate(each).device["masters"] for each in on_gpu] == [4 * 4 * kept, 0]
    assert [estimate(each).ram.get("masters", 0) for each in on_gpu] == [0, 4 * 4 * kept]


def test_probes_that_do_not_fit_have_a_remedy(tmp_path, free):
    setup = planned(tmp_path, Recipe(rank=2, allocate="error", match_predictions=0, samples=6, seqlen=16), "disk")
    fast, text = next(option for option in remedies(setup) if "effort" in option[1])
    assert text.endswith("which runs no probes")
    assert estimate(fast).ram_peak < estimate(setup).ram_peak


def test_processes_of_one_machine_share_its_memory(tmp_path, monkeypatch):
    """A run that needs a third of what is free fits twice, and not four times."""
    setup = dataclasses.replace(planned(tmp_path / "model"), storage="disk", prefetch=False)
    monkeypatch.setattr("hasslefree.planning.machine.CGROUPS", tmp_path)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0)))
    available = 3 * estimate(setup).ram_peak
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available, total=10**12))
    check_memory(setup)
    check_memory(dataclasses.replace(setup, processes=2))
    with pytest.raises(MemoryShortError, match="not enough memory"):
        check_memory(dataclasses.replace(setup, processes=4))
    # Four processes on two machines: torchrun says how many are on this one.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(dataclasses.replace(setup, processes=4))


def test_each_process_counts_its_own_masters(tmp_path):
    """Free memory is divided among the processes, so its need must not be multiplied by them too."""
    recipe = dataclasses.replace(FAST, match_predictions=64)
    setup = dataclasses.replace(planned(tmp_path / "model", recipe), device=GPU, storage="cpu")
    alone, of_four = (estimate(dataclasses.replace(setup, processes=count)).ram for count in (1, 4))
    assert of_four["masters"] == alone["masters"] > 0


def test_free_memory_is_what_the_machine_has():
    assert 10**8 < free_memory(CPU) < 10**14
