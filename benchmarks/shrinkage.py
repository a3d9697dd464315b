"""How far the correlations between the inputs of a layer are to be trusted, if few tokens show them.

    python benchmarks/shrinkage.py MODEL --calibration FILE --text FILE [--blocks 0 10 29] [--output FILE]

The layers of some blocks of the dense model are compressed on the first tokens of FILE of --calibration: rounded to an
entropy-coded grid of 4 bits by `joint-grid`, and pruned to 2:4 + rank 16 by `joint`. Their errors are measured on the
inputs that FILE of --text gives. Both are .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents.

The record holds, by method, by tokens for each input, and by the tokens that count as one draw
(`core.shrinkage.TOKENS_A_DRAW`; 0 for correlations that are trusted): the error on the text over that of trusted
correlations, as the geometric mean over the layers and the largest; and the loss that is expected
(`Gram.expected_loss`) over that on the text, as the geometric mean, the least and the largest.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import hasslefree
from harness import models
from harness.figure1 import block_grams
from harness.record import RESULTS, geometric_mean, machine, write
from hasslefree import Gram, Grid, Joint, JointOnGrid, Recipe
from hasslefree.core import shrinkage
from hasslefree.core.protocols import Method
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.pipeline.text import read_texts

SAMPLES = 64
SEQLEN = 512
BITS = 4.0
# Tokens for each input, and tokens that count as one draw.
TOKENS_AN_INPUT = (1, 2, 4, 7, 20)
TOKENS_A_DRAW = (0, 1, 4, 16)
# Every fourth row stands for all.
ROWS = 4


@dataclass(frozen=True)
class Setting:
    """A method, and what it leaves of a layer."""

    method: Method
    pattern: str
    rank: int


SETTINGS = {
    "joint-grid": Setting(JointOnGrid(Grid.entropy_coded(BITS)), "dense", 0),
    "joint": Setting(Joint(rounds=50), "2:4", 16),
}
# A method, tokens for each input, and tokens that count as one draw.
Key = tuple[str, int, int]


@dataclass
class Errors:
    """By key, for each layer: the error on the text over that of trusted correlations, and the expected loss over the
    error.
    """

    ratios: dict[Key, list[float]] = field(default_factory=dict)
    biases: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, name: str, tokens_an_input: int, weight: Tensor, few: Gram, text: Gram) -> None:
        """Compress a weight with the Gram of few tokens, once for each number of tokens a draw."""
        setting = SETTINGS[name]
        trusted = math.nan
        for tokens in TOKENS_A_DRAW:
            shrinkage.TOKENS_A_DRAW = tokens
            given = Gram(few.matrix, few.tokens)
            result = hasslefree.decompose(weight, given, setting.pattern, setting.rank, method=setting.method)
            residual = weight - result.product().float()
            error = text.loss(residual)
            if not tokens:
                trusted = error
            key = name, tokens_an_input, tokens
            self.ratios.setdefault(key, []).append(error / trusted)
            self.biases.setdefault(key, []).append(given.expected_loss(residual) / error)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "method": method,
                "tokens_an_input": tokens,
                "tokens_a_draw": draw_tokens,
                "layers": len(values),
                "error": round(geometric_mean(values), 4),
                "largest": round(max(values), 4),
                "expected": [round(each, 4) for each in bounds(self.biases[method, tokens, draw_tokens])],
            }
            for (method, tokens, draw_tokens), values in self.ratios.items()
        ]


def measured(model: Any, blocks: list[int], calibration: Tensor, text: Tensor) -> Errors:
    """The errors of the layers of some blocks. calibration, text: segments (samples, tokens)."""
    errors = Errors()
    for block in (find_blocks(model).modules[index] for index in blocks):
        sites = find_sites(block)
        on_text = block_grams(model, block, sites, text)
        of_segments: dict[int, dict[str, Gram]] = {}
        for method, tokens in itertools.product(SETTINGS, TOKENS_AN_INPUT):
            for name, site in sites.items():
                weight = site.weight().detach()[::ROWS].contiguous()
                needed = math.ceil(tokens * weight.shape[1] / SEQLEN)
                if needed not in of_segments:
                    of_segments[needed] = block_grams(model, block, sites, calibration[:needed])
                errors.add(method, tokens, weight, of_segments[needed][name], on_text[name])
    return errors


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
        read_texts(model, tokenizer, Recipe(calibration=file, samples=SAMPLES, seqlen=SEQLEN), model.device).draw()
        for file in (args.calibration, args.text)
    )
    content = {"machine": machine(), "model": Path(args.model).name, "blocks": args.blocks, "bits": BITS, "seed": 0}
    content |= {"calibration": Path(args.calibration).name, "text": Path(args.text).name}
    content["rows"] = measured(model, args.blocks, calibration, text).rows()
    write(args.output, content)


if __name__ == "__main__":
    main()
