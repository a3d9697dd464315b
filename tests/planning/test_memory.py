"""What a plan promises is what a run takes."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import (
    BudgetError,
    GridError,
    MemoryShortError,
    ModelError,
    OutputError,
    UnknownNameError,
)
from hasslefree.models.activations import Activations
from hasslefree.models.load import load_on_disk
from hasslefree.packed.linear import compressed_layers
from hasslefree.planning.disk import bytes_on_disk
from hasslefree.planning.duration import flops_by_phase, passes_by_group
from hasslefree.planning.machine import free_memory
from hasslefree.planning.memory import (
    BLOCK,
    ENDS,
    LOADED,
    MASTERS,
    PREFETCH,
    SOLVER,
    STATES,
    TRAINING,
    check_memory,
    disk_bytes,
    estimate,
    states_bytes,
    total,
    training_bytes,
)
from hasslefree.planning.schedule import segments_for
from hasslefree.planning.setup import setup_of
from hasslefree.planning.tables import plan_summary, plan_table
from hasslefree.progress import ALLOCATION, CHECK, INPUTS, PREDICTIONS, PROBES, REFERENCE, SOLVING
from hasslefree.units import size
from tests.tiny_models import FAMILIES, build, segments, tensors_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FAST = Recipe(rank=2, effort="fast", samples=6, seqlen=16, check=False)
TRAINED = dataclasses.replace(FAST, match_predictions=64)


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free, in bytes, on every device or by type of device."""

    def set_free(memory):
        found = memory if isinstance(memory, dict) else dict.fromkeys(("cpu", "cuda"), memory)
        monkeypatch.setattr("hasslefree.planning.memory.free_memory", lambda device, processes: found[device.type])

    return set_free


@pytest.fixture(autouse=True)
def large_machine(monkeypatch):
    """Every device has a terabyte."""
    monkeypatch.setattr("hasslefree.planning.machine.total_memory", lambda device: 10**12)
    monkeypatch.setattr("hasslefree.planning.memory.free_memory", lambda device, processes: 10**12)


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
    disk = bytes_on_disk(setup.model, setup.plan) - 50_000_000
    report = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    written = tensors_of(tmp_path / "out")
    stored_bytes = sum(tensor.nbytes for tensor in written.values())
    assert (recipe.factor_bits == 8) == any(tensor.dtype == torch.int8 for tensor in written.values())
    assert disk == stored_bytes if recipe.pattern != "row" else disk >= stored_bytes > 0
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


ROUNDED = {"method": "rtn", "offset": True}
PRUNED = {"method": "joint-grid", "pattern": "2:4", "rank": 0, "rounds": 1}
ENTROPY_CODED = {"method": "rtn", "coding": "entropy", "bits": 5, "group_size": None}
TO_RUN = [*({**ROUNDED, "bits": bits} for bits in (3, 4, 6)), {**PRUNED, "bits": 6}, ENTROPY_CODED]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fields", TO_RUN, ids=str)
def test_bytes_to_run_are_those_of_a_loaded_model(fields, dtype, tmp_path):
    """Oracle: the tensors of the model after a call, and what its kernels hold."""
    build("llama").to(dtype).save_pretrained(tmp_path / "model")
    recipe = Recipe(**({"group_size": 16, "samples": 4, "seqlen": 16} | fields))
    plan = plan_summary(setup_of(str(tmp_path / "model"), recipe, CPU, "device"))
    hasslefree.compress(build("llama").to(dtype), tmp_path / "out", recipe, segments=segments())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model(segments(1, 4))
    held = sum(layer.held_bytes for layer in compressed_layers(model).values())
    assert held
    buffers = [buffer for name, buffer in model.named_buffers() if "inv_freq" not in name]
    assert plan["to_run"] == held + sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))


