import gzip
import json
import os

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree.errors import CalibrationError, UnknownNameError
from hasslefree.models.tokenizer import encode as encode_whole
from hasslefree.texts import hub
from hasslefree.texts.segments import MOST_SHORT, disjoint_segments, draw_segments
from hasslefree.texts.sources import calibration_documents, check_text, evaluation_documents, evaluation_protocol


def encode(text):
    return [int(word) for word in text.split()]


def document(start, length):
    return " ".join(map(str, range(start, start + length)))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 10), st.integers(2, 12), st.integers(0, 99)
)
def test_segments_are_windows_of_documents_that_are_long_enough(lengths, samples, seqlen, seed):
    documents = [document(1000 * i, length) for i, length in enumerate(lengths)]
    have = sum(length for length in lengths if length >= seqlen)
    try:
        segments = draw_segments(documents, encode, samples, seqlen, seed)
    except CalibrationError as error:
        assert have < samples * seqlen
        assert (f"have {have} in total" if have else f"the longest of {len(lengths)} has {max(lengths)}") in str(error)
        assert not have or f"= {samples * seqlen} tokens are needed" in str(error)
        return
    assert segments.shape == (samples, seqlen)
    for segment in segments.tolist():
        index, start = divmod(segment[0], 1000)
        assert segment == list(range(segment[0], segment[0] + seqlen))
        assert start + seqlen <= lengths[index]
    assert torch.equal(segments, draw_segments(documents, encode, samples, seqlen, seed))


def test_every_window_can_be_drawn_and_documents_are_not_repeated_while_there_are_others():
    starts = {int(draw_segments([document(0, 8)], encode, 1, 6, seed)[0, 0]) for seed in range(60)}
    assert starts == {0, 1, 2}
    segments = draw_segments([document(1000 * i, 8) for i in range(10)], encode, 10, 8, seed=1)
    assert sorted(segments[:, 0].tolist()) == [1000 * i for i in range(10)]


def test_local_files(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo")
    lines.write_text('{"text": "one"}\n\n{"text": "two\\u2028x", "other": 1}\n{"text": "three"}\n')
    assert calibration_documents(str(text)) == ["one\n\ntwo"]
    assert calibration_documents(str(lines)) == ["one", "two\u2028x", "three"]
    assert calibration_documents(f"{lines}[1:]") == ["two\u2028x", "three"]
    assert calibration_documents(f"{lines}[:1]") == ["one"]
    assert evaluation_documents(f"{lines}[0:2]") == ["one", "two\u2028x"]


ROWS = ["one two", "three", "four\u2028five"]


def write_formats(folder):
    """The rows in every format."""
    lines = "\n".join(json.dumps({"text": row}) for row in ROWS)
    (folder / "a.JSONL").write_text(lines)
    (folder / "lines.json").write_text(lines)
    (folder / "list.json").write_text(json.dumps([{"text": row} for row in ROWS], indent=1))
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    table = datasets.Dataset.from_dict({"text": ROWS})
    table.to_parquet(str(folder / "a.parquet"))
    table.to_csv(str(folder / "a.csv"))
    table.save_to_disk(str(folder / "disk"))
    datasets.DatasetDict({"test": table.select([0]), "train": table}).save_to_disk(str(folder / "splits"))
    (folder / "shards").mkdir()
    table.to_parquet(str(folder / "shards" / "train-0.parquet"))


FORMATS = ["a.JSONL", "lines.json", "list.json", "a.jsonl.gz", "a.parquet", "a.csv", "disk", "splits", "shards"]


def test_local_files_of_every_format(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_formats(tmp_path)
    for name in FORMATS:
        assert calibration_documents(str(tmp_path / name)) == ROWS, name
        assert evaluation_documents(f"{tmp_path / name}[1:2]") == ["three"], name


def test_columns_without_text_are_not_decoded(tmp_path, monkeypatch):
    """An image that cannot be opened: without Pillow, none can."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kinds = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    rows = {"text": ["a b c"], "image": [{"bytes": b"no image", "path": None}]}
    table = datasets.Dataset.from_dict(rows, kinds)
    (tmp_path / "shards").mkdir()
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.to_parquet(str(tmp_path / "shards" / "train-0.parquet"))
    table.save_to_disk(str(tmp_path / "disk"))
    for name in ("a.parquet", "shards", "disk"):
        assert calibration_documents(str(tmp_path / name)) == ["a b c"], name
    table.select_columns("image").save_to_disk(str(tmp_path / "images"))
    with pytest.raises(CalibrationError, match='images, row 1: expected an object with a string "text"'):
        calibration_documents(str(tmp_path / "images"))


def test_a_data_set_without_a_train_split_names_those_it_has(tmp_path):
    table = datasets.Dataset.from_dict({"text": ROWS})
    datasets.DatasetDict({"test": table, "dev": table}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(CalibrationError, match=r"no split named train; give \S+/splits/test or \S+/splits/dev$"):
        calibration_documents(str(tmp_path / "splits"))
    assert calibration_documents(str(tmp_path / "splits" / "dev")) == ROWS


def turns(*contents):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=False)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": turns("a", "b"), "prompt": "p"}, turns("a", "b")),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, turns("a", "b")),
        ({"instruction": "a", "input": "", "output": "b"}, turns("a", "b")),
        ({"instruction": "a", "input": "c", "output": "b"}, turns("a\n\nc", "b")),
        ({"prompt": "a", "completion": "b"}, turns("a", "b")),
        ({"prompt": turns("a"), "completion": turns("a", "b")[1:]}, turns("a", "b")),
        ({"question": "a", "answer": "b"}, turns("a", "b")),
        ({"text": "t", "instruction": "a", "output": "b"}, "t"),
        ({"text": None, "messages": turns("a"), "conversations": None}, turns("a")),
    ],
)
def test_rows_for_fine_tuning_are_conversations(row, expected, tmp_path):
    """Oracle: by hand."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert calibration_documents(str(tmp_path / "a.jsonl")) == [expected]


NO_DOCUMENTS = [
    {"prompt": "a"},
    {"instruction": "a", "input": ["b"], "output": "c"},
    {"content": None},
    3,
    "text",
]


@pytest.mark.parametrize("row", NO_DOCUMENTS)
def test_rows_that_hold_no_document(row, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "fine"}, row]))
    with pytest.raises(CalibrationError, match="a.json, row 2: expected an object with a string"):
        check_text(str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "row", [{"text": None}, {"messages": []}, {"instruction": "a", "output": None}, {"text": None, "id": 3}]
)
def test_rows_whose_text_is_null_are_left_out(row, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ({"text": "one"}, row, {"text": "two"}))))
    assert calibration_documents(str(tmp_path / "a.jsonl")) == ["one", "two"]
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    with pytest.raises(CalibrationError, match="b.jsonl is empty"):
        calibration_documents(str(tmp_path / "b.jsonl"))


