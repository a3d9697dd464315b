"""The error of single layers on texts that they were not fitted on, by method and pattern.

    python benchmarks/other_text.py MODEL TEXT… --calibration FILE [--blocks 12] [--patterns 2:8 3:8 4:8 2:4]
        [--layers k_proj …] [--methods NAME …] [--rank 64] [--samples 32] [--seqlen 1024] [--text-samples 16]
        [--output FILE]

Each method decomposes the layers of some blocks of the dense model on the calibration text, as for figure 1 of the
paper (`benchmarks/reproduction.py`). The relative error of each layer is then measured on the inputs that the dense
model gives it for the calibration text and for every TEXT, in segments of the same length. TEXT and FILE are .txt or
.jsonl files; FILE.jsonl[700:] takes some of its documents. Layers that the output file holds are not decomposed again.

The results are of an off-grid Qwen2.5-Coder-0.5B-Instruct with the defaults, and then with --patterns 2:4 --layers
q_proj k_proj v_proj o_proj --methods hassle-free "hassle-free, little damping".
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from torch import Tensor

from harness import models
from harness.figure1 import COMPARED, block_grams
from harness.record import RESULTS, resumed, write
from hasslefree import Gram, Recipe, decompose
from hasslefree.core.gram import relative
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.pipeline.text import read_texts


def errors_by_text(weight: Tensor, product: Tensor, grams: dict[str, Gram]) -> dict[str, float]:
    """The relative error on each text. weight: dense, (out, in). product: S + L. grams: by the text's name."""
    residual = weight - product
    return {text: relative(gram.loss(residual), gram.loss(weight)) for text, gram in grams.items()}


def measure(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Fill the results: "block, pattern" → layer → method → text → relative error."""
    model, tokenizer = models.loaded(args.model, "float32"), models.load_tokenizer(args.model)

    def segments(text: str, samples: int) -> Tensor:
        recipe = Recipe(calibration=text, samples=samples, seqlen=args.seqlen)
        return read_texts(model, tokenizer, recipe, model.device).draw()

    calibration = segments(args.calibration, args.samples)
    others = {Path(text).name: segments(text, args.text_samples) for text in args.texts}
    for index in args.blocks:
        block = find_blocks(model).modules[index]
        sites = {name: site for name, site in find_sites(block).items() if name.endswith(tuple(args.layers))}
        fitted = block_grams(model, block, sites, calibration)
        measured = {text: block_grams(model, block, sites, drawn) for text, drawn in others.items()}
        for pattern, (name, site), method in itertools.product(args.patterns, sites.items(), args.methods):
            row = content["results"].setdefault(f"{index}, {pattern}", {}).setdefault(name, {})
            if method in row:
                continue
            weight = site.weight()
            solved = decompose(weight, fitted[name], pattern, args.rank, method=COMPARED[method])
            grams = {"calibration": fitted[name]} | {text: found[name] for text, found in measured.items()}
            row[method] = errors_by_text(weight, solved.product(), grams)
            write(args.output, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--blocks", nargs="+", type=int, default=[12])
    parser.add_argument("--layers", nargs="+", default=[""], help="how their names end; the default is all layers")
    parser.add_argument("--patterns", nargs="+", default=["2:8", "3:8", "4:8", "2:4"])
    parser.add_argument("--methods", nargs="+", default=["oats", "hassle-free, 20 rounds", "joint"], choices=COMPARED)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--text-samples", type=int, default=16)
    parser.add_argument("--output", type=Path, default=RESULTS / "other_text.json")
    args = parser.parse_args()
    header = {name: getattr(args, name) for name in ("rank", "samples", "seqlen", "text_samples")}
    header |= {"seed": Recipe().seed, "model": Path(args.model).name, "calibration": Path(args.calibration).name}
    measure(args, resumed(args.output, header, "results"))


if __name__ == "__main__":
    main()