def test_training_holds_the_codes_that_are_decoded(tmp_path):
    """More than the same layers in fixed codes, by a byte for each weight."""
    settings = {"method": "rtn", "bits": 4, "group_size": None, "samples": 4, "seqlen": 16, "match_predictions": 64}
    build("llama").save_pretrained(tmp_path)
    fixed = setup_of(str(tmp_path), Recipe(**settings, coding="fixed"), CPU, "device")
    coded = setup_of(str(tmp_path), Recipe(**settings, coding="entropy"), CPU, "device")
    stored = sum(layer.size for layer in coded.plan.layers) - sum(layer.size for layer in fixed.plan.layers)
    weights = sum(layer.dense_parameters for layer in coded.plan.layers)
    assert training_bytes(coded) - training_bytes(fixed) >= stored + weights


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
    assert content["ram_peak"] == content["device_peak"] == total(content["memory"]["ram"])
    assert f"peak of RAM {size(content['ram_peak'])}" in " ".join(text.split())
    assert sum(layer["count"] for layer in content["layers"]) == 14
    assert content["layers"][0]["shape"] == [32, 32]
    best = as_text(planned(tmp_path, Recipe(rank=2, effort="best", seqlen=16)))
    assert [step in text for step in (ALLOCATION, PREDICTIONS)] == [False, False]
    assert [step in best for step in (ALLOCATION, PREDICTIONS)] == [True, True]


def last_line(setup):
    assert (plan_summary(setup)["problem"] is None) == ("It fits" in as_text(setup))
    return " ".join(as_text(setup).rpartition("\n\n")[2].split())


def test_a_plan_ends_with_whether_it_fits_and_what_to_change(tmp_path, free, monkeypatch):
    """Oracle: what `check_memory` accepts, and the bytes that are free."""
    setup = planned(tmp_path)
    need = bytes_on_disk(setup.model, setup.plan)
    assert last_line(setup).startswith("It fits, in memory and on this disk, and takes about ")
    large = dataclasses.replace(setup, samples=10**6)
    free(peak_without(large, STATES, PREFETCH))
    assert last_line(large) == "It does not fit in memory; it fits with --activations disk."
    free(1)
    assert last_line(large) == "It does not fit in memory; it needs a machine with more memory."
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need - 1))
    assert "This disk has 50.1 MB free of the 50.1 MB needed" in last_line(large)
    free(10**15)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need))
    assert "It fits" in last_line(setup)
    trained = planned(tmp_path / "trained", TRAINED)
    assert "This disk has" in last_line(trained), "blocks are written twice"


def test_the_disk_holds_what_is_converted_and_hidden_states_too(tmp_path):
    """Oracle: the files that are written while the model is opened, and the bytes of the states."""
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    one, two = (setup_of(str(tmp_path / "model"), FAST, CPU, "disk", processes) for processes in (1, 2))
    (tmp_path / "scratch").mkdir()
    load_on_disk(str(tmp_path / "model"), "auto", tmp_path / "scratch")
    converted = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "scratch").values())
    assert converted
    folder = bytes_on_disk(one.model, one.plan)
    assert disk_bytes(one) == folder + converted + states_bytes(one)
    assert disk_bytes(two) == folder + 2 * (converted + states_bytes(two))


def test_a_disk_without_room_for_hidden_states_is_refused_before_the_work(tmp_path, monkeypatch):
    setup = planned(tmp_path / "model", storage="disk")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=disk_bytes(setup) - 1))
    model, out = build("llama"), tmp_path / "out"
    with pytest.raises(OutputError, match="are needed; make room or choose another disk"):
        hasslefree.compress(model, out, FAST, segments=segments(6), activations="disk")
    hasslefree.compress(model, out, dataclasses.replace(FAST, rounds=1), segments=segments(6))


def test_dense_layers_of_trained_blocks_are_written_twice_too(tmp_path):
    """Oracle: the tensors of the blocks in the folder."""
    recipe = dataclasses.replace(TRAINED, leave_dense=("*.mlp.*",))
    setup = planned(tmp_path / "model", recipe)
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    blocks = sum(t.nbytes for name, t in tensors_of(tmp_path / "out").items() if ".layers." in name)
    assert disk_bytes(setup) == bytes_on_disk(setup.model, setup.plan) + blocks


