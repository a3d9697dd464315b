"""The scripts in examples/ run as they are, on the model of the demo; `make nightly` runs them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasslefree.demo.run import MODEL

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
CONVERTER = Path(os.environ.get("LLAMA_CPP", "llama.cpp")) / "convert_hf_to_gguf.py"
# llama.cpp's converter knows tokenizers by a list, on which the demo's is not.
CONVERTED = os.environ.get("GGUF_MODEL")
# What an example needs that is not installed with the package.
MISSING = {
    "gguf_for_llama_cpp": None
    if CONVERTER.exists() and CONVERTED
    else "LLAMA_CPP names no clone of llama.cpp, or GGUF_MODEL no folder of a model that its converter knows",
    "serve_with_vllm": None if importlib.util.find_spec("vllm") else "vLLM is not installed",
}
LAST = {
    "compress_and_chat": "Write a line, or press Ctrl-D to end.",
    "fine_tune_low_rank": ": loss ",
    "gguf_for_llama_cpp": "llama-cli -m compressed.gguf",
    "mixture_of_experts": "kept dense: ",
    "own_method": "oats: mean relative error",
    "serve_with_vllm": "Return a new dictionary",
}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_is_short(script):
    assert script.stem in LAST
    assert len(script.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.nightly
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_runs(script, tmp_path):
    if reason := MISSING.get(script.stem):
        pytest.skip(reason)
    own = {"mixture_of_experts": [], "gguf_for_llama_cpp": [str(CONVERTED), str(CONVERTER)]}
    model = own.get(script.stem, [str(MODEL)])
    run = {"cwd": tmp_path, "input": "Return a new dictionary\n", "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, str(script.resolve()), *model], **run)
    assert done.returncode == 0, done.stderr
    assert LAST[script.stem] in done.stdout