def test_csv_as_pandas_writes_it(tmp_path):
    """Its first column, the index, has no name. Oracle: by hand."""
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f',text,text\n0,no,"one\ntwo"\n1,no,{long}\n')
    assert calibration_documents(str(tmp_path / "a.csv")) == ["one\ntwo", long]


def test_cells_of_csv_are_texts_and_rows_without_a_word_are_left_out(tmp_path, monkeypatch):
    """Oracle: by hand. An evaluation joins all rows, as published protocols do."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.csv").write_text('text,id\nnull,1\n,2\n" ",3\nNA,4\n')
    assert calibration_documents(str(tmp_path / "a.csv")) == ["null", "NA"]
    assert evaluation_documents(str(tmp_path / "a.csv")) == ["null", "", " ", "NA"]


def test_a_folder_of_plain_texts_has_a_document_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"one {name}\n\ntwo\n")
    assert calibration_documents(str(tmp_path / "texts")) == ["one a\n\ntwo\n", "one b\n\ntwo\n"]


@pytest.mark.parametrize("folder", [False, True])
def test_numbers_in_csv_are_texts(folder, tmp_path, monkeypatch):
    """Oracle: by hand. A column whose first rows are numbers may hold words further below."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("prompt,response\nWhat is 2+2?,4\nWho?,007\nIs it?,True\n,null\n")
    rows = [turns("What is 2+2?", "4"), turns("Who?", "007"), turns("Is it?", "True"), turns("", "null")]
    assert calibration_documents(str(tmp_path / "tables" / ("" if folder else "a.csv"))) == rows


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_file_that_changes_and_keeps_its_time_is_read_again(name, tmp_path, monkeypatch):
    """As after `cp -p`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for text in ("old", "new"):
        table = datasets.Dataset.from_dict({"text": [text]})
        getattr(table, f"to_{name[2:]}")(tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
        assert calibration_documents(str(tmp_path / name)) == [text]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["intro.txt", "training.txt", "zend.txt"], ["intro.txt", "training.txt", "zend.txt"]),
        (["a.txt", "unit-test.txt"], ["a.txt", "unit-test.txt"]),
        (["test.txt", "train.txt"], ["train.txt"]),
        (["test-00000-of-00001.txt", "train-00000-of-00001.txt"], ["train-00000-of-00001.txt"]),
    ],
)
def test_no_file_of_a_folder_is_left_out_but_for_those_of_other_splits(names, kept, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for name in names:
        (tmp_path / "texts" / name).write_text(name)
    assert calibration_documents(str(tmp_path / "texts")) == kept


def test_a_folder_is_not_taken_for_a_pattern_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("x1", "x[1]"):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "a.csv").write_text(f"text\n{name}\n")
        (tmp_path / name / "train" / "a.txt").write_text(name)
    with pytest.raises(CalibrationError, match="which datasets takes for a pattern; rename it"):
        check_text(str(tmp_path / "x[1]"))
    monkeypatch.chdir(tmp_path / "x[1]")
    assert calibration_documents("a.csv") == ["x[1]"]


def test_all_languages_are_measured(monkeypatch):
    """As many documents of each, one after the other: the first windows hold all of them."""

    def load_dataset(data_files, **_):
        language = data_files.split("-")[1]
        return {"text": [language] * 1500}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    documents = evaluation_documents("languages")
    assert documents == ["de", "es", "fr", "ru", "zh"] * (len(documents) // 5)
    assert len(documents) == evaluation_protocol("languages").documents


def test_rows_after_a_slice_are_not_read_and_a_wrong_slice_is_a_sentence(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\nno JSON\n')
    assert calibration_documents(f"{lines}[:2]") == ["one", "two"]
    for rows in ("-2:", "1", ":50%", "a:b", ""):
        with pytest.raises(CalibrationError, match=rf"\[{rows}\] does not name rows of .*a.jsonl; give row numbers"):
            check_text(f"{lines}[{rows}]")
    lines.write_text('{"text": "one"}\n')
    with pytest.raises(CalibrationError, match=r"a.jsonl\[700:\] is empty; give another file, or other rows"):
        check_text(f"{lines}[700:]")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(CalibrationError, match=r"a.txt is one document, without rows; leave out \[:1\]"):
        check_text(f"{tmp_path / 'a.txt'}[:1]")


def test_names_may_hold_brackets_and_no_name_is_not_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk("disk[2]")
    (tmp_path / "disk[2]" / "a[1].csv").write_text("text\none\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    assert calibration_documents("disk[2]") == ROWS
    assert calibration_documents("disk[2][1:]") == ROWS[1:]
    assert calibration_documents("disk[2]/a[1].csv") == ["one"]
    with pytest.raises(UnknownNameError, match="unknown text ''"):
        check_text("")


def test_tables_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not")
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"{}")[:10] + 20 * b"\xff")
    (tmp_path / "empty").mkdir()
    for name, message in [
        ("a.parquet", "by datasets"),
        ("empty", "by datasets"),
        ("a.jsonl.gz", "copy it again"),
        ("b.jsonl.gz", "copy it again"),
    ]:
        with pytest.raises(CalibrationError, match=f"{name} cannot be read.*{message}"):
            check_text(str(tmp_path / name))


def test_errors(tmp_path):
    empty, broken, no_field = tmp_path / "e.txt", tmp_path / "b.jsonl", tmp_path / "n.jsonl"
    empty.write_text(" \n")
    broken.write_text('{"text": "fine"}\n{"text": \n')
    no_field.write_text('{"content": "x"}\n')
    for name, kind, message in [
        (str(tmp_path / "missing.txt"), CalibrationError, "does not exist"),
        (str(empty), CalibrationError, "is empty"),
        (str(broken), CalibrationError, "line 2: expected an object"),
        (str(no_field), CalibrationError, 'line 1.*a string "text"'),
        (f"{broken}", CalibrationError, "line 2"),
        ("wikitext", UnknownNameError, "Did you mean 'wikitext2'"),
    ]:
        with pytest.raises(kind, match=message):
            check_text(name)


@pytest.mark.parametrize(
    ("name", "field", "calibration", "evaluation", "joiner"),
    [
        ("c4", "text", "c4-train.00000-of-01024", "c4-validation.00000-of-00008", " "),
        ("wikitext2", "text", "train", "test", "\n\n"),
        ("ptb", "sentence", "train/0000.parquet", "test/0000.parquet", " "),
    ],
)
def test_hub_texts(monkeypatch, name, field, calibration, evaluation, joiner):
    """The texts of SparseGPT's experiments: trained on the first shard or the train split, measured on the held-out."""
    asked = []

    def load_dataset(**arguments):
        asked.append(" ".join(arguments.values()))
        return {field: [f"{len(asked)}-{i}" for i in range(1200)]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    documents = calibration_documents(name)
    assert calibration in asked[0]
    lines = [f"1-{i}" for i in range(1200)]
    assert list(documents) == (lines if name == "c4" else [joiner.join(lines)])
    measured = evaluation_documents(name)
    assert evaluation in asked[1]
    assert calibration not in asked[1]
    assert list(measured) == [f"2-{i}" for i in range(1100 if name == "c4" else 1200)]
    assert evaluation_protocol(name).joiner == joiner


def test_a_byte_order_mark_is_no_text_and_half_a_surrogate_pair_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    assert calibration_documents(str(path)) == ["one"]
    path.write_text('{"text": "one"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(CalibrationError, match="line 2: .*without lone surrogates"):
        calibration_documents(str(path))


def test_a_hub_that_cannot_be_reached_is_a_message(monkeypatch):
    """The network's own exceptions derive from nothing but Exception."""

    def fail(**_):
        raise type("ConnectError", (Exception,), {})("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(CalibrationError, match=r"'ptb' could not be downloaded .*\(ConnectError: no route\)"):
        evaluation_documents("ptb")


def test_disjoint_windows_are_of_other_documents_than_those_that_are_drawn_first():
    documents = [document(1000 * i, 30) for i in range(20)]
    for seed in range(5):
        drawn = draw_segments(documents, encode, 8, 10, seed) // 1000
        others = disjoint_segments(documents, encode, 36, 10, seed) // 1000
        assert not set(drawn.flatten().tolist()) & set(others.flatten().tolist())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
def test_disjoint_windows_share_no_token_and_leave_less_than_one_in_each_document(lengths, most, seqlen, seed):
    documents = [document(1000 * i, length) for i, length in enumerate(lengths)]
    found = disjoint_segments(documents, encode, most, seqlen, seed)
    assert found.shape == (min(most, sum(length // seqlen for length in lengths)), seqlen)
    assert torch.equal(found, found[:, :1] + torch.arange(seqlen))
    assert found.unique().numel() == found.numel()
    assert torch.equal(found, disjoint_segments(documents, encode, most, seqlen, seed))


@pytest.mark.parametrize("draw", [draw_segments, disjoint_segments])
def test_a_million_short_lines_are_not_all_tokenised(draw):
    """The last of them would do, in the order of seed 0; a text without such a run is looked at as a whole."""
    tried = []

    def count(text):
        tried.append(text)
        return range(len(text))

    order = torch.randperm(MOST_SHORT + 2, generator=torch.Generator().manual_seed(0))
    last = int(order[-1] if draw is draw_segments else order[0])
    documents = ["long enough" if index == last else "short" for index in range(MOST_SHORT + 2)]
    if draw is draw_segments:
        with pytest.raises(CalibrationError, match=f"has 8 tokens: the longest of {MOST_SHORT} has 5"):
            draw(documents, count, 1, 8, 0)
    else:
        assert len(draw(documents, count, 1, 8, 0)) == 0
    assert len(tried) == MOST_SHORT


def test_a_long_document_is_drawn_from_in_pieces_and_others_are_as_they_were(tmp_path):
    """Oracle: the text itself. Pieces grow with the segments, which they must hold."""
    text = "".join(map(chr, range(97, 123))) * 20_000
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    drawn = calibration_documents(str(tmp_path / "long.txt"), 32)
    assert ("".join(drawn), [len(piece) for piece in drawn]) == (text, [262_144, 257_856])
    assert calibration_documents(str(tmp_path / "long.txt"), 10_000) == [text]
    assert calibration_documents(str(tmp_path / "short.jsonl"), 32) == ["one", "two"]


def test_no_more_of_a_text_is_tokenised_than_is_wanted():
    """Oracle: the tokenizer itself, here one token for each character after one at the beginning."""
    seen = []

    def tokenizer(text, verbose, add_special_tokens=True):
        seen.append(len(text))
        return {"input_ids": [0] * add_special_tokens + [ord(character) for character in text]}

    assert encode_whole(tokenizer, "a text").tolist() == [0, *map(ord, "a text")]
    assert encode_whole(tokenizer, "", special_tokens=False).tolist() == []
    seen.clear()
    assert encode_whole(tokenizer, "ab" * 3_000_000, 5).tolist() == [0, 97, 98, 97, 98]
    assert seen == [262_784]


@pytest.mark.parametrize(("answer", "offline"), [(None, False), (OSError("no route"), True)])
def test_without_a_network_the_hub_is_asked_once_and_the_cache_is_read(answer, offline, monkeypatch):
    asked = []

    def ask(address, timeout):
        asked.append(address)
        if answer:
            raise answer

    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.load_dataset", lambda **_: {"text": [datasets.config.HF_HUB_OFFLINE]})
    monkeypatch.setattr("time.monotonic", lambda: 60.0 * 1000)
    hub.is_reachable.cache_clear()
    assert [calibration_documents("c4"), calibration_documents("wikipedia")] == [[offline], [offline]]
    assert len(asked) == 1
    # Later, the hub answers again, and nothing has been changed for the process.
    answer = None
    monkeypatch.setattr("time.monotonic", lambda: 60.0 * 1001)
    assert calibration_documents("c4") == [False]
    assert not datasets.config.HF_HUB_OFFLINE
    hub.is_reachable.cache_clear()
