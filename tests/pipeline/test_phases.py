"""The steps that a listener gets of a compression, and its log lines."""

import time

import pytest

import hasslefree
from hasslefree import Recipe
from hasslefree.progress import (
    ALLOCATION,
    INPUTS,
    LOADING,
    PREDICTIONS,
    PREFLIGHT,
    PROBES,
    READ_BACK,
    REFERENCE,
    RESUMED,
    SOLVING,
    WRITING,
)
from tests.tiny_models import NO_TOKENIZER, build, segments

RECIPE = Recipe(rank=2, rounds=2, allocate="error", match_predictions=64)
BLOCKS, LAYERS = 2, 14


class Run:
    """A compression of a tiny model by its name, its steps and its seconds, by a clock outside of it."""

    def __init__(self, folder, recipe=RECIPE, **options):
        self.steps = []
        start = time.perf_counter()
        self.report = hasslefree.compress(
            folder / "dense",
            folder / "out",
            recipe,
            tokenizer=NO_TOKENIZER,
            segments=segments(16),
            progress=self.steps.append,
            **options,
        )
        self.seconds = time.perf_counter() - start

    def counts(self, name):
        return [step.done for step in self.steps if step.phase == name]

    def last(self, name):
        return next(step for step in reversed(self.steps) if step.phase == name)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    build("llama").save_pretrained(folder / "dense")
    run = Run(folder)
    run.folder = folder
    return run


def test_every_phase_counts_up_to_its_end(run):
    """Oracle: the blocks and layers of the model, and the files of the folder."""
    files = len(list((run.folder / "out").glob("*.safetensors")))
    totals = {
        LOADING: 1, PREFLIGHT: 2 * BLOCKS, REFERENCE: BLOCKS,
        PROBES: BLOCKS, ALLOCATION: BLOCKS, INPUTS: LAYERS, SOLVING: LAYERS,
        READ_BACK: BLOCKS, PREDICTIONS: 1, WRITING: files + BLOCKS + 1,
    }  # fmt: skip
    assert {step.phase: step.total for step in run.steps} == totals
    for name, total in totals.items():
        counts, ends = run.counts(name), [step.ended for step in run.steps if step.phase == name]
        assert counts == sorted(counts), name
        assert (counts[0], counts[-1]) == (0, total), name
        assert ends == [False] * (len(ends) - 1) + [True], name
    assert {*run.counts(SOLVING)} == {*range(LAYERS + 1)}
    assert {*run.counts(INPUTS)} == {
        0,
        3,
        4,
        6,
        7,
        10,
        11,
        13,
        14,
    }  # by groups with one input: q, k, v; o; gate, up; down
    assert {*range(2 * BLOCKS + 1)} == {*run.counts(PREFLIGHT)}
    layers = [step.layer for step in run.steps if step.layer is not None]
    assert [layer.name for layer in layers] == [layer.name for layer in run.report.layers]


def test_the_seconds_of_all_phases_are_those_of_the_run(run):
    """Oracle: a clock outside of it. What is in no phase takes less than half of a short run."""
    total = sum(each.seconds for each in run.report.phases)
    assert 0.5 * run.report.seconds < total <= run.report.seconds <= run.seconds
    assert [each.name for each in run.report.phases][-1] == WRITING


def test_a_resumed_run_says_what_it_skips(tmp_path, caplog):
    """Oracle: the layers of the block that was finished."""
    build("llama").save_pretrained(tmp_path / "dense")
    recipe = Recipe(rank=2, effort="fast", rounds=1)

    def stop(step):
        if step.layer is not None and step.done == 8:  # the first layer of the second block
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(tmp_path / "dense", tmp_path / "out", recipe, tokenizer=NO_TOKENIZER, segments=segments(16),
                            progress=stop)  # fmt: skip
    with caplog.at_level("INFO", "hasslefree"):
        found = Run(tmp_path, recipe, resume=True)
    assert "1 of 2 blocks were finished in an earlier run: they are loaded, not compressed again" in caplog.messages
    assert {*found.counts(RESUMED)} == {0, 1}
    assert found.last(SOLVING).done == 14
    assert found.counts(WRITING)[1] == 2
