"""The demo: a small Llama that ships with the package, compressed in four ways within a minute."""

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from hasslefree.evaluation.continuation import Sampling, Writer
from hasslefree.evaluation.run import evaluate
from hasslefree.models.load import load_model
from hasslefree.pipeline.compress import compress
from hasslefree.progress import Listener, Phases, ignore
from hasslefree.recipe.recipe import Recipe
from hasslefree.units import table

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
CALIBRATION = FOLDER / "calibration.jsonl"
HELD_OUT = FOLDER / "held_out.txt"
SEQLEN = 256
SAMPLES = 32
HELD_OUT_TOKENS = 8192
PROMPT = "Return a new dictionary"
NEW_TOKENS = 40


def recipes(rounds: int) -> dict[str, Recipe]:
    """The recipes to compare: 2:4 + rank 16, or 2:4 alone for sparsegpt. rounds: of hassle-free."""
    base = Recipe(
        rank=16,
        calibration=str(CALIBRATION),
        samples=SAMPLES,
        seqlen=SEQLEN,
        dtype="float32",
        check=False,
    )
    return {
        "sparsegpt (rank 0)": replace(base, method="sparsegpt", rank=0),
        f"hassle-free, {rounds} rounds": replace(base, method="hassle-free", rounds=rounds),
        "joint, not fine-tuned": replace(base, method="joint", effort="fast"),
        "joint": replace(base, method="joint"),
    }


@dataclass(frozen=True)
class DemoRow:
    """A row of the demo's table.

    Args:
        parameters: the number of non-zeros of the whole model.
        seconds: of the compression.
    """

    method: str
    perplexity: float
    relative_error: float
    parameters: int
    seconds: float


def run_demo(
    out: Path | None, rounds: int, progress: Listener | None = None
) -> tuple[list[DemoRow], dict[str, str]]:
    """Compress the demo model with each recipe.

    Args:
        out: the folder in which models are kept; None to delete them.

    Returns:
        The rows, first that of the dense model, and the continuations by the dense and the last
        model.
    """
    dense = load_model(str(MODEL)).num_parameters()
    rows = [DemoRow("dense", held_out_perplexity(MODEL), 0.0, dense, 0.0)]
    compared = recipes(rounds)
    with tempfile.TemporaryDirectory() as temporary:
        models = Phases(progress).counted(
            "comparing methods", compared.items(), len(compared), "methods"
        )
        for number, (name, recipe) in enumerate(models, 1):
            target = (out or Path(temporary)) / f"{number}-{recipe.method}"
            report = compress(str(MODEL), target, recipe, overwrite=True, progress=ignore)
            stored = dense - report.dense_parameters + report.kept_parameters
            perplexity = held_out_perplexity(target)
            logger.info("%s: perplexity %.2f in %.0f s", name, perplexity, report.seconds)
            rows.append(
                DemoRow(name, perplexity, report.mean_relative_error, stored, report.seconds)
            )
        return rows, {"dense": continuation(MODEL), name: continuation(target)}


def continuation(model: Path) -> str:
    """The greedy continuation of PROMPT by the model in a folder."""
    return Writer.load(str(model), dtype="float32").write(PROMPT, Sampling(NEW_TOKENS)).text


def demo_table(rows: list[DemoRow]) -> Table:
    """The rows as a table for the terminal."""
    title = "2:4 + rank 16 on a Llama of 2 M parameters trained on Python's documentation"
    lines = table(["method"], ["perplexity", "relative error", "non-zeros", "seconds"], title)
    for row in rows:
        error = ""
        seconds = ""
        if row.seconds:  # not the dense model
            error = f"{row.relative_error:.4f}"
            seconds = f"{row.seconds:.0f}"
        lines.add_row(
            row.method, f"{row.perplexity:.2f}", error, f"{row.parameters / 1e6:.2f} M", seconds
        )
    return lines


def sample_table(samples: dict[str, str]) -> Table:
    """The continuations side by side."""
    columns = table(list(samples), title=f"{PROMPT!r}, continued")
    columns.add_row(*(PROMPT + text for text in samples.values()))
    return columns


def held_out_perplexity(model: Path, tokens: int | None = HELD_OUT_TOKENS) -> float:
    """The perplexity of the model in a folder on text that the demo model was not trained on.

    Args:
        tokens: maximum number of tokens; None for all.
    """
    results = evaluate(
        str(model),
        [str(HELD_OUT)],
        seqlen=SEQLEN,
        max_tokens=tokens,
        batch=16,
        dtype="float32",
        progress=ignore,
    )
    return float(results["perplexity"][str(HELD_OUT)]["perplexity"])
