"""Several processes give what one gives."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.distributed import World, lost_peers, process_group
from hasslefree.errors import CalibrationError, DistributedError
from hasslefree.pipeline.compress import workplace
from hasslefree.pipeline.preflight import check_segments
from tests.listeners import by_layer, free_port
from tests.tiny_models import NO_TOKENIZER, build, segments, tensors_of

forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


@given(costs=st.lists(st.floats(0, 1e9), max_size=12), size=st.integers(1, 5))
def test_every_job_is_dealt_once_and_nobody_has_much_more(costs, size):
    """Oracle: the bound of the greedy rule, mean load + largest job (Graham 1969)."""
    owners = World(0, size).assign(costs)
    assert len(owners) == len(costs)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]
    assert max(loads) <= sum(costs) / size + max(costs, default=0) + 1e-3
    assert set(owners) <= set(range(size))


def test_every_process_is_bound_to_its_own_gpu(monkeypatch):
    """NCCL would send the objects of all of them through the first one."""
    calls = []
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: calls.append(("bound", device)))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    device = torch.device("cuda:1")
    with process_group(device) as world:
        assert world == World(1, 2)
    [(_, bound), (args, options)] = calls
    assert bound == device
    assert args == ("nccl",)
    assert options["device_id"] == device


@given(count=st.integers(1, 20), size=st.integers(1, 5))
def test_every_segment_is_somebodys(count, size):
    rows = torch.arange(count)[:, None]
    shares = torch.cat([World(rank, size).share(rows) for rank in range(size)])
    assert shares.flatten().sort().values.tolist() == list(range(count))
    numbers = torch.randperm(count).tolist()
    for rank in range(size):
        world = World(rank, size)
        expected = [i for i in numbers if i in world.share(rows)]
        assert world.share(rows)[world.local(numbers)].flatten().tolist() == expected


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes that are started: on two, sums are rounded otherwise, and a near tie falls otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def process(
    rank, size, port, out, recipe, stop_after=None, activations="device", family="llama", source=None, dtype=None
):
    """One of the processes that torchrun would start. source: the folder of a model that is read block by block."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def progress(report, done, total):
        if done == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    how = {"resume": True, "activations": activations, "progress": by_layer(progress), "segments": segments(6, 32)}
    how |= {"tokenizer": NO_TOKENIZER, "device": "cpu"} if source else {}
    report = hasslefree.compress(source or build(family).to(dtype), out, recipe, **how)
    in_blocks = [layer for layer in report.layers if ".layers." in layer.name]
    assert len(in_blocks) == {"llama": 14, "mixtral": 32}[family]


def run(size, out, recipe, **options):
    """Exit codes of `size` processes."""
    context, port = multiprocessing.get_context("fork"), free_port()
    started = [context.Process(target=process, args=(r, size, port, out, recipe), kwargs=options) for r in range(size)]
    for each in started:
        each.start()
    for each in started:
        each.join(120)
    return [each.exitcode for each in started]


@forked
def test_a_layer_travels_in_the_dtype_of_the_model(tmp_path, monkeypatch):
    """Where a processor has no products of bfloat16, the matrices of the block are float32 meanwhile."""
    monkeypatch.setattr("hasslefree.models.precision.multiplies_bfloat16", lambda device: False)
    recipe = Recipe(rank=2, method="eora")
    one = hasslefree.compress(build("llama").bfloat16(), tmp_path / "one", recipe, segments=segments(6, 32))
    assert run(2, tmp_path / "many", recipe, dtype=torch.bfloat16) == [0, 0]
    stored = json.loads((tmp_path / "many" / "compression.json").read_text())
    for mine, layer in zip(one.layers, stored["layers"], strict=True):
        assert layer["relative_error"] == pytest.approx(mine.relative_error, rel=0.02)


