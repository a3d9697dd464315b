"""The totals of a report."""

import dataclasses
import json

import pytest
import torch

import hasslefree
from hasslefree.checkpoint.record import LayerRecord, Record
from hasslefree.packed.spec import LayerSpec
from hasslefree.validation import InvalidError


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
    expected = tuple(dataclasses.replace(layer, seconds=0.0) for layer in layers)
    assert Record.from_dict(stored) == dataclasses.replace(report, seconds=0.0, layers=expected)
    assert "seconds" not in report.to_json()


def test_a_summary_by_hand():
    layers = tuple(
        LayerRecord(name, LayerSpec("2:4", (4, 8), 2, 16), error, error, 1.0, bytes=500, dense_bytes=1000)
        for name, error in {"a.q": 0.012, "b.<i>": 1234.0, "c.q\x1b": 0.003, "d.q": 0.0001}.items()
    )
    kl = {"mean": 0.0123, "median": 0.004, "percentile_99": 0.2, "same_top_token": 0.9753}
    held_out = {"dense": 22.704, "compressed": 25.1, "segments": 8, "kl": kl}
    report = Record("m", {"calibration": "c4"}, "", {}, "cpu", "float32", 512, 8, 660.0, layers, held_out=held_out)
    report = dataclasses.replace(report, other_bytes=2000)
    assert report.summary().splitlines() == [
        "all weights        6.0 kB → 4.0 kB (67 %)",
        "compressed layers  4.0 kB → 2.0 kB (50 %)",
        "perplexity         22.70 → 25.10 (+10.6 %)",
        "                   on 8 × 512 held-out tokens of the calibration text;",
        "                   text of other kinds may lose more",
        "KL from dense      mean 0.012, 99th percentile 0.2 nats; same top token 97.5 %",
        "largest errors     1,200 in b.<i>",
        "                   0.012 in a.q",
        r"                   0.003 in c.q\x1b",
        "                   (relative, of the squared output on the calibration text)",
        "time               11 min",
    ]
    same = dataclasses.replace(report, held_out=held_out | {"compressed": 22.70})
    assert "22.70 → 22.70 (+0.0 %)" in same.summary()
    for older in ({"kl": None}, {}):
        old = dataclasses.replace(report, held_out=held_out | older)
        if not older:
            del old.held_out["kl"]
        assert Record.from_dict(json.loads(old.to_json())).held_out == old.held_out
        assert "KL" not in old.summary()
    page = report._repr_html_()
    assert "<td>22.70 → 25.10 (+10.6 %)<br>on 8 × 512 held-out" in page
    assert "b.&lt;i&gt;<br>" in page
    assert "<i>" not in page
    assert "\x1b" not in page


MORE = ",\nwhich loses more than the calibration text; other kinds may too"


@pytest.mark.parametrize(
    ("before", "after", "calibration", "said"),
    [
        (20.0, 20.3, "c4", ",\nwhich loses less than the calibration text"),
        (20.0, 22.2, "c4", ""),
        (20.0, 24.0, "c4", f"{MORE};\nthe calibration text 'mixed' has several kinds"),
        (20.0, 24.0, "mixed", MORE),
        (20.0, None, "c4", ""),
        (None, 24.0, "c4", ""),
    ],
)
def test_a_verdict_on_code_says_where_it_differs_by_more_than_half(before, after, calibration, said):
    """By hand: the calibration text loses ln 1.1 = .095, and code .015, .104 and .182."""
    layer = LayerRecord("a.q", LayerSpec("2:4", (4, 8), 2, 16), 0.1, 0.1, 1.0, bytes=500, dense_bytes=1000)
    held_out = {"dense": 20.0, "compressed": 22.0, "segments": 8}
    recipe = {"calibration": calibration}
    report = Record("m", recipe, "", {}, "cpu", "float32", 512, 8, 1.0, (layer,), held_out=held_out)
    report = dataclasses.replace(report, held_out_code={"dense": before, "compressed": after, "segments": 8})
    verdict = report.verdict()
    assert verdict["on code"].endswith(f"held-out tokens of Python's library{said}")
    assert "other kinds may lose more" not in verdict["perplexity"]


def test_a_method_may_come_upon_nan_on_its_way():
    """A run is not lost for it, and JSON, which has no NaN, does not hold it."""
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    result = hasslefree.decompose(weight, None, "2:4", 2, method="oats")
    result = dataclasses.replace(result, history=(0.5, float("nan"), 0.1))
    layer = LayerRecord.of("a.q", LayerSpec("2:4", (4, 8), 2, 16), result, 1.0, 100)
    assert layer.history == ()
    assert "NaN or Inf in a round" in layer.remarks[-1]
    report = Record("m", {}, "Prune()", {}, "cpu", "float32", 8, 8, 3.0, (layer,))
    assert "NaN" not in report.to_json().replace("NaN or Inf", "")
    foreign = json.loads(report.to_json().replace('"history": []', '"history": [NaN]'))
    with pytest.raises(InvalidError, match="history must be a finite number"):
        Record.from_dict(foreign)
