"""How a block is run on the calibration text."""

from types import SimpleNamespace

import pytest
import torch

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import OutputError, RecipeError
from hasslefree.models.calibrate import gather
from hasslefree.pipeline import block as blockwise
from tests.tiny_models import build, logits, segments

RECIPE = Recipe(rank=2, method="eora")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt", "phi3", "mixtral"])
def test_one_pass_gives_what_a_pass_for_each_group_gives(family, tmp_path, monkeypatch):
    """Oracle: the other way, which runs where memory is short."""
    errors = []
    for at_once in (True, False):
        monkeypatch.setattr("hasslefree.pipeline.block.in_one_pass", lambda *how, at_once=at_once: at_once)
        report = hasslefree.compress(build(family), tmp_path / f"{at_once}", RECIPE, segments=segments(6))
        errors.append({layer.name: layer.relative_error for layer in report.layers})
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_one_pass_multiplies_in_the_dtype_of_the_model(tmp_path, monkeypatch):
    """Oracle: a pass for each group, whose Gram matrices are of the inputs as the layers read them, in bfloat16."""
    monkeypatch.setattr("hasslefree.models.precision.multiplies_bfloat16", lambda device: True)
    errors = []
    for at_once in (True, False):
        monkeypatch.setattr("hasslefree.pipeline.block.in_one_pass", lambda *how, at_once=at_once: at_once)
        model = build("llama", torch.bfloat16)
        report = hasslefree.compress(model, tmp_path / f"{at_once}", RECIPE, segments=segments(6))
        errors.append([layer.relative_error for layer in report.layers])
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


@pytest.mark.parametrize(("room", "passes"), [(10**9, 4), (2 * 12 * 32**2, 8), (0, 10)])
def test_experts_are_gathered_together_as_far_as_there_is_room(room, passes, tmp_path, monkeypatch):
    """Oracle: one group of layers at a time. Four experts: q, k, v; o; gates and ups; downs, which are wider."""
    found, gathered = [], []

    def watched(block, prefix, call, hidden, groups, *rest):
        gathered.append((prefix, len(groups)))
        return gather(block, prefix, call, hidden, groups, *rest)

    monkeypatch.setattr("hasslefree.pipeline.block.in_one_pass", lambda *how: False)
    monkeypatch.setattr("hasslefree.pipeline.block.gather", watched)
    for each in (0, room):
        gathered.clear()
        monkeypatch.setattr("hasslefree.pipeline.block.room_for_sums", lambda device, each=each: each)
        model = build("mixtral")
        hasslefree.compress(model, tmp_path / f"{len(found)}", RECIPE, segments=segments(6))
        found.append(logits(model, segments()))
    assert sum(prefix == "model.layers.1" for prefix, _ in gathered) == passes
    assert sum(count for prefix, count in gathered if prefix == "model.layers.1") == 10
    assert torch.equal(found[0], found[1])


def test_blocks_that_do_not_take_several_segments_get_one_at_a_time(tmp_path):
    """Oracle: the same model, whose blocks do."""
    expected = hasslefree.compress(build("llama"), tmp_path / "any", RECIPE, segments=segments())
    model, most = build("llama"), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: most.append(len(args[0])))
        forward = layer.forward
        layer.forward = lambda x, *args, forward=forward, **kwargs: forward(x[:1], *args, **kwargs).expand(
            len(x), -1, -1
        )
    report = hasslefree.compress(model, tmp_path / "one", RECIPE, segments=segments())
    assert most.count(2) == 2, "it is tried once for each block"
    assert set(most) == {1, 2}
    for one, other in zip(report.layers, expected.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-3)


def test_minutes_that_the_layers_alone_take_are_an_error_after_three_blocks(tmp_path, monkeypatch):
    """Oracle: a clock on which a block takes ten minutes, so six blocks take an hour. With more time, they go on."""
    blocks, at, tick = [], [0.0], [0.0]

    def clock():
        at[0] += tick[0]
        return at[0]

    def compressed(task, hidden, compress=blockwise.compress_block):
        blocks.append(task.visit.index)
        at[0] += 600
        return compress(task, hidden)

    def run(minutes, **options):
        model, recipe = build("llama", num_hidden_layers=6), Recipe(rank=2, rounds=2, minutes=minutes)
        options |= {"segments": segments(40), "progress": lambda step: None}
        return hasslefree.compress(model, tmp_path / "out", recipe, **options)

    for module in ("pipeline.block", "progress", "train.trainer"):
        monkeypatch.setattr(f"hasslefree.{module}.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(blockwise, "compress_block", compressed)
    with pytest.raises(
        RecipeError, match="40 minutes are too short.* take 60.* continue with resume=True and minutes=120"
    ):
        run(40)
    assert blocks == [0, 1, 2]
    assert not (tmp_path / "out").exists()
    tick[0] = 60.0  # or the training would not end
    assert run(120, resume=True).predictions["tokens"] > 0
    assert blocks == [0, 1, 2, 3, 4, 5]


def test_a_finished_folder_is_not_resumed(tmp_path):
    tokens = segments(6)
    hasslefree.compress(build("llama"), tmp_path / "out", RECIPE, segments=tokens)
    with pytest.raises(OutputError, match="out is finished: there is nothing to resume"):
        hasslefree.compress(build("llama"), tmp_path / "out", RECIPE, segments=tokens, resume=True)
