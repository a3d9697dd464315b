"""What other engines make of a compressed model, from its exports.

    python benchmarks/elsewhere.py tokens NAME=FOLDER… --engines ENGINE=PYTHON… [--forms FORM…] [--template FILE]
        [--converter FOLDER] [--prompts N] [--new-tokens N]
    python benchmarks/elsewhere.py gguf NAME=FOLDER… --python PYTHON --converter FOLDER [--types BF16 Q8_0 Q4_K_M]
    python benchmarks/elsewhere.py speed NAME=FOLDER… --dense FOLDER --llama FOLDER --converter FOLDER
        [--type Q4_K_M] [--new-tokens N] [--turns N] [--threads N] [--seed N]

tokens: FOLDER is what `hasslefree compress` wrote. PYTHON is the interpreter of an environment that holds the engine,
one of those in harness/engines.py; each has an environment of its own, because they pin different versions of
transformers. Prompts are the first tokens of chunks of the demo's held-out text. Each is continued greedily by the
compressed model in transformers, and by every engine from the export, all in float32. Where an engine's tokens differ,
the row says by how much the first two logits of the compressed model differ there: near zero, the engine rounds
otherwise. For some engines, the log-probabilities of the likeliest first tokens are compared too.

--forms gguf, mlx and compressed-tensors need a folder of four bits, and gguf a --template: the dense model as a GGUF
file. By default the exports are dense and, for llama.cpp, peft.

gguf: what llama.cpp's own quantisations of a dense export cost. FOLDER is a compressed folder, or a plain model to
compare with, and PYTHON has llama.cpp. The loss on chunks of the held-out text is compared with that of the first type.

speed: tokens per second in llama.cpp of the export to gguf, which has one file, against llama.cpp's own type of the
dense model and its file in bfloat16, in turns within one run, in processor time. --seed chooses the prompt among chunks
of the text. --llama is the folder of the library, as harness/llama.py describes it.

--converter is the folder of llama.cpp that has convert_hf_to_gguf.py; the source distribution of llama-cpp-python has
it under vendor/llama.cpp.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hasslefree
from harness.models import MODEL
from harness.record import RESULTS, ROOT, machine, write
from hasslefree.checkpoint.entries import QUANT_METHOD
from hasslefree.models.load import load_model
from hasslefree.models.tokenizer import load_tokenizer

HARNESS = ROOT / "benchmarks" / "harness"
HELD_OUT = MODEL.parent / "held_out.txt"
PROMPT_TOKENS = 16
TEXT_TOKENS = 256
# Export → the engines that read it; None for all.
FORMS = {
    "dense": None,
    "peft": ("llama.cpp",),
    "gguf": ("llama.cpp", "llama.cpp, S in float32"),
    "mlx": ("MLX",),
    "compressed-tensors": ("vLLM", "vLLM, inputs in 16 bits", "transformers and PEFT"),
}


def named(pair: str) -> tuple[str, str]:
    name, sign, value = pair.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{pair!r} is not NAME=VALUE")
    return name, value


def chunks(folder: Path, count: int, length: int) -> list[list[int]]:
    """Evenly spaced tokens of the held-out text."""
    text = HELD_OUT.read_text(encoding="utf-8")
    ids: list[int] = load_tokenizer(str(folder))(text, add_special_tokens=False, verbose=False)["input_ids"]
    step = len(ids) // count
    return [ids[start : start + length] for start in range(0, step * count, step)]


def expected(folder: Path, prompts: int, count: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts, and of the compressed model its greedy tokens after each, by how much the first two logits differ there,
    and the log-probabilities of all tokens after the prompt."""
    model, given = load_model(str(folder), dtype="float32", device="cpu"), chunks(folder, prompts, PROMPT_TOKENS)
    hasslefree.use_backend(model, "unpacked")
    ours: dict[str, Any] = {"tokens": [], "gaps": [], "first": []}
    for prompt in given:
        found: Any = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            eos_token_id=None, pad_token_id=0, max_new_tokens=count, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        best = [score[0].topk(2).values for score in found.scores]
        ours["tokens"].append(found.sequences[0, len(prompt) :].tolist())
        ours["gaps"].append([(first - second).item() for first, second in best])
        ours["first"].append(found.scores[0][0].double().log_softmax(0))
    return given, ours


