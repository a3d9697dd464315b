"""What is in the place of an output is replaced only if hasslefree wrote it, and then completely."""

import json
import os
import tempfile

import pytest

from hasslefree.checkpoint.output import PAGE, check_file, check_output, replaced_whole, write_whole
from hasslefree.errors import OutputError, WriteError

RESULTS = '{\n "model": "m"\n}\n'


@pytest.fixture
def out(tmp_path):
    with replaced_whole(tmp_path / "out", overwrite=False) as part:
        (part / "base").mkdir()
        (part / "base" / "weights").write_text("ours")
    return tmp_path / "out"


def test_what_a_killed_process_of_the_same_number_left_is_not_in_the_way(tmp_path, monkeypatch):
    """In a container, the number is often 1."""
    left = tmp_path / f".out.part-{os.getpid()}"
    left.mkdir()
    with replaced_whole(tmp_path / "out", overwrite=False) as part:
        (part / "weights").write_text("ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "out"]


CHANGES = {
    "a file": lambda out: (out / "notes").touch(),
    "a file in a folder": lambda out: (out / "base" / "notes").touch(),
    "a hidden file": lambda out: (out / ".notes").touch(),
    "a link": lambda out: (out / "link").symlink_to("nowhere"),
    "another text": lambda out: (out / "base" / "weights").write_text("theirs"),
    "no evaluation": lambda out: (out / "evaluation.json").write_text("mine"),
    "no list": lambda out: (out / "files.json").unlink(),
    "another list": lambda out: (out / "files.json").write_text(json.dumps({"base/weights": 4})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_overwrite_replaces_only_what_was_written(change, out):
    (out / "evaluation.json").write_text(RESULTS)
    check_output(out, overwrite=True)
    change(out)
    before = sorted(out.rglob("*"))
    with pytest.raises(OutputError, match="cannot be replaced"):
        check_output(out, overwrite=True)
    with pytest.raises(WriteError, match=f"is complete; .* mv .* {out}"), replaced_whole(out, overwrite=True) as part:
        (part / "new").touch()
    assert sorted(out.rglob("*")) == before
    assert (part / "new").exists()


def test_a_folder_that_holds_the_model_is_not_replaced(out, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "weights").symlink_to(out / "base" / "weights")
    for source in (out, out / "base", tmp_path / "linked"):
        with pytest.raises(OutputError, match="holds the model"):
            check_output(out, overwrite=True, source=source)
    check_output(out, overwrite=True, source=tmp_path)


def test_a_file_is_replaced_by_one_of_its_kind_alone(out, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link.json").symlink_to(out / "base" / "weights")
    for path in (tmp_path / "mine.txt", tmp_path / "link.json", tmp_path, out / "files.json", out / "new.json"):
        with pytest.raises(OutputError):
            check_file(path, b"{")
    for path in (tmp_path / "new.json", out / "evaluation.json"):
        write_whole(path, RESULTS)
        write_whole(path, RESULTS.replace('"m"', '"n"'))
        assert json.loads(path.read_text()) == {"model": "n"}
    with pytest.raises(OutputError, match="not from this command"):
        write_whole(tmp_path / "new.json", "<!doctype html>")
    (tmp_path / "mine.html").write_text("<!doctype html>\n<title>mine</title>")
    with pytest.raises(OutputError, match="not from this command"):
        write_whole(tmp_path / "mine.html", PAGE + b"<title>report</title>")


@pytest.mark.parametrize("name", ["new.json", "old.json"])
def test_a_file_in_a_folder_that_cannot_be_written_is_refused_before_the_work(name, tmp_path, monkeypatch):
    """The root user may write anywhere, so the question to the system is answered here."""
    (tmp_path / "old.json").write_text(RESULTS)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(OutputError, match=f"the folder of .*{name} is read-only; give another file"):
        check_file(tmp_path / name, b"{")


def test_what_cannot_be_written_is_kept_elsewhere(tmp_path, monkeypatch):
    """The destination goes bad between the check and the end."""
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))
    (tmp_path / "results.json").write_text("somebody else's")
    for path in (tmp_path / "results.json", tmp_path / "gone" / "results.json"):
        with pytest.raises(WriteError, match="kept/.*results.json instead") as caught:
            write_whole(path, RESULTS)
    assert [file.read_text() for file in (tmp_path / "kept").glob("*/*")] == [RESULTS, RESULTS]
    assert str(tmp_path / "kept") in str(caught.value)
    assert (tmp_path / "results.json").read_text() == "somebody else's"
