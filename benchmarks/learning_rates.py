"""What block matching wins by learning rate, on models of different kinds and depths; and the rule it goes by.

    python benchmarks/learning_rates.py [MODEL --calibration FILE]

The model of the demo (4 blocks), a GPT-2 of 2 blocks that is trained here for a few minutes on the demo's calibration
text, and MODEL if it is given. Each is compressed by the layers alone, 2:4 + rank 4, and each of its blocks is
matched from there anew with every rate against the dense stream. A cell is the geometric mean over the
blocks of the error after over the error before, on segments that were not trained on; no block ends worse than it was.
`absolute` rates are the same for every tensor.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import geometric_mean, machine, write
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

import hasslefree
from hasslefree.compress import draw
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.matching import Matching, match_block
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calibration import first_hidden_states, run_block
from hasslefree.models.calls import BlockCall, block_calls
from hasslefree.models.load import load_model, load_tokenizer
from hasslefree.models.streaming import Weights
from hasslefree.recipe import EFFORTS, Recipe
from hasslefree.texts import calibration_documents

ROOT = Path(__file__).parents[1]
ONCE = Matching(retreats=0, patience=6)
SETTINGS = {
    **{f"{rate:g}": dataclasses.replace(ONCE, learning_rate=rate) for rate in (0.001, 0.003, 0.01, 0.03, 0.1)},
    **{
        f"{rate:g}, absolute": dataclasses.replace(ONCE, learning_rate=rate, relative=False)
        for rate in (2e-5, 2e-4, 2e-3)
    },
    "the rule": Matching(),
    "the rule, 20 epochs": Matching(epochs=20, patience=20),
}


def gpt2(tokenizer: PreTrainedTokenizerBase, text: str, steps: int) -> PreTrainedModel:
    """A GPT-2 of 2 blocks and width 128, trained on the text."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=256, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
        )
    )  # fmt: skip
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - 128, (16,)).tolist()
        batch = torch.stack([tokens[start : start + 128] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"gpt2: {loss.item():.2f} nats a token after {steps} steps", flush=True)
    return model.eval()


def stream(blocks: Iterable[nn.Module], calls: Sequence[BlockCall], states: Activations) -> list[list[Tensor]]:
    """The hidden states before each block and after the last, from those before the first."""
    found = [[each.clone() for each in states]]
    for block, call in zip(blocks, calls, strict=True):
        run_block(block, call, states)
        found.append([each.clone() for each in states])
    return found


def ratios(dense: PreTrainedModel, compressed: PreTrainedModel, segments: Tensor) -> dict[str, dict[str, Any]]:
    """For every setting the error after over the error before of each block."""
    blocks = find_blocks(dense)
    modules: Any = compressed.get_submodule(blocks.name)
    calls = block_calls(dense, blocks, segments[:1], Weights(dense, dense.device)).calls
    first = first_hidden_states(dense, blocks, segments)
    entering, wanted = stream(modules, calls, first.copy()), stream(blocks.modules, calls, first)
    found: dict[str, dict[str, Any]] = {}
    for name, settings in SETTINGS.items():
        reports = [
            match_block(copy.deepcopy(block), calls[i], entering[i], wanted[i + 1], settings, seed=0)
            for i, block in enumerate(modules)
        ]
        each = [report.after / report.before for report in reports]
        found[name] = {"blocks": each, "mean": geometric_mean(each), "rates": [r.learning_rate for r in reports]}
        print(f"  {name}: {found[name]['mean']:.3f}", flush=True)
    return found


def measured(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> dict[str, Any]:
    dense, segments = copy.deepcopy(model), draw(model, tokenizer, recipe.filled())
    with tempfile.TemporaryDirectory() as folder:
        hasslefree.compress(model, f"{folder}/out", recipe, tokenizer=tokenizer)
        compressed = load_model(f"{folder}/out", "float32", "cpu")
    blocks = len(find_blocks(dense).modules)
    return {"blocks": blocks, "rank": recipe.rank, "ratios": ratios(dense, compressed, segments)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--calibration")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--steps", type=int, default=600, help="of training the GPT-2")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "learning_rates.json")
    args = parser.parse_args()
    recipe = Recipe(samples=args.samples, seqlen=args.seqlen, dtype="float32", rank=4, **EFFORTS["fast"])
    demo = dataclasses.replace(recipe, calibration=str(CALIBRATION))
    tokenizer = load_tokenizer(str(MODEL))
    found = {"demo": measured(load_model(str(MODEL), "float32", "cpu"), tokenizer, demo)}
    text = "\n".join(calibration_documents(str(CALIBRATION)))
    found["gpt2"] = measured(gpt2(tokenizer, text, args.steps), tokenizer, demo)
    if args.model:
        own = dataclasses.replace(recipe, calibration=args.calibration)
        found[Path(args.model).name] = measured(
            load_model(args.model, "float32", "cpu"), load_tokenizer(args.model), own
        )
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "steps")}
    write(args.output, {"machine": machine(), "seed": 0, **header, "models": found})


if __name__ == "__main__":
    main()
