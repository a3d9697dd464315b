"""Loading a folder: whole, or an error that says what is missing."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import CheckpointError
from tests.tiny_models import build, logits, segments


@pytest.fixture
def folder(tmp_path):
    hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    return tmp_path / "out"


def test_a_fresh_process_needs_one_import(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(logits(model, segments()), folder / "logits.pt")
    program = (
        "import sys, torch, hasslefree; from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); want = torch.load(sys.argv[1] + '/logits.pt')\n"
        "g = torch.Generator().manual_seed(0); tokens = torch.randint(3, 64, (4, 16), generator=g)\n"
        "assert torch.equal(m(input_ids=tokens, use_cache=False).logits, want)\n"
        "print(m.model.layers[0].mlp.up_proj)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "SparseLowRankLinear(in_features=32, out_features=48, pattern=2:4, rank=2, bias=False)" in done.stdout


def test_dtype_may_be_asked_for(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def change(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(version=99), "format version 99.*update hasslefree"),
        (lambda c: c.update(layout="packed"), "layout 'packed'"),
        (lambda c: c["modules"].update({"model.layers.9.x": {"pattern": "2:4", "rank": 2}}), "model.layers.9.x, which"),
        (
            lambda c: c["modules"].update({"model.norm": {"pattern": "2:4", "rank": 2}}),
            "no linear layer but a LlamaRMS",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_an_error(folder, edit, message):
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_missing_factor_is_an_error(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.low_rank_v"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no low_rank_v of model\.layers\.1\.mlp\.up_proj"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_without_the_import_the_layers_are_missing_not_taken_for_s_alone(folder):
    """S alone gives plausible text: it must not be found under the name of the dense weight."""
    stored, layers = set(load_file(folder / "model.safetensors")), json.loads((folder / "config.json").read_text())
    names = layers["quantization_config"]["modules"]
    assert names
    assert not {f"{name}.weight" for name in names} & stored
    assert {f"{name}.sparse" for name in names} <= stored


def test_every_file_can_be_read_by_whom_the_umask_lets(folder):
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}
