"""Every exception that a user can cause. The command line prints the message alone and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HasslefreeError(ValueError):
    """Base class: the message names the thing, where it is, and the remedy."""


class UnknownNameError(HasslefreeError):
    """A method, pruner, solver, pattern or data set that is in no table."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}")


class ShapeError(HasslefreeError):
    """Tensors whose shapes do not go together."""


class PatternError(HasslefreeError):
    """A sparsity pattern that is malformed or does not fit a weight."""


class GridError(HasslefreeError):
    """A grid of quantised values that is malformed or does not fit a weight."""


class BudgetError(HasslefreeError):
    """A rank, sparsity or ratio that cannot be met."""


class RecipeError(HasslefreeError):
    """One or more wrong fields of a recipe; the message lists every problem."""


class CalibrationError(HasslefreeError):
    """A text that is missing, empty or too short."""


class TaskError(HasslefreeError):
    """A zero-shot task that cannot be run: its data are missing or malformed, or the harness is not installed."""


class ModelError(HasslefreeError):
    """A model that cannot be compressed, or not as asked."""


class NonFiniteError(HasslefreeError):
    """NaN or Inf in weights or activations."""


class MomentError(HasslefreeError):
    """A Gram that lacks a moment of the inputs that a method asks for."""


class FactorizationError(HasslefreeError):
    """A Gram matrix that is not positive definite at the damping in use."""


class OutputError(HasslefreeError):
    """An output folder that is in use, not writable, or on a disk that is too small."""


class CheckpointError(HasslefreeError):
    """A compressed model folder that does not hold what it says."""


class MemoryShortError(HasslefreeError):
    """A compression that does not fit into the memory that is free."""


class DistributedError(HasslefreeError):
    """A process of a compression by several that ended before the others."""


class KernelError(HasslefreeError):
    """A way of computing a layer that this machine does not have, or that does not fit the layer."""
