"""Measure tables or the first figure of the HASSLE-free paper (arXiv 2502.00899), on its models or on another one.

    python benchmarks/reproduction.py table2 --plan
    python benchmarks/reproduction.py table2 --model meta-llama/Llama-3.2-1B --methods oats hassle-free joint
    python benchmarks/reproduction.py figure1 --model meta-llama/Llama-3.2-1B --block 0

First the parameters kept, disk and time of every compression are printed (--plan stops there), then the measured values
beside the paper's; they are also written to FOLDER/tableN.json and FOLDER/figure1.json. Rows that FOLDER (--output)
holds are not measured again, in whatever table they appear, and an interrupted run continues where it stopped, that of
figure1 after its last layer (FOLDER/errors.json).

--record NAME also collects all that FOLDER holds in benchmarks/results/reproduction_NAME.json, beside what that file
holds at the same scale, and draws the figure in docs/results/figure1_NAME.png. The results there are of table1,
table2, table4 and figure1 with --rank 16 --samples 32 --max-tokens 16384: `embedded`, the demo model with --seqlen 256
--limit 25 --texts held_out=.../demo/held_out.txt; `reference`, with --seqlen 256 --limit 25 --max-tokens 8192;
`smollm2`, without tasks, with --seqlen 1024 --rounds 20. `qwen`, an off-grid Qwen2.5-Coder-0.5B-Instruct, has
--samples 32 --seqlen 1024 --max-tokens 16384, without tasks: table1 with --settings 2:4 --methods sparsegpt wanda
dsnot; table2 with --like Llama-3.2-1B --settings '2:4 + rank 64' --methods oats joint-balanced, and --methods
hassle-free with --rounds 20; and figure1 with --methods oats "hassle-free, gaussian start" hassle-free "hassle-free,
exact step" joint 3basil pcp "hassle-free, ALPS".
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import pictures
from harness.figure1 import COMPARED, Errors, layer_errors
from harness.paper import ADDED, MODELS, Job, Scale, table_jobs
from harness.record import RESULTS, ROOT, machine, mean, resumed, write
from harness.styles import save
from hasslefree.checkpoint.record import read_record
from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import console, say
from hasslefree.errors import HasslefreeError, RecipeError, UnknownNameError, with_flags
from hasslefree.evaluation.harness import default_cache
from hasslefree.evaluation.run import evaluate
from hasslefree.evaluation.tasks import check_harness
from hasslefree.files import read_json
from hasslefree.models.load import resolve_device
from hasslefree.pipeline.compress import compress
from hasslefree.planning.machine import product_rate
from hasslefree.planning.setup import setup_of
from hasslefree.planning.tables import plan_summary
from hasslefree.progress import Listener
from hasslefree.report.seconds import read_seconds, seconds_file, write_seconds
from hasslefree.units import duration, size, table

PARTS = ("table1", "table2", "table3", "table4", "figure1")
FIGURE_MODEL = MODELS["Llama-3.2-1B"]
FIGURE_RECIPE = "joint-2-4-rank-64.yaml"
# The options of a scale that are recorded with the results.
RECORDED = ("dtype", "rank", "samples", "seqlen", "rounds", "max_tokens", "limit")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    made.add_argument("--model", help="default: those of the paper; figure1: Llama-3.2-1B")
    made.add_argument("--like", choices=MODELS, help="model of the paper to compare with; default: by the name")
    made.add_argument("--methods", nargs="+", help=f"of the table, {', '.join(ADDED)}")
    made.add_argument("--settings", nargs="+", help="of the table, such as '2:4 + rank 64'; default: all")
    made.add_argument("--block", type=int, default=0, help="number of the block for figure1, from 0")
    for name in ("rank", "samples", "seqlen", "rounds"):
        made.add_argument(f"--{name}", type=int, help="default: the paper's")
    made.add_argument("--calibration", help="text to calibrate on; default: c4")
    made.add_argument("--texts", nargs="+", type=named_file, metavar="NAME=FILE", help="default: those of the paper")
    made.add_argument("--max-tokens", type=int, help="use only the first tokens of each text")
    made.add_argument("--tasks", nargs="*", help="default: those of the table; without a name: none")
    made.add_argument("--task-data", type=Path, help="folder with a file TASK.jsonl for each task")
    made.add_argument("--limit", type=int, help="use only the first rows of each task")
    made.add_argument("--dtype", help="of the weights; default: the recipe's")
    made.add_argument("--device")
    made.add_argument("--plan", action="store_true", help="print time and disk space, and stop")
    made.add_argument("--output", type=Path, default=Path("reproduction"), metavar="FOLDER")
    made.add_argument("--keep", action="store_true", help="keep the compressed models")
    made.add_argument("--record", metavar="NAME", help="write FOLDER's results to benchmarks/results")
    return made


def named_file(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if not file:
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, such as wikitext2=wiki.test.raw, got {text!r}")
    return name, file


def scale_of(args: argparse.Namespace) -> Scale:
    texts, tasks = dict(args.texts) if args.texts else None, None if args.tasks is None else tuple(args.tasks)
    return Scale(
        args.rank, args.samples, args.seqlen, args.rounds, args.calibration, args.dtype, texts, args.max_tokens, tasks,
        args.limit, args.task_data,
    )  # fmt: skip


def reproduce_table(number: int, args: argparse.Namespace, progress: Listener | None = None) -> None:
    """Print the cost of a table, measure the rows that are missing, and compare them with the paper's."""
    jobs = table_jobs(number, scale_of(args), args.model, args.like, args.methods, args.settings)
    target = resolve_device(args.device)
    costs = [(job, cost(job, target)) for job in jobs]
    console.print(cost_table(costs, read_results(args.output), product_rate(target), args.keep))
    if args.plan:
        return
    if jobs[0].evaluation["tasks"]:
        check_harness()
    results = run_jobs(jobs, args.output, args.device, default_cache(), args.keep, progress, say)
    rows = [compare(job, results[job.key]) for job in jobs]
    for counterpart in dict.fromkeys(job.row.model for job in jobs):
        of_model = [row for row in rows if row["beside"] == counterpart]
        title = f"Table {number}: {of_model[0]['model']}, compared with the paper's {counterpart}"
        console.print(result_table(of_model, title))
    write(args.output / f"table{number}.json", {"table": number, "rows": rows})


