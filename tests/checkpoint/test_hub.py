"""Uploads to the Hugging Face Hub. Oracle: what a stand-in for its server holds afterwards (`tests/hub.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint.hub import prepare_push
from hasslefree.checkpoint.output import check_output
from hasslefree.cli import app
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.errors import OutputError, with_flags
from tests.hub import Repository

EORA = Recipe(method="eora", rank=2)
OURS = b"---\ntags:\n- hasslefree\n---\n"


@pytest.fixture
def ada(hub, monkeypatch):
    """The hub, with a user logged in who may write to ada/ and lab/."""
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    hub.repositories["ada/theirs"] = Repository({"config.json": b"{}", "README.md": b"---\ntags: [gguf]\n---\n"})
    hub.repositories["ada/ours"] = Repository({"README.md": OURS, "old.safetensors": b"", ".gitattributes": b""})
    hub.repositories["bob/model"] = Repository({"README.md": OURS})
    hub.repositories["bob/gated"] = Repository({"README.md": OURS}, gated=True)
    hub.repositories["bob/secret"] = Repository({"README.md": OURS}, private=True)
    return hub


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "private"), [("ada/new", False), ("lab/new", True), ("ada/ours", False)])
def test_a_repository_becomes_a_copy_of_the_folder(name, private, ada, compressed_copy):
    out = compressed_copy(EORA)
    assert hasslefree.push(out, name, private=private) == f"{ada.url}/{name}"
    found = ada.repositories[name]
    assert found.private == private
    assert {path: content for path, content in found.files.items() if path != ".gitattributes"} == files_of(out)
    card = found.files["README.md"].decode()
    assert f'from_pretrained("{name}")' in card
    assert "path/to" not in card
    assert hasslefree.push(out, name) == f"{ada.url}/{name}"
    own = '\nCompare it with `from_pretrained("meta/base")`.\n'
    (out / "README.md").write_text(card + own, encoding="utf-8")
    hasslefree.push(out, "lab/other")
    assert ada.repositories["lab/other"].files["README.md"].decode() == card.replace(name, "lab/other") + own


def test_the_card_of_a_model_in_a_folder_says_so(ada, compressed_copy, tmp_path):
    out = compressed_copy(Recipe(method="gptq", symmetric=True, group_size=0, leave_dense=("*.down_proj",)))
    hasslefree.export(out, tmp_path / "codes", "compressed-tensors")
    hasslefree.push(tmp_path / "codes", "ada/new")
    card = ada.repositories["ada/new"].files["README.md"].decode()
    assert 'from_pretrained("ada/new", subfolder="base")' in card


SENTENCES = {
    "ada/theirs": "ada/theirs holds a model that hasslefree did not write; choose another name",
    "bob/model": "your token cannot write to bob/model: check the user (`hf auth whoami`) and the rights (https://",
    "bob/gated": "your token cannot write to bob/gated",
    "bob/secret": "your token cannot write to bob/secret",
    "bob/new": "your token cannot write to bob/new",
    "model": "a model on the hub is named USER/NAME, in letters and digits with single - _ . between, got 'model'",
    "ada/my model": "a model on the hub is named USER/NAME",
    "ada/a--b": "a model on the hub is named USER/NAME",
    "a/b/c": "a model on the hub is named USER/NAME",
}


@pytest.mark.parametrize(("name", "sentence"), SENTENCES.items())
def test_a_name_that_cannot_be_written(name, sentence, ada):
    before = set(ada.repositories)
    with pytest.raises(OutputError) as caught:
        prepare_push(name)
    assert sentence in str(caught.value)
    assert set(ada.repositories) == before


@pytest.mark.parametrize(
    ("token", "sentence"),
    [
        (None, "no valid token of the hub: run `hf auth login` with one that can write"),
        ("hf_expired", "no valid token of the hub: run `hf auth login`"),
        ("hf_reader", "your token cannot write to ada/new"),
    ],
)
def test_a_token_without_rights(token, sentence, ada, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    for name in ("ada/new", "ada/ours"):
        with pytest.raises(OutputError) as caught:
            prepare_push(name)
        assert sentence.replace("ada/new", name) in str(caught.value)


def test_a_public_repository_is_not_taken_for_a_private_one(ada):
    with pytest.raises(OutputError) as caught:
        prepare_push("ada/ours", private=True)
    assert "make it private in its settings, or leave out --private" in with_flags(caught.value.message)


@pytest.mark.parametrize("down", ["whoami", "create", "auth-check"])
def test_a_hub_that_is_down_stops_the_command_before_the_work(down, ada, tmp_path):
    ada.fails[down] = 503
    with pytest.raises(OutputError, match=r"the hub failed \(.*503.*\); check the network, and try again later"):
        app(["compress", str(MODEL), str(tmp_path / "out"), "--push-to", "ada/new"], standalone_mode=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", ["preupload", "objects", "commit"])
def test_an_upload_that_fails_loses_nothing(step, ada, compressed_copy):
    out = compressed_copy(EORA)
    ada.fails[step] = 500
    with pytest.raises(OutputError) as caught:
        hasslefree.push(out, "ada/new")
    command = f"hf upload ada/new {out} --delete '*'"
    assert str(caught.value).endswith(f"{out} is complete; upload it with {command}")
    assert "not uploaded: the hub failed (" in str(caught.value)
    ada.fails.clear()
    hf_upload(ada, command)
    found = ada.repositories["ada/new"].files
    assert {path: found[path] for path in files_of(out)} == files_of(out)


def hf_upload(hub, command):
    """Run a command of huggingface_hub in a shell, as a user would."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    subprocess.run(command, shell=True, env=environment, check=True, capture_output=True)


def test_a_folder_that_nothing_wrote_is_not_uploaded(ada, tmp_path):
    for missing in ("README.md", "files.json"):
        with pytest.raises(OutputError, match=f"has no {missing}; push takes a folder that compress or export wrote"):
            hasslefree.push(tmp_path, "ada/new")
        (tmp_path / missing).touch()
    assert "ada/new" not in ada.repositories


def test_a_model_goes_to_the_hub_and_comes_back(ada, tmp_path, capsys):
    """Oracle: the logits of the same model, loaded from its folder."""
    quick = ["--method", "magnitude", "--rank", "0", "--calibration", CALIBRATION, "--samples", "2", "--seqlen", "32"]
    out, dense = tmp_path / "out", tmp_path / "dense"
    for words in (
        ["compress", MODEL, out, *quick, "--push-to", "ada/small", "--private"],
        ["export", out, dense, "--to", "dense", "--push-to", "ada/dense"],
    ):
        app(list(map(str, words)), standalone_mode=False)
        assert capsys.readouterr().out.endswith(f"Uploaded to {ada.url}/{words[-1 - ('--private' in words)]}.\n")
        check_output(out if words[0] == "compress" else dense, overwrite=True)  # it is still hasslefree's own
    assert ada.repositories["ada/small"].private
    for name, folder in (("ada/small", out), ("ada/dense", dense)):
        ids = AutoTokenizer.from_pretrained(name)("Return a new dictionary", return_tensors="pt")
        logits = [AutoModelForCausalLM.from_pretrained(place)(**ids).logits for place in (name, folder)]
        assert torch.equal(*logits)