def test_with_minutes_the_fine_tuning_takes_the_rest_of_them(tmp_path):
    recipe = Recipe(rank=2, minutes=30, samples=6, seqlen=16, check=False)
    assert "about 30 min" in as_text(planned(tmp_path, recipe))


def peak_without(setup, *names):
    return total(estimate(setup).without(*names).ram)


def test_terms_grow_with_what_they_count(tmp_path):
    """Oracle: the bytes of parameters, and twice or half as much of what a term counts."""
    setup = planned(tmp_path / "one")
    terms = estimate(setup).ram
    more = estimate(planned(tmp_path / "words", vocab_size=6400)).ram
    assert more[ENDS] - terms[ENDS] == 2 * 2 * 4 * (6400 - 64) * 32
    assert {name for name in terms if terms[name] != more[name]} == {ENDS}
    assert terms[BLOCK] > sum(p.nbytes for p in setup.blocks.modules[0].parameters())
    for changes, factor in (({"processes": 2}, 1 / 2), ({"width": 64}, 2), ({"samples": 12}, 2)):
        assert estimate(dataclasses.replace(setup, **changes)).ram[STATES] == factor * terms[STATES]
    wide, wider = (estimate(planned(tmp_path / "wide", intermediate_size=width)).ram for width in (4800, 9600))
    assert 3 < wider[SOLVER] / wide[SOLVER] < 4  # nearly the square of the inputs
    joint, other = (
        planned(tmp_path / method, dataclasses.replace(FAST, method=method)) for method in ("joint", "eora")
    )
    assert estimate(joint).ram[SOLVER] < estimate(other).ram[SOLVER]
    checked = planned(tmp_path / "checked", dataclasses.replace(FAST, check=True))
    assert states_bytes(checked) - terms[STATES] == 2 * 2 * 32 * 16 * 32 * 4  # of both models, on text and code
    assert estimate(checked).ram[ENDS] > terms[ENDS]


def test_where_the_hidden_states_count(tmp_path):
    device, disk = (estimate(planned(tmp_path / storage, storage=storage)) for storage in ("device", "disk"))
    assert device.ram[STATES] == states_bytes(device.setup)
    assert STATES not in disk.ram
    on_gpu, moved = (estimate(planned(tmp_path / "gpu", storage=storage, device=GPU)) for storage in ("device", "cpu"))
    assert on_gpu.device[STATES] == moved.ram[STATES]
    assert STATES not in on_gpu.ram | moved.device


def test_a_model_that_is_loaded_counts_whole(tmp_path, free):
    """Oracle: the bytes of its parameters."""
    model = build("llama")
    loaded = dataclasses.replace(planned(tmp_path, storage="disk"), model=model)
    whole, block = (sum(p.nbytes for p in part.parameters()) for part in (model, model.model.layers[0]))
    terms = estimate(loaded).ram
    assert terms[LOADED] == whole - block
    assert estimate(planned(tmp_path)).ram[PREFETCH] - terms[PREFETCH] == block  # which is not read
    free(peak_without(loaded, PREFETCH) - 1)
    with pytest.raises(MemoryShortError, match="it fits with .*folder instead of the loaded model"):
        check_memory(loaded)


def test_a_run_that_will_not_fit_is_refused_with_an_option_that_fits(tmp_path, free):
    setup = dataclasses.replace(planned(tmp_path), samples=10**6)
    free(peak_without(setup, STATES, PREFETCH))
    with pytest.raises(MemoryShortError, match=r"fits with activations='disk'\n(.|\n)*peak of RAM: .* available: "):
        check_memory(setup)
    assert not check_memory(dataclasses.replace(setup, storage="disk"))


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_if_memory_is_short_nothing_is_read_or_written_in_the_background(device, tmp_path, free, caplog):
    """Oracle: the peaks of the footprint."""
    setup = planned(tmp_path, storage="disk", device=device)
    peak = total(estimate(setup).ram)
    free({"cpu": peak, "cuda": 10**12})
    assert check_memory(setup)
    free({"cpu": peak - 1, "cuda": 10**12})
    with caplog.at_level("INFO", "hasslefree"):
        assert not check_memory(setup)
    assert "not enough memory to read and write blocks in the background" in caplog.text
    assert PREFETCH not in plan_summary(setup)["memory"]["ram"]


