"""Blocks are written beside the work: nothing is lost by that, no error either."""

import threading

import pytest

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint import resume
from hasslefree.errors import WriteError
from hasslefree.files import read_json
from tests.listeners import by_layer
from tests.tiny_models import build, segments

RECIPE = Recipe(rank=2, method="eora")
BLOCKS, LAYERS = 3, 7
FULL = OSError(28, "No space left on device")


def compress(out, **options):
    model = build("llama", num_hidden_layers=BLOCKS)
    return hasslefree.compress(model, out, RECIPE, segments=segments(), **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def file_of(part):
    return f"model-{part + 1:05d}-of-{BLOCKS + 1:05d}.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a run that writes each block before it goes on."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasslefree.pipeline.preflight.check_memory", lambda setup: False)
        compress(out)
    return contents(out)


@pytest.fixture
def saving(monkeypatch):
    """Set to a function that is called before a file is saved, with its name."""
    held, save = {"before": lambda file: None}, resume.save

    def saved(file, tensors):
        held["before"](file.name)
        return save(file, tensors)

    monkeypatch.setattr(resume, "save", saved)
    return held


def test_a_block_is_written_while_the_next_one_is_compressed_and_no_two_at_once(whole, saving, tmp_path):
    """Oracle: a run that writes each block before it goes on. Its first block waits for the second one's last layer."""
    reached, order, at_once = threading.Event(), [], []
    lock = threading.Lock()

    def before(file):
        at_once.append(not lock.acquire(blocking=False))
        if file == file_of(1):
            assert reached.wait(120)
        order.append(file)
        lock.release()

    saving["before"] = before
    compress(tmp_path / "out", progress=by_layer(lambda layer, done, total: done == 2 * LAYERS and reached.set()))
    assert contents(tmp_path / "out") == whole
    assert order == [file_of(part) for part in range(BLOCKS + 1)]
    assert at_once == [False] * (BLOCKS + 1)


def test_where_memory_is_short_a_block_is_written_before_the_next_one_begins(saving, tmp_path, monkeypatch):
    begun, seen = [], []
    saving["before"] = begun.append
    monkeypatch.setattr("hasslefree.pipeline.preflight.check_memory", lambda setup: False)

    def progress(layer, done, total):
        folder = tmp_path / "out.unfinished"
        seen.append((len(begun), len(read_json(folder / "progress.json")["parts"])))

    compress(tmp_path / "out", progress=by_layer(progress))
    assert seen == [(block + 1, block + 1) for block in range(BLOCKS) for _ in range(LAYERS)]


@pytest.mark.parametrize("part", range(BLOCKS + 1))
def test_what_cannot_be_written_stops_the_run_after_the_next_block_and_is_named(part, whole, saving, tmp_path):
    """Oracle of the run that goes on: one that nothing interrupted."""
    seen = []

    def before(file):
        if file == file_of(part):
            raise FULL

    saving["before"] = before
    message = rf"{file_of(part)} cannot be written: .*{FULL.strerror}.*finished blocks are kept.*resume=True"
    with pytest.raises(WriteError, match=message) as error_info:
        compress(tmp_path / "out", progress=by_layer(lambda layer, done, total: seen.append(done)))
    assert "layers" not in str(error_info.value)  # of the model: those that are solved meanwhile are not to blame
    assert len(seen) == LAYERS * min(part + (part > 0), BLOCKS)
    left = tmp_path / "out.unfinished"
    assert left.exists() == (part > 0)  # else there is nothing to go on from
    if part:
        assert [each["file"] for each in read_json(left / "progress.json")["parts"]] == [
            file_of(each) for each in range(part)
        ]
    saving["before"] = lambda file: None
    compress(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == whole
