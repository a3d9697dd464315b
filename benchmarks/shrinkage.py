"""How far the correlations between the inputs of a layer are to be trusted, if few tokens show them.

    python benchmarks/shrinkage.py MODEL --calibration FILE --text FILE [--blocks 0 10 29] [--output FILE]

The layers of some blocks of the dense model are rounded to an entropy-coded grid of 4 bits, by `joint-grid`, on the
first tokens of FILE of --calibration, and their errors are measured on the inputs that FILE of --text gives. Both are
.txt or .jsonl files; FILE.jsonl[700:] takes some of its documents.

The record holds, by tokens for each input and by the tokens that count as one draw (`core.shrinkage.TOKENS_A_DRAW`; 0
for correlations that are trusted): the error on the text over that of trusted correlations, as the geometric mean over
the layers and the largest; and the loss that is expected (`Gram.expected_loss`) over that on the text, as the geometric
mean, the least and the largest.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from torch import Tensor

import hasslefree
from harness import models
from harness.figure1 import block_grams
from harness.record import RESULTS, geometric_mean, machine, write
from hasslefree import Gram, Grid, JointOnGrid, Recipe
from hasslefree.core import shrinkage
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.pipeline.text import draw

SAMPLES = 64
SEQLEN = 512
BITS = 4.0
# Tokens for each input, and tokens that count as one draw.
TOKENS_AN_INPUT = (1, 2, 4, 20)
TOKENS_A_DRAW = (0, 1, 4, 16)
# Every fourth row stands for all.
ROWS = 4


def errors(weight: Tensor, few: Gram, text: Gram) -> dict[int, tuple[float, float]]:
    """By tokens a draw, the error of the rounded weight on the text, and the expected loss over it."""
    found = {}
    for tokens in TOKENS_A_DRAW:
        shrinkage.TOKENS_A_DRAW = tokens
        given = Gram(few.matrix, few.tokens)
        result = hasslefree.decompose(weight, given, "dense", 0, method=JointOnGrid(Grid.entropy_coded(BITS)))
        residual = weight - result.sparse.float()
        error = text.loss(residual)
        found[tokens] = error, given.expected_loss(residual) / error
    return found


def measured(model: Any, blocks: list[int], calibration: Tensor, text: Tensor) -> list[dict[str, Any]]:
    """A row for each number of tokens an input. calibration, text: segments (samples, tokens)."""
    ratios: dict[tuple[int, int], list[float]] = {}
    biases: dict[tuple[int, int], list[float]] = {}
    for block in (find_blocks(model).modules[index] for index in blocks):
        sites = find_sites(block)
        on_text = block_grams(model, block, sites, text)
        of_segments: dict[int, dict[str, Gram]] = {}
        for tokens in TOKENS_AN_INPUT:
            for name, site in sites.items():
                weight = site.weight().detach()[::ROWS].contiguous()
                needed = math.ceil(tokens * weight.shape[1] / SEQLEN)
                if needed not in of_segments:
                    of_segments[needed] = block_grams(model, block, sites, calibration[:needed])
                found = errors(weight, of_segments[needed][name], on_text[name])
                for draw_tokens, (error, bias) in found.items():
                    ratios.setdefault((tokens, draw_tokens), []).append(error / found[0][0])
                    biases.setdefault((tokens, draw_tokens), []).append(bias)
    return [
        {
            "tokens_an_input": tokens,
            "tokens_a_draw": draw_tokens,
            "layers": len(values),
            "error": round(geometric_mean(values), 4),
            "largest": round(max(values), 4),
            "expected": [round(each, 4) for each in bounds(biases[tokens, draw_tokens])],
        }
        for (tokens, draw_tokens), values in sorted(ratios.items())
    ]


def bounds(values: list[float]) -> tuple[float, float, float]:
    """The geometric mean, the least and the largest."""
    return geometric_mean(values), min(values), max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--blocks", nargs="+", type=int, default=[0, 10, 29])
    parser.add_argument("--output", type=Path, default=RESULTS / "shrinkage.json")
    args = parser.parse_args()
    model, tokenizer = models.loaded(args.model), models.load_tokenizer(args.model)
    calibration, text = (
        draw(model, tokenizer, Recipe(calibration=file, samples=SAMPLES, seqlen=SEQLEN))
        for file in (args.calibration, args.text)
    )
    content = {"machine": machine(), "model": Path(args.model).name, "blocks": args.blocks, "bits": BITS, "seed": 0}
    content |= {"calibration": Path(args.calibration).name, "text": Path(args.text).name}
    content["rows"] = measured(model, args.blocks, calibration, text)
    write(args.output, content)


if __name__ == "__main__":
    main()