def test_what_to_do_if_a_gpu_is_too_small(tmp_path, free):
    setup = dataclasses.replace(planned(tmp_path, device=GPU), samples=10**6)
    footprint = estimate(setup)
    enough = total(footprint.without(STATES).device)
    for device, ram, remedy in (
        (enough, 10**12, "it fits with activations='cpu'"),
        (enough, total(footprint.ram), "it fits with activations='disk'"),
        (10**8, 10**12, r"a GPU with more memory, or device='cpu'\npeak of cuda: "),
    ):
        free({"cuda": device, "cpu": ram})
        with pytest.raises(MemoryShortError, match=remedy):
            check_memory(setup)


def test_what_prediction_matching_holds_counts_and_has_a_remedy(tmp_path, free, monkeypatch):
    """Oracle: the plan of the layers."""
    setup = planned(tmp_path / "model", TRAINED, storage="disk", num_hidden_layers=8)
    terms = estimate(setup).ram
    assert terms[MASTERS] == 4 * 4 * sum(layer.parameters for layer in setup.plan.layers)
    assert terms[TRAINING] > setup.plan.size
    free(peak_without(setup, TRAINING, MASTERS, PREFETCH))
    with pytest.raises(MemoryShortError, match="it fits with match_predictions=0, which keeps one block in memory"):
        check_memory(setup)
    monkeypatch.setattr("hasslefree.planning.memory.in_one_pass", lambda *args: False)
    assert estimate(setup).ram[TRAINING] < terms[TRAINING]
    for storage, holds in (("device", [True, False]), ("cpu", [False, True])):
        footprint = estimate(dataclasses.replace(setup, device=GPU, storage=storage))
        assert [MASTERS in footprint.device, MASTERS in footprint.ram] == holds


@pytest.mark.parametrize("fields", [{"rank": 2, "allocate": "error"}, {"size": "9bits"}], ids=str)
def test_probes_that_do_not_fit_have_a_remedy(fields, tmp_path, free, monkeypatch):
    """Oracle: the plan of the recipe with the options that the error names."""
    recipe = Recipe(samples=6, seqlen=16, **fields)
    changed = dataclasses.replace(recipe, allocate="uniform", match_predictions=0)
    setup, without = (dataclasses.replace(planned(tmp_path, each, "disk"), seqlen=10**4) for each in (recipe, changed))
    monkeypatch.setattr("hasslefree.planning.memory.FORWARD", 0)
    free(peak_without(setup, "probes", TRAINING, MASTERS, PREFETCH))
    with pytest.raises(MemoryShortError, match=r"allocate='uniform' match_predictions=0 activations='disk', which"):
        check_memory(setup)
    check_memory(without)


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
    assert states_bytes(setup) == sum(taken[:-1])
    uniform = planned(tmp_path / "one", dataclasses.replace(recipe, allocate="uniform"))
    assert states_bytes(uniform) == taken[-1]


