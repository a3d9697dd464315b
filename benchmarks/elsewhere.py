"""Whether other engines compute what a compressed model computes, from its exports.

    python benchmarks/elsewhere.py NAME=FOLDER… --engines ENGINE=PYTHON… [--converter FOLDER]

FOLDER is what `hasslefree compress` wrote. PYTHON is the interpreter of an environment that holds the engine, one of
those in harness/engines.py; each has an environment of its own, because they pin different versions of transformers.
--converter is the folder of llama.cpp that has convert_hf_to_gguf.py; the source distribution of llama-cpp-python has
it under vendor/llama.cpp.

Prompts are the first tokens of chunks of the demo's held-out text. Each is continued greedily by the compressed model
in transformers, and by every engine from the export, all in float32. Where an engine's tokens differ, the row says by
how much the first two logits of the compressed model differ there: near zero, the engine rounds otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.models import MODEL
from harness.record import RESULTS, ROOT, machine, write

import hasslefree
from hasslefree.models.load import load_model, load_tokenizer

ENGINES = ROOT / "benchmarks" / "harness" / "engines.py"
HELD_OUT = MODEL.parent / "held_out.txt"
OUTPUT = RESULTS / "elsewhere.json"
PROMPT_TOKENS = 16
# The engines that load S and L apart, as a model and an adapter.
ADAPTERS = ("llama.cpp",)


def named(pair: str) -> tuple[str, str]:
    name, sign, value = pair.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{pair!r} is not NAME=VALUE")
    return name, value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=named, metavar="NAME=FOLDER")
    parser.add_argument("--engines", nargs="+", type=named, required=True, metavar="ENGINE=PYTHON")
    parser.add_argument("--converter", help="the folder of llama.cpp's scripts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def expected(folder: Path, prompts: int, count: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Prompts, the compressed model's greedy tokens after each, and by how much the first two logits differ there."""
    model, tokenizer = load_model(str(folder), dtype="float32", device="cpu"), load_tokenizer(str(folder))
    ids = tokenizer(HELD_OUT.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    step = len(ids) // prompts
    given = [ids[start : start + PROMPT_TOKENS] for start in range(0, step * prompts, step)]
    tokens, gaps = [], []
    for prompt in given:
        found: Any = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            eos_token_id=None, pad_token_id=0, max_new_tokens=count, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        best = [score[0].topk(2).values for score in found.scores]
        tokens.append(found.sequences[0, len(prompt) :].tolist())
        gaps.append([(first - second).item() for first, second in best])
    return given, tokens, gaps


def compared(found: list[list[int]], tokens: list[list[int]], gaps: list[list[float]]) -> dict[str, Any]:
    """How many continuations are the same to the last token, and the widest gap at which one parts."""
    parts = [next((i for i, pair in enumerate(zip(*both, strict=True)) if len(set(pair)) > 1), None)
             for both in zip(found, tokens, strict=True)]  # fmt: skip
    parted = [gap[at] for gap, at in zip(gaps, parts, strict=True) if at is not None]
    return {"same": parts.count(None), "prompts": len(parts), "widest_gap": max(parted, default=None)}


def measured(engine: str, python: str, export: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What the engine answers, or the last line of its error."""
    with tempfile.TemporaryDirectory() as work:
        command = [python, str(ENGINES), engine, str(export), work]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows(name: str, folder: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What every engine makes of every export of a compressed model that it takes."""
    prompts, tokens, gaps = expected(Path(folder), args.prompts, args.new_tokens)
    request = {"prompts": prompts, "count": args.new_tokens, "converter": args.converter}
    adapting = [(engine, python) for engine, python in args.engines if engine in ADAPTERS]
    for form, engines in (("dense", args.engines), ("peft", adapting)):
        if not engines:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            export = Path(temporary) / "export"
            hasslefree.export(folder, export, form)
            for engine, python in engines:
                answer = measured(engine, python, export, request)
                found = answer.pop("tokens", None)
                answer |= compared(found, tokens, gaps) if found else {}
                yield {"model": name, "engine": engine, "form": form, "new_tokens": args.new_tokens, **answer}


def main() -> None:
    args = parse()
    content: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
    content |= {"machine": machine(), "date": datetime.date.today().isoformat()}
    for name, folder in args.models:
        for row in rows(name, folder, args):
            same = ("model", "engine", "form")
            others = [old for old in content["rows"] if any(old[key] != row[key] for key in same)]
            content["rows"] = [*others, row]
            write(args.output, content)
            print(row, flush=True)


if __name__ == "__main__":
    main()
