"""Several texts with shares, and the texts of other kinds."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasslefree.errors import CalibrationError, UnknownNameError
from hasslefree.texts.hub import HUB_TEXTS
from hasslefree.texts.python import library_documents
from hasslefree.texts.shares import MIXTURE, as_texts, counts_of, shares_of
from hasslefree.texts.sources import KNOWN, calibration_documents, check_calibration, evaluation_documents


@pytest.mark.parametrize(
    ("given", "texts", "shares"),
    [
        ("c4", "c4", {"c4": 1}),
        (["c4"], "c4", {"c4": 1}),
        (["c4:40% self:60%"], ("c4:40%", "self:60%"), {"c4": 0.4, "self": 0.6}),
        ("c4:100%", "c4:100%", {"c4": 1}),
        ("c4:40% self:60%", ("c4:40%", "self:60%"), {"c4": 0.4, "self": 0.6}),
        ("c4:40%, self: 60 %", ("c4:40%", "self: 60 %"), {"c4": 0.4, "self": 0.6}),
        ("10% of a.txt", "10% of a.txt", {"10% of a.txt": 1}),
        (["c4:40%", "a:b.txt:60%"], ("c4:40%", "a:b.txt:60%"), {"c4": 0.4, "a:b.txt": 0.6}),
        ({"c4": "12.5%", "self": "87.5 %"}, ("c4:12.5%", "self:87.5 %"), {"c4": 0.125, "self": 0.875}),
        (["a.txt:33.3%", "b.txt:33.3%", "c.txt:33.3%"], None, {"a.txt": 1 / 3, "b.txt": 1 / 3, "c.txt": 1 / 3}),
    ],
)
def test_shares_as_they_are_typed(given, texts, shares):
    """On the command line, as a list and as a mapping of a recipe. Oracle: by hand."""
    made = as_texts(given)
    assert texts is None or made == texts
    assert shares_of(made) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["c4:40%", "self:50%"], "add up to 90 %, not to 100 %: c4:40%, self:50%"),
        (["c4:40%", "self:70%"], "add up to 110 %"),
        ("c4:40%", "add up to 40 %"),
        (["c4", "self:50%"], "the text 'c4' has no share in per cent; give one, such as c4:20%"),
        ({"c4": 40, "self": 60}, "the text 'c4:40' has no share in per cent; give one, such as c4:20%"),
        (["c4:0.4", "self:0.6"], "the text 'c4:0.4' has no share in per cent; give one, such as c4:20%"),
        (["c4:0%", "self:100%"], "the share of the text 'c4:0%' is 0; leave it out"),
        (["c4:50%", "c4:50%"], "the text 'c4' is named twice"),
        (["mixed:50%", "self:50%"], "'mixed' takes no share, but 'mixed:50%' has one; leave out the share, or list"),
        (["none.txt:50%", "self:50%"], "none.txt does not exist"),
        ("wikipedias", "Did you mean 'wikipedia'"),
    ],
)
def test_wrong_shares_are_a_sentence_before_the_work(texts, message):
    with pytest.raises((CalibrationError, UnknownNameError), match=message):
        check_calibration(as_texts(texts))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 200))
def test_counts_are_whole_and_within_one_of_the_shares(weights, total):
    shares = {str(number): weight / sum(weights) for number, weight in enumerate(weights)}
    counts = counts_of(shares, total)
    assert sum(counts.values()) == total
    assert all(abs(counts[name] - share * total) < 1 for name, share in shares.items())


def test_the_named_mixture_is_a_whole_of_known_texts():
    check_calibration("mixed")
    assert sum(MIXTURE.values()) == 100
    assert set(MIXTURE) < set(KNOWN)


def test_the_standard_library_has_a_part_that_is_only_measured_on():
    """Oracle: the files of this interpreter, as they are."""
    calibration, evaluation = library_documents(held_out=False), library_documents(held_out=True)
    assert not set(calibration) & set(evaluation)
    source = Path(json.__file__).read_text(encoding="utf-8")
    assert (source in calibration) != (source in evaluation)
    assert 0.15 < len(evaluation) / (len(calibration) + len(evaluation)) < 0.35
    assert evaluation_documents("python") == evaluation
    assert "".join(calibration_documents("python")) == "".join(calibration)


def test_what_is_beside_the_standard_library_is_no_part_of_it(tmp_path, monkeypatch):
    kept = {"a.py", "b/c.py", "b/d/e.py"}
    for name in (*kept, "a.txt", "site-packages/f.py", "b/test/g.py", "b/d/tests/h/i.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "not installed.py")
    monkeypatch.setattr("hasslefree.texts.python.sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("hasslefree.texts.python.PARTS", 1)
    assert set(library_documents(held_out=True)) == kept


@pytest.mark.parametrize("name", ["wikipedia", "code", "chat", "languages"])
def test_what_is_measured_on_the_hub_is_not_calibrated_on(name, monkeypatch):
    asked = []

    def load_dataset(**arguments):
        asked.append(arguments)
        return {HUB_TEXTS[name].field: ["row"] * 1200}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert len(calibration_documents(name)) == 1200
    assert len(evaluation_documents(name)) == 1100
    one, *others = asked
    calibrated = one.get("data_files")
    for other in others:
        assert one["path"] == other["path"]
        measured = other.get("data_files")
        apart = measured not in calibrated if isinstance(calibrated, list) else measured != calibrated
        assert apart or one["split"] != other["split"]


def test_conversations_of_a_file(tmp_path):
    file = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "3 4"}, {"role": "assistant", "content": "5 6", "more": 1}]
    file.write_text(json.dumps({"messages": messages}) + '\n{"text": "7"}\n')
    kept = [{"role": "user", "content": "3 4"}, {"role": "assistant", "content": "5 6"}]
    assert calibration_documents(str(file)) == [kept, "7"]
    for broken in ([{"role": "user"}], [{"role": "user", "content": 3}], "no list", [3]):
        file.write_text(json.dumps({"messages": broken}))
        with pytest.raises(CalibrationError, match='line 1: .*a list "messages" of objects with strings "role"'):
            calibration_documents(str(file))
