"""The progress bar that a call from Python shows by default: one for the whole run.

It is shown in a notebook, and on standard error if that is a terminal. The switches of
huggingface_hub (`HF_HUB_DISABLE_PROGRESS_BARS=1` and `disable_progress_bars()`) and tqdm
(`TQDM_DISABLE=1`) hide it.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from hasslefree.progress import Step

C = TypeVar("C", bound=Callable[..., Any])


def with_bar(call: C) -> C:
    """Show a bar during a function with the argument `progress`, unless a listener is given."""

    @functools.wraps(call)
    def with_default(*args: Any, **options: Any) -> Any:
        if options.get("progress") is not None:
            return call(*args, **options)
        off = bool(os.environ.get("TQDM_DISABLE")) or os.environ.get("RANK", "0") != "0"
        with tqdm(
            total=1.0,
            bar_format="{percentage:3.0f} % {desc} |{bar}|",
            disable=off or None,  # None: unless standard error is a terminal
            leave=False,
            dynamic_ncols=True,
            miniters=0,  # draw all steps, but at most ten per second
        ) as bar:
            return call(*args, **options | {"progress": functools.partial(show, bar)})

    return with_default  # type: ignore[return-value]


def show(bar: Any, step: Step) -> None:
    """Show a step, and the share of the run that is done, or of the phase before its first count.

    In a narrow terminal, tqdm cuts the end of the line.
    """
    bar.set_description_str(f"{step.phase} {step.count}{step.about}", refresh=False)
    share = step.done / step.total
    if step.left is not None and step.seconds:
        share = step.seconds / (step.seconds + step.left)
    bar.update(share - bar.n)
    if not step.done:
        bar.refresh()  # the name of a phase is shown as soon as it begins
