"""Bits and ranks are chosen once: a resumed compression takes those of the first run."""

import pytest

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import CheckpointError
from hasslefree.pipeline import compress as module
from hasslefree.progress import ALLOCATION, PROBES
from tests.listeners import by_layer
from tests.tiny_models import build, segments

RECIPES = {
    "2:4": Recipe(rank=8, rounds=3, allocate="error"),
    "unstructured": Recipe(pattern="unstructured", ratio=0.5, rank_share=0.4, rounds=3, allocate="error"),
    "row, owl": Recipe(pattern="row", sparsity=0.5, rank=0, method="wanda", allocate="owl"),
    "bits, tied": Recipe(size="8bits", group_size=16, effort="fast"),
}


def compress(out, name="2:4", **options):
    model = build("llama", tie_word_embeddings="tied" in name)
    return hasslefree.compress(model, out, RECIPES[name], segments=segments(), **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupted(out, name="2:4"):
    """The unfinished folder of a compression that ends in its second block."""

    def stop(report, done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(out, name, progress=by_layer(stop))
    return out.with_name(f"{out.name}.unfinished")


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_chooses_nothing_and_ends_with_the_same_bytes(name, tmp_path, monkeypatch):
    """Oracle: a run that nothing interrupted."""
    compress(tmp_path / "whole", name)
    interrupted(tmp_path / "out", name)
    for way in ("by_sensitivity", "by_outliers"):
        monkeypatch.setattr(module, way, lambda *args: pytest.fail("dealt again"))
    record = compress(tmp_path / "out", name, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not {ALLOCATION, PROBES} & {phase.name for phase in record.phases}
    assert [path.name for path in tmp_path.iterdir() if path.name != "whole"] == ["out"]


def test_damaged_output_weights_are_found_and_chosen_again(tmp_path):
    compress(tmp_path / "whole")
    file = interrupted(tmp_path / "out") / "output_weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged.*Delete it"):
        compress(tmp_path / "out", resume=True)
    file.unlink()
    compress(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_compression_takes_nothing_of_a_kept_plan(tmp_path):
    left = interrupted(tmp_path / "out")
    assert (left / "output_weights.safetensors").exists()
    compress(tmp_path / "out", "row, owl", overwrite=True)
    compress(tmp_path / "whole", "row, owl")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not left.exists()


def test_a_plan_without_any_finished_part_is_not_used(tmp_path):
    """What was measured for embeddings and heads is not kept, since they are in the first part."""
    compress(tmp_path / "whole", "bits, tied")
    for file in interrupted(tmp_path / "out", "bits, tied").glob("model/*"):
        file.unlink()
    compress(tmp_path / "out", "bits, tied", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
