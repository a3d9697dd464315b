"""The equivalent model on which quantised rows are measured, made of the embedded model."""

import json

import pytest
import torch
from off_grid import RECORD, write_copy

from hasslefree.demo.run import MODEL
from hasslefree.models.load import load_model

pytestmark = pytest.mark.nightly


def test_the_copy_is_the_same_function_of_other_weights(tmp_path):
    """Oracle: the model itself, on tokens that the tool does not look at."""
    record = write_copy(str(MODEL), tmp_path, 0.2, 3)
    before, after = load_model(str(MODEL), "float32", "cpu"), load_model(str(tmp_path), "float32", "cpu")
    ids = torch.randint(before.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = before(ids).logits, after(ids).logits
    assert (found - expected).norm() < 0.01 * expected.norm()  # the copy is rounded to bfloat16
    names = [name for name, weight in before.named_parameters() if "proj" in name]
    moved = {name: after.get_parameter(name) / before.get_parameter(name) for name in names}
    assert all(0.15 < ratio[ratio.isfinite()].abs().log().std() < 0.35 for ratio in moved.values())
    assert json.loads((tmp_path / RECORD).read_text()) == record
    assert (record["sigma"], record["seed"]) == (0.2, 3)


def test_a_model_whose_function_changes_is_an_error(tmp_path, monkeypatch):
    """What feeds a matrix is not divided: no copy is written."""
    monkeypatch.setattr("off_grid.divide_rows", lambda layer, factors: None)
    with pytest.raises(SystemExit, match="diverges"):
        write_copy(str(MODEL), tmp_path / "copy", 0.2, 0)
    assert not (tmp_path / "copy").exists()