def cost(job: Job, device: torch.device) -> dict[str, Any] | None:
    """The estimated cost of the compression of a row; None for a dense model."""
    if job.recipe is None:
        return None
    try:
        return plan_summary(setup_of(job.model, job.recipe, device, "device"))
    except HasslefreeError as error:
        raise error.within(job.name) from None


def cost_table(
    costs: Sequence[tuple[Job, dict[str, Any] | None]], measured: Collection[str], rate: float, keep: bool
) -> Table:
    """A line for each row with the parameters kept, disk and time of its compression, and a line for their sum.

    Args:
        measured: keys of the rows that are measured already. rate: of the device, in FLOPs per second.
        keep: all compressed models stay on the disk.
    """
    title = f"{len(costs)} rows, {sum(job.key in measured for job, _ in costs)} of them measured already"
    made = table(["model", "setting", "method"], ["kept", "disk", "time"], title)
    for job, takes in costs:
        cells = []
        if takes is not None:
            time = "done" if job.key in measured else duration(takes["flops"] / rate)
            cells = [f"{takes['kept'] / takes['dense']:.1%}", size(takes["disk"]), time]
        name = job.model.rstrip("/").rpartition("/")[2]
        made.add_row(name, job.setting or "dense", job.row.method, *cells)
    missing = [takes for job, takes in costs if takes is not None and job.key not in measured]
    disk = [takes["disk"] for takes in missing]
    needed = sum(disk) if keep else max(disk, default=0)
    made.add_section()
    made.add_row("missing rows", "", "", "", size(needed), duration(sum(takes["flops"] for takes in missing) / rate))
    made.caption, made.caption_justify = "Compressions alone; evaluations come on top.", "left"
    return made


