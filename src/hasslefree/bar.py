"""The bar that a call from Python shows by default, as `datasets` and `transformers` show theirs.

There is one for the whole run, on standard error if that is a terminal, or in a notebook. It
follows the switches of huggingface_hub (`HF_HUB_DISABLE_PROGRESS_BARS=1` and
`disable_progress_bars()`) and tqdm (`TQDM_DISABLE=1`).
"""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from hasslefree.progress import Step

C = TypeVar("C", bound=Callable[..., Any])


def with_bar(call: C) -> C:
    """Give a function with the argument `progress` a bar if no listener is given."""

    @functools.wraps(call)
    def shown(*args: Any, **options: Any) -> Any:
        if options.get("progress") is not None:
            return call(*args, **options)
        off = bool(os.environ.get("TQDM_DISABLE")) or os.environ.get("RANK", "0") != "0"
        # disable=None: unless standard error is a terminal. miniters=0: every step is drawn, at
        # most ten per second.
        settings: dict[str, Any] = {
            "disable": off or None,
            "leave": False,
            "dynamic_ncols": True,
            "miniters": 0,
        }
        with tqdm(total=1.0, bar_format="{percentage:3.0f} % {desc} |{bar}|", **settings) as bar:
            return call(*args, **options | {"progress": functools.partial(move, bar)})

    return shown  # type: ignore[return-value]


def move(bar: Any, step: Step) -> None:
    """Show a step: the share of the whole run, or of the phase as long as that is all that is
    known.
    """
    columns = shutil.get_terminal_size().columns
    count, left = f" {step.count}" * (columns >= 80), step.about() * (columns >= 60)
    bar.set_description_str(f"{step.phase}{count}{left}", refresh=False)
    run = (
        None
        if step.run_left is None
        else step.run_seconds / max(step.run_seconds + step.run_left, 1e-9)
    )
    bar.update((step.done / step.total if run is None else run) - bar.n)
    if not step.done:
        bar.refresh()  # the name of a phase is shown as soon as it begins
