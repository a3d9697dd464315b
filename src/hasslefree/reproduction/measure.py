"""Measure the rows of a table, one after the other; finished rows are kept and not measured again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hasslefree.errors import OutputError, option
from hasslefree.evaluation.run import evaluate
from hasslefree.folder.headers import read_json
from hasslefree.folder.record import Record
from hasslefree.phases import Listener, Phases
from hasslefree.report.content import read_seconds, seconds_file, write_seconds
from hasslefree.reproduction.jobs import Job
from hasslefree.run.compress import compress

RESULTS = "results.json"


def read_results(out: Path) -> dict[str, Any]:
    """The rows that were measured, by `Job.key`."""
    file = out / RESULTS
    return read_json(file) if file.exists() else {}


def run_jobs(
    jobs: Iterable[Job],
    out: Path,
    *,
    device: str | None = None,
    cache: Path | None = None,
    keep: bool = False,
    progress: Listener | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compress and evaluate the jobs without results; returns the results of all by `Job.key`.

    An interrupted run continues after the last finished row; within a row after the last finished block of the
    compression, and after the last answer to a task.

    Args:
        out: a folder for the results and, while they are needed, the compressed models. keep: leave those there.
        device, cache, progress: as for `compress` and `evaluate`. say: called with the name of
            each row when it starts.

    Raises:
        HasslefreeError: as `compress` and `evaluate`; finished rows are kept.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the folder {out} cannot be created ({error}); give another {option('output')}") from None
    results = read_results(out)
    missing = [job for job in jobs if job.key not in results]
    phases = Phases(progress)
    for job in phases.counted("table", missing, len(missing), "rows"):
        say(f"{job.model}: {job.name}")
        results[job.key] = measure(job, out / job.key, device, cache, progress)
        part = out / f".{RESULTS}"
        part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        part.replace(out / RESULTS)
        if job.recipe is not None and not keep:
            shutil.rmtree(out / job.key)
            seconds_file(out / job.key).unlink(missing_ok=True)
    return results


def measure(
    job: Job, folder: Path, device: str | None, cache: Path | None, progress: Listener | None
) -> dict[str, Any]:
    """One row of the results. folder: of the compressed model; an existing one, finished or not, is from this job."""
    row: dict[str, Any] = {"model": job.model, "setting": job.row.config, "method": job.row.method}
    if job.recipe is not None:
        # The folder exists only once it is complete.
        if not folder.exists():
            write_seconds(
                folder, compress(job.model, folder, job.recipe, device=device, resume=True, progress=progress)
            )
        text = (folder / "compression.json").read_text(encoding="utf-8")
        report, times = Record.from_json(text), read_seconds(folder, text)
        row |= {
            "relative_error": report.mean_relative_error,
            "kept_share": report.kept_share,
            "seconds": None if times is None else times.seconds,
        }
    target = job.model if job.recipe is None else str(folder)
    texts = job.evaluation["texts"]
    how = job.evaluation | {"texts": list(texts.values())}
    found = evaluate(target, device=device, cache=cache, progress=progress, **how)
    figures = {name: found["perplexity"][text]["perplexity"] for name, text in texts.items()}
    figures |= {task: 100 * each["value"] for task, each in found.get("tasks", {}).items()}
    if "average" in found:
        figures["average"] = 100 * found["average"]
    return row | {"figures": figures, "versions": found["versions"], "device": found["device"]}