def compared(found: list[list[int]], first: list[dict[str, float]], ours: dict[str, Any]) -> dict[str, Any]:
    """How many continuations are the same to the last token, the widest gap at which one parts, and how far the
    log-probabilities of the likeliest first tokens are apart, if the engine gives them."""
    tokens, gaps = ours["tokens"], ours["gaps"]
    parts = [next((i for i, pair in enumerate(zip(*both, strict=True)) if len(set(pair)) > 1), None)
             for both in zip(found, tokens, strict=True)]  # fmt: skip
    parted = [gap[at] for gap, at in zip(gaps, parts, strict=True) if at is not None]
    apart = [abs(score - float(scores[int(token)])) for its, scores in zip(first, ours["first"], strict=False)
             for token, score in its.items()]  # fmt: skip
    answer = {"same": parts.count(None), "prompts": len(parts), "widest_gap": max(parted, default=None)}
    return answer | ({"largest_difference": max(apart), "mean_difference": statistics.mean(apart)} if apart else {})


def answer_of(python: str, script: str, arguments: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """What a script of the harness answers, or the last line of its error."""
    with tempfile.TemporaryDirectory() as work:
        command = [python, str(HARNESS / script), *arguments, work]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    # An engine may write to standard output when it stops.
    answer: dict[str, Any] = json.loads(
        [line for line in done.stdout.splitlines() if line.startswith('{"versions')][-1]
    )
    return answer


def token_rows(name: str, folder: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What every engine makes of every export of a compressed model that it takes."""
    prompts, ours = expected(Path(folder), args.prompts, args.new_tokens)
    request = {"prompts": prompts, "count": args.new_tokens, "converter": args.converter}
    for form in args.forms:
        engines = [(engine, python) for engine, python in args.engines if engine in (FORMS[form] or (engine,))]
        if not engines:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            export = Path(temporary) / "export"
            hasslefree.export(folder, export, form, template=args.template if form == "gguf" else None)
            for engine, python in engines:
                answer = answer_of(python, "engines.py", [engine, str(export)], request)
                found, first = answer.pop("tokens", None), answer.pop("first", [])
                answer |= compared(found, first, ours) if found else {}
                yield {"model": name, "engine": engine, "form": form, "new_tokens": args.new_tokens, **answer}


def gguf_rows(name: str, folder: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The loss of a model in each type, beside that of the first; a compressed folder is exported dense before."""
    given = Path(folder)
    packed = is_compressed(given)
    request = {"texts": chunks(given, args.texts, TEXT_TOKENS), "types": args.types, "converter": args.converter}
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "export" if packed else given
        if packed:
            hasslefree.export(folder, source, "dense")
        answer = answer_of(args.python, "gguf_types.py", [str(source)], request)
    if "error" in answer:
        raise SystemExit(f"{name}: {answer['error']}")
    plain = answer["types"][args.types[0]]["losses"]
    for kind, found in answer["types"].items():
        losses = found.pop("losses")
        more = [loss - before for loss, before in zip(losses, plain, strict=True)]
        yield {
            "model": name,
            "type": kind,
            **found,
            "texts": len(losses),
            "perplexity": math.exp(statistics.mean(losses)),
            "loss_increase": statistics.mean(more),
            "standard_error": statistics.stdev(more) / math.sqrt(len(more)),
            "versions": answer["versions"],
        }


def speed_rows(name: str, folder: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Our file, llama.cpp's own and the dense one: tokens per second, and their median ratios to those of the rival and
    of the dense file.
    """
    from harness.gguf_speed import seconds_by_file  # needs llama-cpp-py-sync
    from harness.llama import LlamaCpp

    prompt = random.Random(args.seed).choice(chunks(Path(folder), 16, PROMPT_TOKENS))
    with tempfile.TemporaryDirectory() as temporary:
        program = LlamaCpp(args.llama, args.converter, Path(temporary))
        ours = Path(temporary) / "ours.gguf"
        hasslefree.export(folder, ours, "gguf", converter=args.converter)
        files = {"hasslefree": ours, args.type: program.quantised(args.dense, args.type, {})}
        files["dense"] = program.dense(args.dense)
        found = seconds_by_file(program, files, prompt, args.new_tokens, args.turns, args.threads)
        sizes = {file: path.stat().st_size for file, path in files.items()}
    shared = {"machine": machine() | {"threads": args.threads}, "date": datetime.date.today().isoformat()}
    shared |= {"seed": args.seed, "new_tokens": args.new_tokens, "turns": args.turns}

    def over(own: list[float], other: str) -> float:
        return statistics.median(theirs / seconds for seconds, theirs in zip(own, found[other], strict=True))

    for file, seconds in found.items():
        yield {
            "model": name,
            "file": file,
            "rival": args.type,
            "bytes": sizes[file],
            "tokens_per_second": args.new_tokens / statistics.median(seconds),
            "over_rival": over(seconds, args.type),
            "over_dense": over(seconds, "dense"),
            "bytes_over_dense": sizes[file] / sizes["dense"],
            **shared,
        }


def is_compressed(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("quantization_config", {}).get("quant_method") == QUANT_METHOD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    tokens, gguf, speed = (commands.add_parser(name) for name in ("tokens", "gguf", "speed"))
    for each in (tokens, gguf, speed):
        each.add_argument("models", nargs="+", type=named, metavar="NAME=FOLDER")
    for each in (tokens, gguf, speed):
        each.add_argument("--converter", required=each is not tokens, help="the folder of llama.cpp's scripts")
    tokens.set_defaults(rows=token_rows, key=("model", "engine", "form"), field="rows")
    tokens.add_argument("--engines", nargs="+", type=named, required=True, metavar="ENGINE=PYTHON")
    tokens.add_argument("--forms", nargs="+", choices=FORMS, default=["dense", "peft"])
    tokens.add_argument("--template", type=Path)
    tokens.add_argument("--prompts", type=int, default=4)
    tokens.add_argument("--new-tokens", type=int, default=32)
    tokens.add_argument("--output", type=Path, default=RESULTS / "elsewhere.json")
    gguf.add_argument("--python", required=True, help="the interpreter of an environment with llama.cpp")
    gguf.set_defaults(rows=gguf_rows, key=("model", "type"), field="rows")
    gguf.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_K_M"])
    gguf.add_argument("--texts", type=int, default=16, help=f"chunks of {TEXT_TOKENS} tokens")
    gguf.add_argument("--output", type=Path, default=RESULTS / "gguf.json")
    speed.set_defaults(rows=speed_rows, key=("model", "file"), field="speed")
    speed.add_argument("--dense", required=True, metavar="FOLDER", help="the dense model")
    speed.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="of llama.cpp's library")
    speed.add_argument("--type", default="Q4_K_M")
    speed.add_argument("--new-tokens", type=int, default=64, help="of each turn")
    speed.add_argument("--turns", type=int, default=10)
    speed.add_argument("--threads", type=int, default=1)
    speed.add_argument("--seed", type=int, default=0)
    speed.add_argument("--output", type=Path, default=RESULTS / "elsewhere.json")
    args = parser.parse_args()
    content: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    if args.field == "rows":  # others name their machine in each row
        content |= {"machine": machine(), "date": datetime.date.today().isoformat()}
    for name, folder in args.models:
        for row in args.rows(name, folder, args):
            others = [old for old in content.get(args.field, []) if any(old[key] != row[key] for key in args.key)]
            content[args.field] = [*others, row]
            write(args.output, content)
            print(row, flush=True)


if __name__ == "__main__":
    main()
