"""The command `evaluate`: perplexity and tasks, of a compressed model and its dense one."""

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hasslefree.cli import common
from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import RUN, Device, Dtype, Json, Output, Quiet, Trust, app, flag
from hasslefree.errors import RecipeError
from hasslefree.units import table

TEXTS = "Perplexity"
TASKS = "Zero-shot tasks"

TASK_NAMES = "Tasks: piqa, hellaswag, arc_easy, arc_challenge, winogrande, rte, openbookqa, boolq."
BATCH = "Windows or task sequences in a batch; auto is 1, and for tasks on a GPU what fits."
BESIDE = (
    "Dense model to measure too, or none (default: the one from which MODEL was made, if it is on"
    " this machine)."
)
EXAMPLE = "Example: hasslefree evaluate OUT --perplexity wikitext2 --tasks piqa winogrande"


@app.command("evaluate", rich_help_panel=common.MEASURE, epilog=EXAMPLE)
def call_evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A hub name or a local folder, dense or compressed."),
    ],
    perplexity: Annotated[
        list[str] | None, flag(TEXTS, "Texts: wikitext2, ptb, c4, or .txt and .jsonl files.")
    ] = None,
    seqlen: Annotated[
        int | None, flag(TEXTS, "Tokens per window (default: 2048, or the limit).", min=2)
    ] = None,
    max_tokens: Annotated[
        int | None, flag(TEXTS, "First tokens of each text to use (default: all).", min=2)
    ] = None,
    tasks: Annotated[list[str] | None, flag(TASKS, TASK_NAMES)] = None,
    limit: Annotated[
        int | None, flag(TASKS, "Use only the first rows of each task (default: all).", min=1)
    ] = None,
    task_data: Annotated[
        Path | None, flag(TASKS, "Folder with TASK.jsonl for each task (default: the hub).")
    ] = None,
    cache: Annotated[
        Path | None, flag(TASKS, "Folder that keeps answers (default: ~/.cache/hasslefree).")
    ] = None,
    dense: Annotated[str | None, flag(RUN, BESIDE)] = None,
    batch_size: Annotated[str, flag(RUN, BATCH)] = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity on texts and accuracy on zero-shot tasks.

    If MODEL is a compressed folder, its dense model is measured too. Each result is printed, and
    written to FILE, as soon as it is there.
    """
    from hasslefree.evaluation.harness import default_cache

    if not perplexity and not tasks:
        raise RecipeError(
            "name at least one text or task, such as --perplexity wikitext2 or --tasks piqa"
        )
    options: dict[str, Any] = {
        "texts": perplexity or [],
        "tasks": tasks or [],
        "seqlen": seqlen,
        "max_tokens": max_tokens,
        "batch": parse_batch_size(batch_size),
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "limit": limit,
        "task_data": task_data,
        "cache": cache or default_cache(),
    }
    results = Results(output)
    dense = dense_model(model, dense, trust_remote_code)
    try:
        measure(results, model, dense, options)
    finally:
        if results.content:
            tables = result_tables(results.content)
            common.show(results.content, output, as_json, *tables)


def parse_batch_size(text: str) -> int | None:
    """The number that --batch-size gives; None for auto."""
    if text == "auto":
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise RecipeError(
            f"--batch-size must be auto or a whole number of at least 1, got {text!r}"
        )
    return int(text)


def dense_model(
    model: str,
    dense: str | None,
    trust_remote_code: bool,
) -> str | None:
    """The dense model to measure after MODEL, or None; a line says why it was not found.

    Raises:
        ModelError: --dense names no model, which is better known before hours of measuring.
    """
    from hasslefree.evaluation.continuation import dense_original
    from hasslefree.models.tokenizer import load_tokenizer

    if dense == "none":
        return None
    if dense is not None:
        load_tokenizer(dense, trust_remote_code)
        return dense
    if not (Path(model) / "compression.json").is_file():
        return None
    dense, remark = dense_original(Path(model))
    if remark is not None:
        common.say(remark)
    return dense


@dataclass
class Results:
    """The results so far; those of the dense model are under "dense".

    Args:
        output: the file of --output, which is written anew with each result.
    """

    output: Path | None
    content: dict[str, Any] = field(default_factory=dict)
    printed: set[str] = field(default_factory=set)

    def keep(self, measured: dict[str, Any], part: str | None = None) -> None:
        """Print and write what was measured since the last call; part: "dense", or None."""
        if part is None:
            self.content.update(measured)
        else:
            self.content[part] = measured
        of = f" of the {part} model" if part else ""
        for text, row in measured.get("perplexity", {}).items():
            self._print(f"perplexity{of} on {text}: {row['perplexity']:.3f}")
        for task, row in measured.get("tasks", {}).items():
            self._print(f"{row['metric']}{of} on {task}: {100 * row['value']:.2f} %")
        if self.output is not None:
            common.write_file(self.content, self.output)

    def _print(self, line: str) -> None:
        if line not in self.printed:
            self.printed.add(line)
            common.say(line)


def measure(
    results: Results,
    model: str,
    dense: str | None,
    options: dict[str, Any],
) -> None:
    """Measure a model, and then its dense model, whose errors leave the results of the first."""
    from hasslefree.evaluation.run import evaluate

    with phase_bars() as progress:
        evaluate(model, keep=results.keep, progress=progress, **options)
        if dense is None:
            return
        try:
            evaluate(dense, keep=partial(results.keep, part="dense"), progress=progress, **options)
        except Exception:
            common.say(
                f"The dense model {dense} could not be measured. The results of {model} are"
                " complete; --dense none measures it alone."
            )
            raise


def result_tables(results: dict[str, Any]) -> list[Table]:
    """A table of the texts and one of the tasks, whichever the results have.

    The dense model may lack some of the texts and tasks, if an error ended its evaluation.
    """
    tables = []
    if "perplexity" in results:
        tables.append(text_table(results))
    if "tasks" in results:
        tables.append(task_table(results))
    return tables


def text_table(results: dict[str, Any]) -> Table:
    """The perplexity on each text, with its increase over the dense model's."""
    dense = results.get("dense", {}).get("perplexity", {})
    beside = ["dense", "increase"] if dense else []
    texts = table(["text"], ["perplexity", *beside, "tokens", "window"], results["model"])
    for text, row in results["perplexity"].items():
        cells = [text, f"{row['perplexity']:.3f}"]
        if text in dense:
            before = dense[text]["perplexity"]
            cells += [f"{before:.3f}", f"{100 * (row['perplexity'] / before - 1):+.1f} %"]
        elif dense:
            cells += ["", ""]
        texts.add_row(*cells, f"{row['tokens']:,}", str(row["window"]))
    return texts


