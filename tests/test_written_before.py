"""Folders that an earlier commit wrote are read, exported and resumed; see tests/fixtures/make.py.

Only what users call is used here, so that a move of an internal module leaves this file as it is. The exception are the
ranks that were allocated then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import HasslefreeError, Recipe
from hasslefree.allocate.allocation import Allocation
from hasslefree.cli import run_app as main

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
FOLDERS = EXPECTED["folders"]
TOKENS = torch.tensor([[int(token) for token in EXPECTED["tokens"].split()]])
OUT = EXPECTED["unfinished"]["folder"]
JOURNAL = Path(f"{OUT}.unfinished", "progress.json")

each_folder = pytest.mark.parametrize("name", FOLDERS)


def recorded(about: dict) -> torch.Tensor:
    """The logits (1, tokens, vocabulary) that the earlier commit computed."""
    return torch.tensor([[[float(value) for value in row.split()] for row in about["logits"]]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(input_ids=TOKENS, use_cache=False).logits


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def run(monkeypatch, *arguments) -> int:
    """The exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["hasslefree", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0


def test_the_dense_model_gives_the_same_logits():
    """Without that, no other test here says anything about hasslefree."""
    found = logits(AutoModelForCausalLM.from_pretrained(FIXTURES / "dense"))
    torch.testing.assert_close(found, recorded(EXPECTED["dense"]), rtol=1e-4, atol=1e-4)


@each_folder
def test_a_folder_loads_and_gives_the_same_logits(name):
    assert digests(FIXTURES / name) == FOLDERS[name]["sha256"], "the fixture itself has changed"
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name)
    assert str(model.dtype) == f"torch.{FOLDERS[name]['dtype']}"
    torch.testing.assert_close(logits(model), recorded(FOLDERS[name]), rtol=1e-4, atol=1e-4)


@each_folder
def test_inspect_reads_it(name, monkeypatch, tmp_path):
    """Oracle for the bytes: the tensors in the files."""
    assert run(monkeypatch, "inspect", FIXTURES / name, "--output", tmp_path / "sizes.json") == 0
    found = json.loads((tmp_path / "sizes.json").read_text())
    assert len(found["layers"]) == FOLDERS[name]["layers"]
    assert found["bytes"] == FOLDERS[name]["bytes"]


def test_report_reads_them(monkeypatch, tmp_path):
    page = tmp_path / "page.html"
    assert run(monkeypatch, "report", *(FIXTURES / name for name in FOLDERS), "--output", page) == 0
    text = page.read_text()
    for about in FOLDERS.values():
        recipe = {"pattern": "dense", "method": "joint"} | about["recipe"]
        assert f"compress dense OUT --pattern {recipe['pattern']} --method {recipe['method']}" in text


def close_to_rounding(found: torch.Tensor, name: str) -> None:
    """An export rounds S + L once more, to the dtype of the folder."""
    expected, eps = recorded(FOLDERS[name]), torch.finfo(getattr(torch, FOLDERS[name]["dtype"])).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=max(1e-3, 4 * eps * expected.abs().max().item()))


@each_folder
def test_the_dense_export(name, tmp_path):
    hasslefree.export(FIXTURES / name, tmp_path / "dense", "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    close_to_rounding(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), name)


@pytest.mark.parametrize("name", [name for name in FOLDERS if "rank" in FOLDERS[name]["recipe"]])
def test_the_peft_export(name, monkeypatch, tmp_path):
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install "hasslefree[peft]"')
    assert run(monkeypatch, "export", FIXTURES / name, "--to", "peft", tmp_path / "peft") == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "peft" / "base")
    close_to_rounding(logits(peft.PeftModel.from_pretrained(base, tmp_path / "peft")), name)


def test_the_narrow_export(tmp_path):
    hasslefree.export(FIXTURES / "structured", tmp_path / "narrow", "narrow")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    assert (model.config.num_attention_heads, model.config.intermediate_size) == (2, 16)
    close_to_rounding(logits(model), "structured")