def read_results(out: Path) -> dict[str, Any]:
    """The rows that were measured, by `Job.key`."""
    file = out / "results.json"
    return read_json(file) if file.exists() else {}


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    device: str | None = None,
    cache: Path | None = None,
    keep: bool = False,
    progress: Listener | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compress and evaluate the jobs without results; returns the results of all jobs by `Job.key`.

    An interrupted run continues after the last finished row, and within a row after the last finished block.

    Args:
        out: folder for the results and, until they are measured, the compressed models. keep: do not delete those.
        device, cache, progress: as for `compress` and `evaluate`. report: called with the name of each row.
    """
    results = read_results(out)
    missing = [job for job in jobs if job.key not in results]
    for number, job in enumerate(missing, 1):
        report(f"{number} of {len(missing)}: {job.model}: {job.name}")
        results[job.key] = measure(job, out / job.key, device, cache, progress)
        write(out / "results.json", results)
        if job.recipe is not None and not keep:
            shutil.rmtree(out / job.key)
            seconds_file(out / job.key).unlink(missing_ok=True)
    return results


def measure(
    job: Job, folder: Path, device: str | None, cache: Path | None, progress: Listener | None
) -> dict[str, Any]:
    """One row of the results. folder: of the compressed model; if it exists, it is complete and of this job."""
    row: dict[str, Any] = {"model": job.model, "setting": job.row.config, "method": job.row.method}
    if job.recipe is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            record = compress(job.model, folder, job.recipe, device=device, resume=True, progress=progress)
            write_seconds(folder, record)
        record, times = read_record(folder), read_seconds(folder)
        row |= {"relative_error": record.mean_relative_error, "kept_share": record.kept_share}
        row["seconds"] = None if times is None else times.seconds
    texts = job.evaluation["texts"]
    options = job.evaluation | {"texts": list(texts.values())}
    target = job.model if job.recipe is None else str(folder)
    scores = evaluate(target, device=device, cache=cache, progress=progress, **options)
    figures = {name: scores["perplexity"][text]["perplexity"] for name, text in texts.items()}
    figures |= {task: 100 * score["value"] for task, score in scores.get("tasks", {}).items()}
    if "average" in scores:
        figures["average"] = 100 * scores["average"]
    return row | {"figures": figures, "versions": scores["versions"], "device": scores["device"]}


def compare(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """One row of a reproduced table: the measured figures, the printed ones, and measured − printed; and the rounds, if
    the method does not run its own number.
    """
    measured, printed = result["figures"], job.row.figures
    rounds = {} if job.recipe is None or job.recipe.rounds is None else {"rounds": job.recipe.rounds}
    return {
        "model": job.model,
        "beside": job.row.model,
        "config": job.row.config,
        "setting": job.setting,
        "method": job.row.method,
        **rounds,
        **{name: result[name] for name in ("relative_error", "kept_share", "seconds") if name in result},
        "measured": measured,
        "paper": printed,
        "difference": {name: measured[name] - printed[name] for name in measured if name in printed},
    }


def result_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """A line for each text and task of a row, with the measured figure, the paper's, and their difference."""
    made = table(["setting", "method", "figure"], ["measured", "paper", "difference"], title)
    for row in rows:
        first = [row["setting"] or "dense", row["method"]]
        for name, measured in row["measured"].items():
            of_paper = [f"{row['paper'][name]:.2f}", f"{row['difference'][name]:+.2f}"] if name in row["paper"] else []
            made.add_row(*first, name, f"{measured:.2f}", *of_paper)
            first = ["", ""]
        if "relative_error" in row:
            made.add_row(*first, "relative error", f"{row['relative_error']:.4f}")
        made.add_section()
    return made