def task_table(results: dict[str, Any]) -> Table:
    """The accuracy on each task in per cent, and their mean."""
    dense = results.get("dense", {}).get("tasks", {})
    beside = ["dense"] if dense else []
    tasks = table(["task", "metric"], ["accuracy", *beside, "±", "rows"], results["model"])
    caption = "zero-shot, per cent"
    if results["limit"] is not None:
        caption += f"; only the first {results['limit']} rows of each task"
    truncated = sum(row["truncated"] for row in results["tasks"].values())
    if truncated:
        caption += f"; longer than the model's window, and cut at their beginning: {truncated}"
    tasks.caption = caption
    tasks.caption_justify = "left"
    for task, row in results["tasks"].items():
        cells = [task, row["metric"], per_cent(row["value"])]
        if dense:
            cells.append(per_cent(dense.get(task, {}).get("value")))
        error = row[f"{row['metric']}_stderr"]
        tasks.add_row(*cells, per_cent(error), f"{row['rows']:,}")
    tasks.add_section()
    cells = ["average", "", per_cent(results["average"])]
    if dense:
        complete = dense.keys() == results["tasks"].keys()
        cells.append(per_cent(results["dense"]["average"]) if complete else "")
    tasks.add_row(*cells, "", "")
    return tasks


def per_cent(share: float | None) -> str:
    """A share in per cent, and nothing for None."""
    if share is None:
        return ""
    return f"{100 * share:.2f}"