@forked
@pytest.mark.parametrize(
    ("size", "method", "sequential"),
    [
        (3, "joint", "layer"),
        pytest.param(2, "joint", "block", marks=pytest.mark.nightly),
        pytest.param(2, "eora", "layer", marks=pytest.mark.nightly),
        (2, "caldera", "block"),
    ],
)
def test_the_result_is_that_of_one_process(size, method, sequential, tmp_path, monkeypatch):
    """Oracle: one process. Sums are rounded in another order: supports and objective are the same.

    In float64, where no near tie is as near as a rounding: in float32 one falls otherwise on one processor or another.
    """
    monkeypatch.setattr("hasslefree.core.products.multiplies_bfloat16", lambda device: False)
    grid = {"rounds": 2, "group_size": 16} if method == "caldera" else {}
    recipe = Recipe(rank=2, method=method, sequential=sequential, **grid)
    one = hasslefree.compress(build("llama").double(), tmp_path / "one", recipe, segments=segments(6, 32))
    assert run(size, tmp_path / "many", recipe, dtype=torch.float64) == [0] * size
    expected, found = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        if name.endswith((".positions", ".weight_packed")):
            assert torch.equal(found[name], tensor), name
    stored = json.loads((tmp_path / "many" / "compression.json").read_text())
    for mine, layer in zip(one.layers, stored["layers"], strict=True):
        assert layer["name"] == mine.name
        assert layer["relative_error"] == pytest.approx(mine.relative_error, rel=1e-4)


ALLOCATED = Recipe(rank=8, rounds=3, allocate="error")
SIZED = Recipe(size="8bits", group_size=16, scale_bits=16, effort="fast")  # embedding and head too


@forked
@pytest.mark.parametrize(
    ("recipe", "probed", "size"),
    [
        *(pytest.param(ALLOCATED, *numbers, marks=pytest.mark.nightly) for numbers in ((32, 3), (4096, 2))),
        (SIZED, 32, 3),
    ],
)
def test_budgets_are_allocated_by_several_as_by_one(recipe, probed, size, tmp_path, monkeypatch):
    """Oracle: one process. With one probe there are processes that have none."""
    monkeypatch.setattr("hasslefree.models.calibrate.PROBED", probed)
    one = hasslefree.compress(build("llama"), tmp_path / "one", recipe, segments=segments(6, 32))
    specs = [layer.spec for layer in one.layers]
    assert len({(spec.rank, spec.grid) for spec in specs}) > 2
    assert run(size, tmp_path / "many", recipe, activations="disk") == [0] * size
    many = json.loads((tmp_path / "many" / "compression.json").read_text())
    assert [layer["rank"] for layer in many["layers"]] == [spec.rank for spec in specs]
    bits = [layer["grid"]["bits"] for layer in many["layers"] if "grid" in layer]
    assert bits == [spec.grid.bits for spec in specs if spec.grid]
    assert many["sensitivities"] == pytest.approx(one.sensitivities, rel=1e-3)


@forked
def test_experts_are_compressed_by_several_as_by_one(tmp_path):
    """Oracle: one process. Which tokens of others an expert sees depends on those that come in together."""
    recipe = Recipe(rank=2, effort="fast", rounds=3)
    one = hasslefree.compress(build("mixtral"), tmp_path / "one", recipe, segments=segments(6, 32))
    assert run(2, tmp_path / "many", recipe, family="mixtral") == [0] * 2
    many = json.loads((tmp_path / "many" / "compression.json").read_text())["layers"]
    assert len(many) == len(one.layers) == 2 * (4 + 4 * 3)
    for mine, found in zip(one.layers, many, strict=True):
        assert found["name"] == mine.name
        assert found["relative_error"] == pytest.approx(mine.relative_error, rel=0.2)


@forked
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_predictions_are_matched_by_several_as_by_one(size, tmp_path):
    """Oracle: one process. Steps have sums in another order, and one segment judges: some processes have none."""
    recipe = Recipe(rank=2, method="eora", match_predictions=160)
    one = hasslefree.compress(build("llama"), tmp_path / "one", recipe, segments=segments(6, 32))
    assert run(size, tmp_path / "many", recipe) == [0] * size
    many = json.loads((tmp_path / "many" / "compression.json").read_text())["predictions"]
    assert many["tokens"] == one.predictions["tokens"] == 160
    assert many["after"] < many["before"]
    for name in ("before", "after", "history"):
        assert many[name] == pytest.approx(one.predictions[name], rel=1e-2), name


@forked
@pytest.mark.nightly
def test_factors_in_eight_bits_go_from_process_to_process(tmp_path):
    """Oracle: one process. A code may round otherwise: the errors are nearly the same."""
    recipe = Recipe(rank=2, method="eora", factor_bits=8)
    one = hasslefree.compress(build("llama"), tmp_path / "one", recipe, segments=segments(6, 32))
    assert run(2, tmp_path / "many", recipe) == [0, 0]
    found = tensors_of(tmp_path / "many")
    assert {tensor.dtype for name, tensor in found.items() if name.endswith("low_rank_u")} == {torch.int8}
    assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in tensors_of(tmp_path / "one").items()}
    stored = json.loads((tmp_path / "many" / "compression.json").read_text())
    for mine, layer in zip(one.layers, stored["layers"], strict=True):
        assert layer["relative_error"] == pytest.approx(mine.relative_error, rel=1e-2)


