"""The command `evaluate`: perplexity, KL divergence and zero-shot tasks, of a compressed and its
dense model.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hasslefree.cli import common
from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import RUN, Device, Dtype, Json, Output, Quiet, Trust, command, flag
from hasslefree.errors import ModelError, RecipeError
from hasslefree.units import table

TEXTS = "Perplexity"
TASKS = "Zero-shot tasks"

FIRST_TOKEN = "Begin every window as the tokenizer begins a text, with <bos> say (default: on)."
TASK_NAMES = "Tasks: piqa, hellaswag, arc_easy, arc_challenge, winogrande, rte, openbookqa, boolq."
BATCH = "Windows or task sequences in a batch (default: 1, and for tasks on a GPU what fits)."
BESIDE = (
    "Dense model to measure too, original or none (default: original, the model that was"
    " compressed, if it is on this machine)."
)
KL = (
    "Run both models side by side for the KL divergence from the dense model; both are in memory"
    " (default: if there is a dense model)."
)
EXAMPLE = "Example: hasslefree evaluate OUT --perplexity wikitext2 --tasks piqa winogrande"


@command("evaluate", rich_help_panel=common.MEASURE, epilog=EXAMPLE)
def call_evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A hub name or a local folder, dense or compressed."),
    ],
    perplexity: Annotated[
        list[str] | None,
        flag(TEXTS, "Texts: wikitext2, ptb, c4, python, or files: txt, jsonl, parquet."),
    ] = None,
    seqlen: Annotated[
        int | None, flag(TEXTS, "Tokens per window (default: 2048, or the limit).", min=2)
    ] = None,
    max_tokens: Annotated[
        int | None, flag(TEXTS, "First tokens of each text to use (default: all).", min=2)
    ] = None,
    first_token: Annotated[bool, flag(TEXTS, FIRST_TOKEN)] = True,
    kl: Annotated[bool | None, flag(TEXTS, KL)] = None,
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
    batch_size: Annotated[int | None, flag(RUN, BATCH, min=1)] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity on texts and accuracy on zero-shot tasks.

    If MODEL is a compressed folder, its dense model is measured too, and the KL divergence of
    their predictions. Each result is printed, and written to FILE, as soon as it is known.
    """
    from hasslefree.evaluation.harness import default_cache
    from hasslefree.evaluation.run import evaluate

    if not perplexity and not tasks:
        raise RecipeError(
            "name at least one text or task, such as --perplexity wikitext2 or --tasks piqa"
        )
    if not perplexity:
        of_texts = {"--kl": kl, "--seqlen": seqlen, "--max-tokens": max_tokens}
        check_absent(of_texts, "a text, such as --perplexity wikitext2")
    if not tasks:
        of_tasks = {"--limit": limit, "--task-data": task_data, "--cache": cache}
        check_absent(of_tasks, "a task, such as --tasks piqa")
    dense = dense_model(model, dense, trust_remote_code, needed=bool(kl))
    beside = None
    if perplexity:
        tokens = (seqlen or 2048) * (batch_size or 1)
        options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        beside = model_beside(model, dense, kl, tokens, options)
    content: dict[str, Any] = {}

    def keep(measured: dict[str, Any]) -> None:
        content.update(measured)
        if output is not None:
            common.write_file(content, output)

    measure = partial(
        evaluate,
        texts=perplexity or [],
        tasks=tasks or [],
        seqlen=seqlen,
        max_tokens=max_tokens,
        batch=batch_size,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        first_token=first_token,
        limit=limit,
        task_data=task_data,
        cache=cache or default_cache(),
    )
    try:
        with phase_bars() as progress:
            measure(model, dense=beside, keep=keep, progress=progress)
            if dense is not None and beside is None:
                measure(dense, keep=lambda measured: keep({"dense": measured}), progress=progress)
    finally:  # shows the results of the first model if the dense one fails
        if content:
            common.show(content, output, as_json, *result_tables(content))


def check_absent(options: dict[str, Any], needed: str) -> None:
    """Raise a RecipeError if an option is given. needed: what the options apply to."""
    for option, value in options.items():
        if value:
            raise RecipeError(f"{option} needs {needed}; name one, or leave it out")


def model_beside(
    model: str, dense: str | None, kl: bool | None, tokens: int, options: dict[str, Any]
) -> str | None:
    """The dense model to run beside MODEL, for the KL divergence; None, with a line, if both do not
    fit in memory. Arguments as for `fit_together`.
    """
    from hasslefree.evaluation.continuation import fit_together

    if dense is None or kl is False:
        return None
    if kl is None and not fit_together((model, dense), tokens, **options):
        common.say(
            "Both models do not fit in memory at once: they are measured one after the other,"
            " without the KL divergence; use --kl to measure it anyway."
        )
        return None
    return dense