@pytest.fixture
def unfinished(tmp_path, monkeypatch) -> dict:
    """The interrupted compression in the working folder, as if these versions had begun it; returns its journal.

    Nothing else is rewritten: the paths in the journal are relative to the folder that was the working folder. The
    ranks are those that were allocated then, by another estimate of the sensitivities.
    """
    entries = json.loads((FIXTURES / OUT / "config.json").read_text())["quantization_config"]["modules"]

    def allocate(walk, plan, *rest):
        for index, plans in enumerate(plan):
            for name, layer in plans.items():
                rank = entries[f"{walk.blocks.prefix(index)}.{name}"]["rank"]
                plans[name] = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, rank=rank))
        return Allocation(plan)

    monkeypatch.setattr("hasslefree.pipeline.compress.allocate", allocate)
    shutil.copytree(FIXTURES / "dense", tmp_path / "dense")
    shutil.copytree(FIXTURES / f"{OUT}.unfinished", tmp_path / f"{OUT}.unfinished")
    shutil.copy(FIXTURES / "calibration.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    journal = json.loads(JOURNAL.read_text())
    versions = journal["identity"]["versions"]
    versions.update({package: importlib.metadata.version(package) for package in versions})
    recipe = journal["identity"]["recipe"]
    settings = {name: recipe[name] for name in recipe.keys() - FORMER} | NEW
    del settings["minutes"]  # with other minutes, the same blocks are resumed
    journal["identity"]["recipe"] = settings
    config = AutoModelForCausalLM.from_pretrained("dense").config.to_dict()
    journal["identity"]["config"] = {name: config[name] for name in config.keys() - UNCOMPARED}
    JOURNAL.write_text(json.dumps(journal))
    return json.loads(JOURNAL.read_text())


def identity_of_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of the finished parts: files that were renamed and not written anew keep both."""
    stats = {name: (folder / name).stat() for name in EXPECTED["unfinished"]["parts"]}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


# What `balanced` was then.
BALANCED = {"rounds": 100, "allocate": "error", "match_predictions": 0}
# Fields that did not exist, and have no effect there.
NEW = {"match_predictions": 0, "offset": None, "size": None, "engine": None, "check": True, "minutes": None}
# What a configuration has besides that of the model itself.
UNCOMPARED = {"_name_or_path", "transformers_version"}
# Fields that exist no longer.
FORMER = {"dense_target", "match_blocks"}


def resume(**changes):
    recipe = Recipe(**FOLDERS[OUT]["recipe"] | BALANCED | changes)
    return hasslefree.compress("dense", OUT, recipe, device="cpu", resume=True)


def check_whole(folder: Path, tmp_path: Path) -> None:
    """The resumed folder against that of the run that nothing interrupted.

    Finished parts bit for bit. What is solved anew rounds otherwise on another processor, and where products are
    bfloat16 other entries are kept: it is as good, by its errors.
    """
    finished = EXPECTED["unfinished"]["parts"]
    found, whole = digests(folder), FOLDERS[OUT]["sha256"]
    assert found.keys() == whole.keys() > set(finished)
    assert {name: found[name] for name in finished} == {name: whole[name] for name in finished}
    check_records(folder)


def check_records(folder: Path) -> None:
    """config.json and compression.json say the same; errors of tiny layers that were solved anew, within a quarter."""
    configs = [
        json.loads((path / "config.json").read_text())["quantization_config"] for path in (folder, FIXTURES / OUT)
    ]
    for config in configs:
        assert all(len(entry.pop("crc32")) == 8 for entry in config["modules"].values())
    assert configs[0] == configs[1]
    found, expected = (json.loads((path / "compression.json").read_text()) for path in (folder, FIXTURES / OUT))
    for name, value in NEW.items():
        assert found["recipe"].pop(name) == value
    for name in FORMER:
        del expected["recipe"][name]
    del expected["matching"]
    layers = [(new, old) for new, old in zip(found.pop("layers"), expected.pop("layers"), strict=True)]
    for new, old in [(found, expected), *layers]:
        assert new.keys() >= old.keys()
        for name in old.keys() - {"versions"}:
            close = pytest.approx(old[name], rel=0.25, abs=1e-3) if is_measured(old[name]) else old[name]
            assert new[name] == close or name in ("seconds", "bytes", "history"), name


def is_measured(value) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and all(isinstance(each, float) for each in value))


def test_an_interrupted_compression_is_resumed(unfinished, tmp_path):
    before = identity_of_files(JOURNAL.parent / "model")
    report = resume()
    assert not JOURNAL.parent.exists()
    assert identity_of_files(tmp_path / OUT) == before, "a finished part was written anew"
    # Had a finished layer been solved again, it would have taken another time.
    done = [layer for part in unfinished["parts"] for layer in part["layers"]]
    assert [layer.seconds for layer in report.layers][: len(done)] == [layer["seconds"] for layer in done]
    assert 0 < len(done) < len(report.layers) == FOLDERS[OUT]["layers"]
    check_whole(tmp_path / OUT, tmp_path)


def test_it_is_resumed_from_the_command_line(unfinished, monkeypatch, tmp_path):
    before = identity_of_files(JOURNAL.parent / "model")
    flags = [word for name, value in FOLDERS[OUT]["recipe"].items() for word in (f"--{name}", value)]
    flags += ["--rounds", 100, "--allocate", "error", "--match-predictions", 0]
    assert run(monkeypatch, "compress", "dense", OUT, *flags, "--device", "cpu", "--resume") == 0
    assert identity_of_files(tmp_path / OUT) == before
    check_whole(tmp_path / OUT, tmp_path)


def test_another_recipe_does_not_resume_it(unfinished):
    with pytest.raises(HasslefreeError) as caught:
        resume(rank=4, rounds=99)
    for difference in (r"recipe\.rank\b[^;]*\b3\b[^;]*\b4\b", r"method\b[^;]*rounds=100\b[^;]*rounds=99\b"):
        assert re.search(difference, str(caught.value))
    assert json.loads(JOURNAL.read_text()) == unfinished


def changed(value):
    """JSON with another value in the place of each."""
    return {key: changed(each) for key, each in value.items()} if isinstance(value, dict) else ["another", value]


def names(value, prefix="") -> list[str]:
    """Of each value in JSON, such as recipe.rank."""
    if not isinstance(value, dict):
        return [prefix]
    return [name for key, each in value.items() for name in names(each, f"{prefix}.{key}" if prefix else key)]


def test_every_value_of_the_journal_s_identity_is_compared(unfinished):
    JOURNAL.write_text(json.dumps(unfinished | {"identity": changed(unfinished["identity"])}))
    with pytest.raises(HasslefreeError) as caught:
        resume()
    assert str(caught.value).count("another") == len(names(unfinished["identity"]))
    for name in names(unfinished["identity"]):
        assert re.search(rf"\b{re.escape(name)}\b[^;]*another", str(caught.value)), name
