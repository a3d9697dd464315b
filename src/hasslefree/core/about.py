"""What `hasslefree methods` lists of a method, a pruner, a low-rank solver, a pattern and an effort."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """An entry of a table, for a reader who looks for its name.

    Args:
        line: what it does, in a few words. reference: "arXiv 2502.00899", another publication, or "docs: joint" for
            docs/explanation/joint.md.
    """

    line: str
    reference: str
