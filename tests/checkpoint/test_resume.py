"""Whatever ends a compression, and whenever: what was finished is kept, and going on gives the same bytes."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint import output
from hasslefree.checkpoint import resume as journal
from hasslefree.checkpoint.resume import Progress, read_progress
from hasslefree.errors import CheckpointError, HasslefreeError, OutputError, WriteError
from hasslefree.models.calls import BlockCall
from hasslefree.pipeline import layers
from hasslefree.train.optimizer import BlockOptimizer
from tests.listeners import by_layer
from tests.tiny_models import build, segments

RECIPE = Recipe(rank=2, method="eora")
BLOCKS = 3


def compress(out, recipe=RECIPE, tokens=None, other=False, config=None, **options):
    model = build("llama", num_hidden_layers=BLOCKS)
    vars(model.config).update(config or {})
    if other:
        model.model.layers[2].mlp.up_proj.weight.data[3, 5] += 1e-3
    return hasslefree.compress(model, out, recipe, segments=segments() if tokens is None else tokens, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupted(out, after, error=KeyboardInterrupt, **options):
    """A compression that ends with an error after so many layers (seven a block)."""

    def stop(report, done, total):
        if done == after:
            raise error

    with pytest.raises(error):
        compress(out, progress=by_layer(stop), **options)
    return out.with_name(f"{out.name}.unfinished")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    compress(out)
    return contents(out)


@pytest.mark.parametrize(
    ("after", "error"), [(1, KeyboardInterrupt), (7, MemoryError), (8, KeyboardInterrupt), (21, KeyboardInterrupt)]
)
def test_going_on_gives_the_same_bytes(after, error, whole, tmp_path):
    """Oracle: the folder of an uninterrupted run."""
    seen = []
    left = interrupted(tmp_path / "out", after, error)
    assert len(list(left.glob("model/model-*"))) == 1 + (after - 1) // 7
    report = compress(tmp_path / "out", resume=True, progress=by_layer(lambda layer, done, total: seen.append(done)))
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert seen == list(range(1, 7 * BLOCKS + 1))
    assert len(report.layers) == 7 * BLOCKS


def test_the_time_is_that_of_all_runs(tmp_path):
    left = interrupted(tmp_path / "out", after=8)
    progress = read_progress(left)
    assert 0 < progress.seconds < 600
    progress.seconds += 3600
    progress.write(left)
    assert 3600 < compress(tmp_path / "out", resume=True).seconds < 4200


@pytest.mark.parametrize("bits", [None, 8])
def test_going_on_with_s_on_a_grid(bits, tmp_path):
    """Oracle: a run that nothing interrupted."""
    recipe = Recipe(rank=2, method="caldera", rounds=1, pattern="2:4", group_size=16, factor_bits=bits)
    compress(tmp_path / "whole", recipe)
    interrupted(tmp_path / "out", 15, recipe=recipe)
    compress(tmp_path / "out", recipe, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_finished_blocks_run_on_as_many_segments_at_a_time_as_before(tmp_path, monkeypatch):
    """Oracle: the first run. A product with more rows may be rounded differently."""
    monkeypatch.setattr("hasslefree.models.calibrate.BATCH", 16)  # one segment
    interrupted(tmp_path / "out", 15)
    model, sizes = build("llama", num_hidden_layers=BLOCKS), []
    model.model.layers[0].register_forward_pre_hook(lambda block, args: sizes.append(len(args[0])))
    hasslefree.compress(model, tmp_path / "out", RECIPE, segments=segments(), resume=True)
    assert sizes[-1] == len(segments())


def test_finished_blocks_are_not_solved_again(tmp_path, monkeypatch):
    interrupted(tmp_path / "out", 15)
    solved = []
    solve = layers.solve_layer
    monkeypatch.setattr(layers, "solve_layer", lambda *a: solved.append(1) or solve(*a))
    compress(tmp_path / "out", resume=True)
    assert len(solved) == 7


@pytest.mark.parametrize("place", ["a step", "a new file", "the journal", "an old file"])
def test_matching_predictions_is_done_again_or_has_been_done(place, tmp_path, monkeypatch):
    """Oracle: the folder of an uninterrupted run."""
    recipe, passed = Recipe(rank=2, method="eora", match_predictions=32), 0
    compress(tmp_path / "whole", recipe)

    def dying(owner, name, counts=lambda *args: True, at=2):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal passed
            passed += counts(*args)
            if passed == at:
                passed += 1
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    if place == "a step":
        dying(BlockOptimizer, "update")
    elif place == "a new file":
        dying(journal, "save", lambda file, tensors: "model-" in file.name, at=3)
    elif place == "the journal":
        dying(Progress, "write", lambda self, folder: self.predictions is not None, at=1)
    else:
        dying(Path, "unlink", lambda path: "fitted-" in path.name)
    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path / "out", recipe)
    steps, runs = [], []
    step, run = BlockOptimizer.update, BlockCall.run
    monkeypatch.setattr(BlockOptimizer, "update", lambda *args: steps.append(1) or step(*args))
    monkeypatch.setattr(BlockCall, "run", lambda *args: runs.append(len(args[2])) or run(*args))
    compress(tmp_path / "out", recipe, resume=True)
    assert bool(steps) == (place != "an old file")
    assert steps or max(runs) <= 2, "nobody reads what the calibration text becomes"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_matched_block_that_is_gone_begins_them_all_anew(tmp_path, monkeypatch):
    """Oracle: the folder of an uninterrupted run. What the other blocks were before is not there any more."""
    recipe = Recipe(rank=2, method="eora", match_predictions=32)
    compress(tmp_path / "whole", recipe)

    def stop(*args):
        raise KeyboardInterrupt

    finish = journal.Unfinished.finish
    monkeypatch.setattr(journal.Unfinished, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path / "out", recipe)
    monkeypatch.setattr(journal.Unfinished, "finish", finish)
    (tmp_path / "out.unfinished" / "model" / "model-00003-of-00004.safetensors").unlink()
    compress(tmp_path / "out", recipe, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def die_at(out, point, resume):
    """In a process of its own: SIGKILL at the point-th time that bytes are about to be made safe or renamed.

    A file that is being written is half there then.
    """
    passed = 0

    def count(path=None):
        nonlocal passed
        passed += 1
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def half(tensors, path, metadata):
        save(tensors, path, metadata=metadata)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        count()
        path.write_bytes(whole)

    save, sync, rename = journal.save_file, output.sync, Path.rename
    journal.save_file = half
    journal.sync = output.sync = lambda path: (count(), sync(path))
    Path.rename = lambda path, target: (count(), rename(path, target))[1]
    compress(out, resume=resume)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_kill_at_any_moment_of_writing_loses_nothing(step, whole, tmp_path):
    """Oracle: the folder of an uninterrupted run. A part is written in seven moments, so that every fifth moment is
    each of them once; a run is resumed after each."""
    context = multiprocessing.get_context("fork")

    def run(*arguments):
        process = context.Process(target=die_at, args=arguments)
        process.start()
        process.join(120)
        return process.exitcode

    torch.set_num_threads(1)  # forked processes have no threads of OpenMP
    point = 1 - step
    while True:
        point += step
        out = tmp_path / f"{point}"
        code = run(out, point, False)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if not out.exists():  # else it died after the folder was in place
            assert run(out, 0, True) == 0
        assert contents(out) == whole, f"point {point}"
    assert point > 30


CHANGES = {
    "the recipe": ({"recipe": Recipe(rank=3, method="eora")}, r"recipe\.rank was 2 and is 3"),
    "the text": ({"tokens": segments(seed=5)}, r"segments was '[0-9a-f]{8}' and is"),
    "the activation": ({"config": {"hidden_act": "relu"}}, "config.hidden_act was 'silu' and is 'relu'"),
    "the model": ({"other": True}, r"weights\.model\.layers\.2 was '[0-9a-f]{8}' and is"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_another_compression_is_not_gone_on_with(change, message, whole, tmp_path, monkeypatch):
    """Nor is the dense model run before this is said."""
    left = interrupted(tmp_path / "out", 8)
    before = contents(left / "model")
    with monkeypatch.context() as patch:
        patch.setattr("hasslefree.pipeline.compress.run_dense_model", lambda job: pytest.fail("late"))
        with pytest.raises(OutputError, match=f"cannot resume: the settings differ.*{message}.*overwrite=True"):
            compress(tmp_path / "out", resume=True, **change)
    assert contents(left / "model") == before
    compress(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == whole


def test_another_plan_is_not_gone_on_with(tmp_path, monkeypatch):
    """It is compared once it has been made."""
    interrupted(tmp_path / "out", 8)
    monkeypatch.setattr("hasslefree.pipeline.compress.digest", lambda plan: "another")
    with pytest.raises(OutputError, match=r"settings differ: plan was '[0-9a-f]+' and is 'another'\."):
        compress(tmp_path / "out", resume=True)


def test_a_journal_without_something_that_the_run_depends_on_is_not_gone_on_with(tmp_path):
    left = interrupted(tmp_path / "out", 8)
    file = left / "progress.json"
    content = json.loads(file.read_text())
    del content["identity"]["segments"]
    file.write_text(json.dumps(content))
    with pytest.raises(OutputError, match="settings differ: segments was None and is"):
        compress(tmp_path / "out", resume=True)


def test_another_version_does_not_go_on(tmp_path, monkeypatch):
    interrupted(tmp_path / "out", 8)
    monkeypatch.setattr("hasslefree.pipeline.metadata.versions", lambda: {"torch": "0.1"})
    with pytest.raises(OutputError, match=r"versions\.torch was '\S+' and is '0\.1'"):
        compress(tmp_path / "out", resume=True)


@pytest.mark.parametrize("discarded", [False, True])
def test_a_flipped_byte_is_found_and_its_block_done_again(discarded, whole, tmp_path):
    left = interrupted(tmp_path / "out", 15)
    file = sorted(left.glob("model/model-*"))[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged.*Delete it"):
        compress(tmp_path / "out", resume=True)
    if discarded:
        compress(tmp_path / "out", overwrite=True)
    else:
        file.unlink()
        compress(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == whole


def test_what_is_there_is_neither_used_nor_removed_unasked(whole, tmp_path):
    left = interrupted(tmp_path / "out", 15)
    before = contents(left / "model")
    with pytest.raises(OutputError, match="unfinished compression with 2 finished blocks.*resume=True.*overwrite=True"):
        compress(tmp_path / "out")
    assert contents(left / "model") == before
    compress(tmp_path / "out", Recipe(rank=3, method="eora"), overwrite=True)
    assert contents(tmp_path / "out") != whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_new_run_that_fails_its_checks_leaves_the_finished_blocks(whole, tmp_path):
    """Oracle: the folder of an uninterrupted run."""
    left = interrupted(tmp_path / "out", 15)
    before = contents(left / "model")
    with pytest.raises(HasslefreeError, match="token"):
        compress(tmp_path / "out", tokens=segments()[0], overwrite=True)
    assert contents(left / "model") == before
    compress(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == whole


def test_an_error_before_the_first_block_leaves_nothing(tmp_path):
    with pytest.raises(HasslefreeError):
        compress(tmp_path / "deep" / "out", tokens=segments()[0])
    assert not list((tmp_path / "deep").iterdir())


def test_what_was_there_comes_back_after_a_kill_between_the_last_two_renames(tmp_path):
    """OUT has gone aside then, and the new folder is not yet in its place."""
    before = tmp_path / "out.unfinished" / "before"
    before.mkdir(parents=True)
    (before / "mine.txt").write_text("precious")
    with pytest.raises(OutputError, match="not empty; use overwrite=True"):
        compress(tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


def test_a_kill_while_what_was_there_is_removed(whole, tmp_path):
    """Oracle: the folder of an uninterrupted run. The new folder is in its place, and half of the old one is left."""
    out = tmp_path / "out"
    compress(out)
    left = interrupted(out, 8, overwrite=True)
    shutil.rmtree(left / "model")
    (left / "before").mkdir()
    (left / "before" / "config.json").write_text("{}")
    compress(out, overwrite=True)
    assert contents(out) == whole
    assert not left.exists()


def test_the_journal_of_a_mixture_of_many_experts_is_read(tmp_path):
    """Kimi K2 has 69,000 matrices, which take 1.4 KB each."""
    written = Progress([], {"model": "x" * 97_000_000})
    written.write(tmp_path)
    assert read_progress(tmp_path) == written


def test_two_at_once(tmp_path):
    """The lock belongs to an open file: another one in this process is as good as another process."""
    left = interrupted(tmp_path / "out", 8)
    busy = pytest.raises(OutputError, match="another compression is writing to")
    with FileLock(left / "lock"), busy:
        compress(tmp_path / "out", resume=True)
    compress(tmp_path / "out", resume=True)


FOREIGN = {
    "file": lambda path: path.write_text("mine"),
    "folder": lambda path: (path.mkdir(), (path / "model").mkdir(), (path / "model" / "mine").touch()),
    "link": lambda path: path.symlink_to("elsewhere"),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_somebody_else_has_at_the_place_of_the_work_stays(make, tmp_path):
    make(tmp_path / "out.unfinished")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(OutputError, match=r"out\.unfinished.* was not written by hasslefree"):
        compress(tmp_path / "out", overwrite=True)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("again", ["resume", "overwrite"])
def test_notes_among_finished_blocks_stay(again, tmp_path):
    left = interrupted(tmp_path / "out", 8)
    (left / "model" / "notes").write_text("mine")
    with pytest.raises(OutputError, match=r"out\.unfinished/model/notes was not written by hasslefree"):
        compress(tmp_path / "out", **{again: True})
    assert (left / "model" / "notes").read_text() == "mine"
    (left / "model" / "notes").rename(tmp_path / "notes")
    compress(tmp_path / "out", **{again: True})
    assert not left.exists()


def test_notes_that_appear_beside_finished_blocks_stay(tmp_path):
    out, left = tmp_path / "out", tmp_path / "out.unfinished"
    compress(out, progress=by_layer(lambda layer, done, total: done == 8 and (left / "notes").touch()))
    assert (left / "notes").exists()
    assert out.exists()


@pytest.mark.parametrize("file", ["/etc/passwd", "../mine", None])
def test_a_journal_names_no_file_outside_its_folder(file, tmp_path):
    left = interrupted(tmp_path / "out", 8)
    content = json.loads((left / "progress.json").read_text())
    content["parts"][1]["file"] = file
    (left / "progress.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"progress\.json is damaged"):
        compress(tmp_path / "out", resume=True)


def test_what_appears_at_out_during_the_run_stays_and_so_does_the_work(whole, tmp_path):
    """Oracle: the folder of an uninterrupted run."""
    out = tmp_path / "out"
    appear = by_layer(lambda layer, done, total: done == 8 and (out.mkdir(), (out / "mine").touch()))
    with pytest.raises(WriteError, match=f"Directory not empty.* mv {out}.unfinished/model {out}"):
        compress(out, progress=appear)
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert contents(out.with_name("out.unfinished") / "model") == whole


def test_a_lock_that_cannot_be_opened(tmp_path):
    (tmp_path / "out.unfinished" / "lock").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"out\.unfinished cannot be written"):
        compress(tmp_path / "out")


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or os.getuid() != 0, reason="mounts a small disk")
def test_a_full_disk(whole, tmp_path):
    """A real one: room for the first block and no more."""
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {small} 2>/dev/null"):
        pytest.skip("no rights to mount")
    try:
        usage = type("Usage", (), {"free": 10**12})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda _: usage)
            with pytest.raises(WriteError, match="cannot be written.*finished blocks are kept.*resume=True"):
                compress(small / "out")
            done = len(list((small / "out.unfinished" / "model").glob("model-*")))
            assert 1 <= done < BLOCKS + 1
            os.system(f"mount -o remount,size=10m {small}")
            compress(small / "out", resume=True)
        assert contents(small / "out") == whole
    finally:
        os.system(f"umount {small}")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_journal_of_somebody_else_stays(overwrite, tmp_path):
    other = tmp_path / "out.unfinished" / "progress.json"
    other.parent.mkdir()
    other.write_text('{"mine": 1}')
    with pytest.raises(CheckpointError, match="progress.json is damaged .*parts.*; move it away"):
        compress(tmp_path / "out", overwrite=overwrite)
    assert other.read_text() == '{"mine": 1}'