def dense_model(
    model: str,
    dense: str | None,
    trust_remote_code: bool,
    needed: bool = False,
) -> str | None:
    """The dense model to compare MODEL with, or None; if it was not found, a line tells why.

    Raises:
        ModelError: it is `needed` and there is none, or --dense does not name a model. The check
            precedes hours of measuring.
    """
    from hasslefree.evaluation.continuation import ORIGINAL, dense_original
    from hasslefree.models.tokenizer import load_tokenizer

    if dense == "none":
        if needed:
            raise ModelError("--kl needs the dense model; name one with --dense, or leave out --kl")
        return None
    if dense is not None and dense != ORIGINAL:
        load_tokenizer(dense, trust_remote_code)
        return dense
    needed = needed or dense == ORIGINAL
    if not needed and not (Path(model) / "compression.json").is_file():
        return None
    try:
        return str(dense_original(Path(model)))
    except ModelError as error:
        if needed:
            raise
        common.say(f"{error}.")
        return None


def result_tables(results: dict[str, Any]) -> list[Table]:
    """Tables of the perplexities, tasks and KL divergences in the results.

    A table compares with the dense model if that was measured on all its texts or tasks.
    """
    tables = []
    for part, draw in (("perplexity", text_table), ("tasks", task_table)):
        if part in results:
            dense = results.get("dense", {})
            if dense.get(part, {}).keys() != results[part].keys():
                dense = {}
            tables.append(draw(results, dense))
    if any("kl" in row for row in results.get("perplexity", {}).values()):
        tables.append(kl_table(results))
    return tables


def text_table(results: dict[str, Any], dense: dict[str, Any]) -> Table:
    """The perplexity on each text, with its increase over the dense model's."""
    beside = ["dense", "increase"] if dense else []
    texts = table(["text"], ["perplexity", *beside, "tokens", "window"], results["model"])
    for text, row in results["perplexity"].items():
        cells = [text, f"{row['perplexity']:.3f}"]
        if dense:
            before = dense["perplexity"][text]["perplexity"]
            cells += [f"{before:.3f}", f"{100 * (row['perplexity'] / before - 1):+z.1f} %"]
        texts.add_row(*cells, f"{row['tokens']:,}", str(row["window"]))
    if any(row.get("first_tokens") for row in results["perplexity"].values()):
        texts.caption = "every window begins with what the tokenizer puts before a text"
    return texts


def kl_table(results: dict[str, Any]) -> Table:
    """The KL divergence from the dense model on each text."""
    headings = ["mean", "median", "99th percentile", "same top token"]
    title = f"KL divergence from {results['dense']['model']}"
    divergences = table(["text"], headings, title)
    for text, row in results["perplexity"].items():
        kl = row["kl"]
        values = [f"{kl[name]:.3g}" for name in ("mean", "median", "percentile_99")]
        divergences.add_row(text, *values, f"{per_cent(kl['same_top_token'])} %")
    divergences.caption = "KL(dense ‖ compressed) of the predictions, nats per token"
    return divergences


def task_table(results: dict[str, Any], dense: dict[str, Any]) -> Table:
    """The accuracy on each task in per cent, and their mean."""
    beside = ["dense"] if dense else []
    tasks = table(["task", "metric"], ["accuracy", *beside, "±", "rows"], results["model"])
    caption = "zero-shot, per cent"
    if results["limit"] is not None:
        caption += f"; only the first {results['limit']} rows of each task"
    truncated = sum(row["truncated"] for row in results["tasks"].values())
    if truncated:
        caption += f"; longer than the model's window, and cut at their beginning: {truncated}"
    tasks.caption = caption
    for task, row in results["tasks"].items():
        cells = [task, row["metric"], per_cent(row["value"])]
        if dense:
            cells.append(per_cent(dense["tasks"][task]["value"]))
        error = row[f"{row['metric']}_stderr"]
        tasks.add_row(*cells, "" if error is None else per_cent(error), f"{row['rows']:,}")
    tasks.add_section()
    averages = [per_cent(measured["average"]) for measured in (results, dense) if measured]
    tasks.add_row("average", "", *averages, "", "")
    return tasks


def per_cent(share: float) -> str:
    return f"{100 * share:.2f}"