def test_flops_by_hand(tmp_path):
    """Oracle: the parameters of Llama: two blocks, a head, and layers with 32 and with 48 inputs."""
    recipe = Recipe(rank=2, allocate="error", match_predictions=64, rounds=20, samples=6, seqlen=16)
    flops = flops_by_phase(planned(tmp_path / "dense", recipe))
    block, head, tokens = 7_744, 64 * 32, 6 * 16
    volume = 2 * (2 * 32 * 32**2 + 2 * 16 * 32**2 + 2 * 48 * 32**2 + 32 * 48**2)
    checked = 2 * 2 * 32 * 16  # of both models, on text and code
    assert flops[INPUTS] == 2 * tokens * (2 * (6 * 32**2 + 48**2) + 2 * block) + 2 * checked * 2 * block
    assert flops[CHECK] == 2 * checked * head
    assert flops[SOLVING] == 2 * (50 + 20) * volume
    assert flops[PROBES] == 2 * tokens * (2 * block + head)
    assert flops[ALLOCATION] > 2 * flops[PROBES]
    assert flops[REFERENCE] == 2 * segments_for(64, 16) * 16 * 2 * block
    assert flops[PREDICTIONS] == 2 * segments_for(64, 16) * 16 * (8 * block + 3 * head)
    owl = flops_by_phase(
        planned(tmp_path / "owl", Recipe(sparsity=0.5, pattern="unstructured", method="wanda", allocate="owl"))
    )
    assert owl[ALLOCATION] > owl[INPUTS] / 2, "the inputs are collected twice"


def test_a_first_block_that_stays_dense_does_not_hide_the_passes_of_the_others(tmp_path):
    rest = dataclasses.replace(FAST, leave_dense=("*.layers.0.*",))
    assert passes_by_group(planned(tmp_path / "rest", rest)) == passes_by_group(planned(tmp_path / "all")) == 4.5


@pytest.mark.parametrize(
    ("file", "name", "fields"),
    [
        ("whole_files_SmolLM2-135M-Instruct", "5.2bits, fast", {"size": "5.2bits", "effort": "fast"}),
        ("whole_files_SmolLM2-135M-Instruct", "2:4 in 6 bits + rank 96, fast",
         {"pattern": "2:4", "bits": 6, "rank": 96, "effort": "fast"}),
        ("two_four", "balanced", {"pattern": "2:4", "rank": 16}),
    ],
)  # fmt: skip
def test_phases_take_the_time_that_was_measured(file, name, fields, tmp_path):
    """Oracle: the seconds of SmolLM2-135M, which say how fast the machine was while inputs were collected."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    LlamaConfig(**sizes, **heads, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    recipe = Recipe(samples=64, seqlen=512, check=False, **fields)
    flops = flops_by_phase(setup_of(str(tmp_path), recipe, CPU, "device"))
    results = Path(__file__).parents[2] / "benchmarks" / "results" / f"{file}.json"
    measured = json.loads(results.read_text())["results"][name]["0"]["phases"]
    estimated = {phase: flops[phase] * measured[INPUTS] / flops[INPUTS] for phase in flops}
    assert 0.7 < sum(estimated.values()) / sum(measured[phase] for phase in flops) < 1.4


@pytest.mark.parametrize(("method", "at_least"), [("hassle-free", 100), ("oats", 100), ("eora", 3), ("3basil", 10)])
def test_methods_take_longer_than_wanda(method, at_least, tmp_path):
    """Oracle: benchmarks/results/layers.json, in which they take 400, 180, 5 and 180 times as long."""
    flops = {}
    for name, fields in {method: {"rank": 2}, "wanda": {}}.items():
        setup = planned(tmp_path / name, Recipe(method=name, seqlen=16, pattern="2:4", **fields))
        flops[name] = flops_by_phase(setup)[SOLVING]
    assert flops[method] > at_least * flops["wanda"]


def test_processes_of_one_machine_share_its_memory(tmp_path, monkeypatch):
    """A run that needs a third of what is free fits twice, and not four times."""
    setup = planned(tmp_path / "model", storage="disk")
    monkeypatch.setattr("hasslefree.planning.memory.free_memory", free_memory)
    monkeypatch.setattr("hasslefree.planning.machine.CGROUPS", tmp_path)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0)))
    available = 3 * total(estimate(setup).ram)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available, total=10**12))
    check_memory(setup)
    check_memory(dataclasses.replace(setup, processes=2))
    with pytest.raises(MemoryShortError, match="not enough memory"):
        check_memory(dataclasses.replace(setup, processes=4))
    # Four processes on two machines: torchrun says how many are on this one.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(dataclasses.replace(setup, processes=4))