@forked
def test_what_several_began_they_go_on_with(tmp_path):
    """Oracle: two processes that nothing interrupted."""
    assert run(2, tmp_path / "whole", ALLOCATED) == [0, 0]
    codes = run(2, tmp_path / "out", ALLOCATED, stop_after=10)
    assert all(codes)
    assert (tmp_path / "out.unfinished" / "progress.json").exists()
    assert run(2, tmp_path / "out", ALLOCATED) == [0, 0]
    whole, out = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert whole == out


@forked
def test_each_process_reads_and_one_writes_beside_the_work(tmp_path):
    """Oracle: two processes with the model in memory, one of them killed while a block is compressed."""
    recipe = Recipe(rank=2, method="eora")
    build("llama").save_pretrained(tmp_path / "dense")
    assert run(2, tmp_path / "memory", recipe) == [0, 0]
    assert all(run(2, tmp_path / "disk", recipe, source=tmp_path / "dense", stop_after=10))
    assert run(2, tmp_path / "disk", recipe, source=tmp_path / "dense") == [0, 0]
    memory, disk = (tensors_of(tmp_path / name) for name in ("memory", "disk"))
    assert memory.keys() == disk.keys()
    assert all(torch.equal(disk[name], tensor) for name, tensor in memory.items())


def two_groups(rank, port):
    """One process of two that form a group twice; the first writes something at the end of each."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for turn in range(2):
        with process_group(torch.device("cpu")) as world:
            assert world.broadcast(turn) == turn
            time.sleep(1 - rank)


def test_an_error_of_a_lost_peer_may_have_no_text():
    with pytest.raises(DistributedError, match="another process of this compression has failed"), lost_peers():
        raise RuntimeError


def test_every_process_counts_the_files_of_an_earlier_run_as_the_first_does(tmp_path):
    """Those that --overwrite removes later still take room on the disk."""
    out = tmp_path / "out"
    assert run(1, out, Recipe(rank=2, method="eora"), stop_after=10) != [0]
    sent = []
    first = SimpleNamespace(writes=True, broadcast=sent.append)
    with workplace(out, True, False, first) as work:
        assert work.bytes
    other = SimpleNamespace(writes=False, broadcast=lambda _: sent[0])
    with workplace(out, True, False, other) as copy:
        assert copy.bytes == work.bytes


@forked
def test_a_second_compression_begins_once_the_first_has_written_its_files():
    context, port = multiprocessing.get_context("fork"), free_port()
    started = [context.Process(target=two_groups, args=(rank, port)) for rank in range(2)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    codes = [each.exitcode for each in started]
    for each in started:
        each.kill()
    assert codes == [0, 0]


def test_more_processes_than_segments():
    with pytest.raises(CalibrationError, match="5 processes need at least 5 calibration segments, and there are 4"):
        check_segments(build("llama"), segments(4), World(0, 5))


TORCHRUN = """
import os, pathlib, signal, sys
clock = pathlib.Path(__file__).with_suffix(".clock")
sys.argv = ["hasslefree", "compress", *sys.argv[1:]]
import hasslefree.distributed as distributed
if os.environ["RANK"] == "1":
    add = distributed.World.add
    calls = []
    def dying(self, tensor):
        calls.append(1)
        if len(calls) == 30:  # in the second block, while processes add up a Gram matrix
            clock.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, tensor)
    distributed.World.add = dying
from hasslefree.cli import run_app as main
main()
"""


@forked
@pytest.mark.nightly
def test_a_process_that_dies_ends_the_job_soon_and_is_named(tmp_path):
    """The real torchrun and the real command, on the embedded model."""
    script = tmp_path / "dying.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
               str(free_port()), str(script), str(MODEL), str(tmp_path / "out"), "--method", "wanda", "--samples", "4",
               "--seqlen", "32", "--calibration", str(CALIBRATION), "--device", "cpu"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(hasslefree.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    # What the design promises: within a minute of the death.
    assert time.time() - script.with_suffix(".clock").stat().st_mtime < 60
    assert done.returncode
    assert "rank      : 1" in done.stderr
    assert "-9" in done.stderr
    assert (tmp_path / "out.unfinished" / "progress.json").exists()
    assert not (tmp_path / "out").exists()
