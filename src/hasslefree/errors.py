"""The exceptions that a user can cause. The command line prints the message alone."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from hasslefree.escaping import escaped

# In a message, `option` writes _BEGIN, the form for Python, _MIDDLE, the form for the command line,
# and _END. LINE separates the lines of a message, because a line feed could belong to a name.
_BEGIN = "\ue000"
_MIDDLE = "\ue001"
_END = "\ue002"
LINE = "\ue003"
_OPTION = re.compile(f"{_BEGIN}(.*?){_MIDDLE}(.*?){_END}", re.DOTALL)


def option(name: str, value: Any = None) -> str:
    """An argument in a message: `damping=0.01` in Python, `--damping 0.01` on the command line."""
    argument = f"{name}=" if value is None else f"{name}={value!r}"
    flag = f"--{name.replace('_', '-')}"
    if value is not None and value is not True:
        flag = f"{flag} {value}"
    return f"{_BEGIN}{argument}{_MIDDLE}{flag}{_END}"


def with_arguments(message: str) -> str:
    """The message with its options as Python arguments."""
    return _OPTION.sub(r"\1", message).replace(LINE, "\n")


def with_flags(message: str) -> str:
    """The message with its options as command-line flags."""
    return _OPTION.sub(r"\2", message).replace(LINE, "\n")


@dataclass(frozen=True)
class Problem:
    """A problem with the values of some fields. fields: their names, the one to change first.
    where: the file that contains them.
    """

    fields: tuple[str, ...]
    message: str
    where: str = ""

    def __str__(self) -> str:
        if self.where:
            return f"{self.where}: {self.message}"
        return self.message


class HasslefreeError(ValueError):
    """Base class. The message names the cause, the place and the remedy.

    Args:
        message: may contain options from `option`; `str` gives them as arguments, `with_flags` as
            flags.
        fields: names of the arguments concerned, as in a recipe.
    """

    def __init__(self, message: str, fields: tuple[str, ...] = ()):
        self.message = escaped(message)
        self.fields = fields
        super().__init__(with_arguments(self.message))

    def within(self, where: str) -> Self:
        """The same error, with the place where it occurred at the end of the message."""
        error = type(self).__new__(type(self))  # subclasses may take other arguments
        HasslefreeError.__init__(error, f"{self.message} ({where})", self.fields)
        return error


class VersionError(HasslefreeError):
    """A library that is older than this package needs."""


class UnknownNameError(HasslefreeError):
    """An unknown name of a method, pruner, solver, pattern or data set.

    listed: a sentence in place of the list of all known names.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        fields: tuple[str, ...] = (),
        listed: str = "",
    ):
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listed = listed or f"Known: {', '.join(known)}"
        super().__init__(f"unknown {kind} {name!r}.{hint} {listed}", fields)


class ShapeError(HasslefreeError):
    """Tensors whose shapes do not match, or whose dtype cannot be used."""


class PatternError(HasslefreeError):
    """A sparsity pattern that is malformed or does not fit a weight."""


class GridError(HasslefreeError):
    """A quantisation grid that is malformed or does not fit a weight."""


class BudgetError(HasslefreeError):
    """A rank, sparsity or ratio that cannot be met."""


class RecipeError(HasslefreeError):
    """One or more wrong fields of a recipe; the message lists all `problems`."""

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """The error that lists these problems, one per line."""
        problems = tuple(problems)
        error = cls(
            LINE.join(map(str, problems)),
            tuple(name for problem in problems for name in problem.fields),
        )
        error.problems = problems
        return error


class CalibrationError(HasslefreeError):
    """A text that is missing, empty or too short."""


class TaskError(HasslefreeError):
    """A zero-shot task that cannot be run: its data are missing or malformed, or the harness is not
    installed.
    """


class ModelError(HasslefreeError):
    """A model that cannot be compressed, or not with these settings."""


class NonFiniteError(HasslefreeError):
    """NaN or Inf in weights or activations."""


class MomentError(HasslefreeError):
    """A Gram that lacks a moment of the inputs that a method needs."""


class FactorizationError(HasslefreeError):
    """A Gram matrix that is not positive definite at the damping in use."""


class ArgumentError(HasslefreeError, TypeError):
    """An argument of the wrong type."""


class OutputError(HasslefreeError):
    """An output folder that is in use, not writable, or on a disk that is too small; or a failed
    upload.
    """


class WriteError(OutputError, OSError):
    """A file or folder that the system did not let hasslefree write."""


class CheckpointError(ModelError):
    """A model folder that is damaged or inconsistent."""


class MemoryShortError(HasslefreeError):
    """A compression that does not fit into the memory that is free."""


class DistributedError(HasslefreeError):
    """A process of a distributed compression that failed before the others."""


class KernelError(HasslefreeError):
    """A backend that is not available on this machine, or does not support the layer."""


class PromptError(HasslefreeError):
    """A prompt that is empty, or longer than the model takes."""


class ProgramError(HasslefreeError):
    """A program that `hasslefree run` cannot find."""


class ServeError(HasslefreeError):
    """A compressed folder that vLLM cannot serve here: because of its version, the GPU, or tensor
    parallelism.
    """


def lacks_memory(error: BaseException) -> bool:
    """Return True for the errors of Python and of torch about too little memory."""
    # On a CPU, torch raises a plain RuntimeError.
    if "OutOfMemory" in type(error).__name__ or "can't allocate memory" in str(error):
        return True
    return isinstance(error, MemoryError)


# Failures that are no mistakes of the user: the command line exits with code 1 for these, and with
# 2 for all others.
WENT_WRONG = (
    CheckpointError,
    DistributedError,
    FactorizationError,
    MemoryShortError,
    NonFiniteError,
    VersionError,
    WriteError,
)
