"""The totals of a report."""

import json

import pytest

from hasslefree.errors import CheckpointError
from hasslefree.folder.record import LayerRecord, Record, summary_table
from hasslefree.packed.spec import LayerSpec


def test_the_totals_by_hand():
    layers = (
        LayerRecord("a.q", LayerSpec("2:4", (4, 8), 2, 16), 0.1, 0.09, 1.0, bytes=50, dense_bytes=64),
        LayerRecord("b.q", LayerSpec("2:4", (6, 8), 0, 24), 0.4, 0.39, 2.0, bytes=60, dense_bytes=96),
    )
    report = Record("m", {}, "Prune()", {}, "cpu", "float32", 8, 8, 3.0, layers)
    assert [layer.spec.parameters for layer in layers] == [16 + 2 * 12, 24]
    assert (report.kept_parameters, report.dense_parameters) == (64, 80)
    assert report.kept_share == 0.8
    assert report.mean_relative_error == pytest.approx(0.25)
    stored = json.loads(report.to_json())
    assert stored["kept_parameters"] == 64
    assert (stored["stored_bytes"], stored["dense_bytes"]) == (110, 160)
    timed = [layer | {"seconds": seconds} for layer, seconds in zip(stored["layers"], (1.0, 2.0), strict=True)]
    assert tuple(LayerRecord.from_dict(layer) for layer in timed) == layers
    assert "seconds" not in report.to_json()
    cells = [list(column.cells) for column in summary_table(report).columns]
    assert [str(column[0]) for column in cells] == ["q", "2", "0–2", "0.25000", "0.40000", "3.0"]


def test_a_method_may_come_upon_nan_on_its_way():
    """A run is not lost for it; only the report, which would draw it, refuses it."""
    layer = LayerRecord("a.q", LayerSpec("2:4", (4, 8), 2, 16), 0.1, 0.09, 1.0, history=(0.5, float("nan"), 0.1))
    assert LayerRecord.from_dict(layer.to_dict()).history[2] == 0.1
    report = Record("m", {}, "Prune()", {}, "cpu", "float32", 8, 8, 3.0, (layer,))
    with pytest.raises(CheckpointError, match=r"the errors by round of a\.q contain NaN or Inf"):
        Record.from_json(report.to_json())