def reproduce_figure(args: argparse.Namespace, progress: Listener | None = None) -> None:
    """Figure 1 for one block: a picture, the errors as JSON, and a table."""
    methods = tuple(args.methods or COMPARED)
    if unknown := set(methods) - COMPARED.keys():
        raise UnknownNameError("method of figure 1", min(unknown), COMPARED)
    model, recipe = args.model or FIGURE_MODEL, scale_of(args).recipe(FIGURE_RECIPE)
    header = {name: getattr(args, name) for name in (*RECORDED, "block")} | {"model": model}
    measured = resumed(args.output / "errors.json", header, "errors")

    def keep(errors: Errors) -> None:
        measured["errors"] |= errors
        write(args.output / "errors.json", measured)

    errors = layer_errors(
        model, recipe, methods, args.block, args.rounds, args.device, progress, measured["errors"], keep
    )
    content = {"model": model, "block": args.block, "pattern": recipe.pattern, "rank": recipe.rank, "errors": errors}
    write(args.output / "figure1.json", content)
    save(pictures.layer_errors(content), args.output / "figure1.png")
    made = table(["layer"], list(errors), f"block {args.block}: {recipe.pattern} + rank {recipe.rank}, relative error")
    for layer in errors[methods[0]]:
        made.add_row(layer, *(f"{errors[method][layer]:.5f}" for method in methods))
    made.add_section()
    made.add_row("mean", *(f"{mean(errors[method].values()):.5f}" for method in methods))
    console.print(made)


def collected(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the output folder holds, without paths of this machine."""
    content: dict[str, Any] = {"machine": machine(), "model": args.record}
    content |= {name: getattr(args, name) for name in RECORDED} | {"tables": {}}
    for part in PARTS:
        if (file := args.output / f"{part}.json").exists():
            made = read_json(file)
            if part == "figure1":
                content[part] = made | {"model": args.record}
            else:
                content["tables"][part] = [row | {"model": args.record} for row in made["rows"]]
    return content


def earlier_record(args: argparse.Namespace) -> dict[str, Any] | None:
    """The record of this name; None if there is none.

    Raises:
        RecipeError: it was measured at another scale. Each row has rounds of its own.
    """
    file = record_file(args.record)
    if not file.exists():
        return None
    earlier: dict[str, Any] = read_json(file)
    for name in RECORDED:
        given = getattr(args, name)
        if name != "rounds" and given != earlier.get(name):
            raise RecipeError(
                f"the record {args.record} has {name} {earlier.get(name)}, not {given}; use another name with --record"
            )
    return earlier


def record_file(name: str) -> Path:
    return RESULTS / f"reproduction_{name}.json"


def beside_earlier(content: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """An earlier record with the rows, and the methods of the figure, that were measured since."""
    tables = dict(earlier["tables"])
    for part, rows in content["tables"].items():
        by_key = {row_key(row): row for row in [*tables.get(part, ()), *rows]}
        tables[part] = list(by_key.values())
    merged = earlier | {"machine": content["machine"], "tables": tables}
    if "figure1" in content:
        figure = content["figure1"]
        before = earlier.get("figure1", {"block": None})
        if before["block"] == figure["block"]:
            figure = figure | {"errors": before["errors"] | figure["errors"]}
        merged["figure1"] = figure
    return merged


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row of a table from the others."""
    return tuple(row.get(name) for name in ("beside", "config", "method", "rounds"))


def record(args: argparse.Namespace, earlier: dict[str, Any] | None) -> None:
    """Write what was measured to the results of the repository, beside an earlier record."""
    content = collected(args)
    if earlier is not None:
        content = beside_earlier(content, earlier)
    write(record_file(args.record), content)
    if "figure1" in args.parts:
        save(pictures.layer_errors(content["figure1"]), ROOT / f"docs/results/figure1_{args.record}.png")


def main(words: Sequence[str] | None = None) -> None:
    args = parser().parse_args(words)
    try:
        earlier = earlier_record(args) if args.record else None
        with phase_bars() as progress:
            for part in args.parts:
                if part == "figure1":
                    reproduce_figure(args, progress)
                else:
                    reproduce_table(int(part[-1]), args, progress)
        if args.record:
            record(args, earlier)
    except HasslefreeError as error:
        raise SystemExit(f"error: {with_flags(error.message)}") from None


if __name__ == "__main__":
    main()
