"""What to do to a model, as a frozen dataclass and as YAML. All problems are reported at once."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.protocols import Method, grid_of
from hasslefree.errors import HasslefreeError, RecipeError
from hasslefree.methods import METHODS, build_method
from hasslefree.methods.prune import Prune
from hasslefree.pruners import PRUNERS
from hasslefree.texts import check_text
from hasslefree.yaml_fields import Given, read_fields

BUDGET_FIELDS = ("pattern", "rank", "sparsity", "ratio", "rank_share")
ALLOCATIONS = ("uniform", "owl", "error")
# What is done where the recipe does not say. The rounds are those of `joint`.
EFFORTS: dict[str, dict[str, Any]] = {
    "fast": {"rounds": 25, "allocate": "uniform", "dense_target": 0.0, "match_blocks": False},
    "balanced": {"rounds": 100, "allocate": "error", "dense_target": 1.0, "match_blocks": False},
    "best": {"rounds": 100, "allocate": "error", "dense_target": 1.0, "match_blocks": True},
}
GRID_FIELDS = ("bits", "group_size", "symmetric")
METHOD_FIELDS = (*GRID_FIELDS, "method", "pruner", "low_rank", "rounds", "damping", "refit", "rank")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A compression, complete: the same recipe, model and machine give the same folder.

    Args:
        pattern, rank, sparsity, ratio, rank_share: the budget of every layer; see `Budget`. pattern None: "dense" where
            the method has a grid, so that only the grid constrains S, else "2:4".
        effort: "fast", "balanced" or "best": rounds, and the levers of docs/reference/levers.md that are not given one
            by one. None: balanced for `joint`; the methods of others are left as they were published.
        allocate: "uniform": the same budget for every layer; "error": ranks, and non-zeros where the pattern counts
            them, go where they bring the predictions closest to the dense ones, in the bytes of the uniform plan;
            "owl": blocks with more outliers keep more, around the ratio or sparsity (docs/reference/levers.md).
        method: a name from the table; pruner, low_rank, rounds and damping replace parts of it.
        refit: let least squares on the support follow the pruner.
        bits, group_size, symmetric: of the grid of a method that has one; see `Grid`. group_size 0: whole rows.
        factor_bits: 8 for the factors of L as int8 codes; None for the model's dtype.
        calibration: a hub name (c4, wikitext2, ptb) or a local .txt or .jsonl file.
        samples, seqlen: how many segments of how many tokens. seqlen None: 2048, or what the model takes if less.
        sequential: "layer" gathers the Gram of a layer after all layers before it were compressed, within a block
            too; "block" gathers all Grams of a block in one pass, as the authors' code does.
        dense_target: a of docs/reference/levers.md: how far the target of a layer leads back to the dense model, from 0
            to 1.
        match_blocks: train what each block keeps against the dense block's output, once its layers are decomposed.
        leave_dense: globs of full layer or parameter names that stay as they are.
        dtype: of the model while it is compressed and when it is saved; "auto" is the checkpoint's.
        seed: of the calibration draw and of the random start of every layer.
    """

    pattern: str | None = None
    rank: int | None = None
    sparsity: float | None = None
    ratio: float | None = None
    rank_share: float | None = None
    method: str = "joint"
    effort: Literal["fast", "balanced", "best"] | None = None
    allocate: Literal["uniform", "owl", "error"] | None = None
    pruner: str | None = None
    low_rank: str | None = None
    rounds: int | None = None
    damping: float | None = None
    refit: bool = False
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    factor_bits: int | None = None
    calibration: str = "c4"
    samples: int = 128
    seqlen: int | None = None
    sequential: Literal["layer", "block"] = "layer"
    dense_target: float | None = None
    match_blocks: bool | None = None
    leave_dense: tuple[str, ...] = ()
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pattern is None:
            object.__setattr__(self, "pattern", "dense" if self.has_grid else "2:4")

    @property
    def has_grid(self) -> bool:
        """Whether S lies on a grid, as far as known names tell."""
        part = METHODS.get(self.method) if self.pruner is None else PRUNERS.get(self.pruner)
        return grid_of(part) is not None

    @property
    def two_streams(self) -> bool:
        """Whether hidden states run through the dense blocks beside those through the compressed ones."""
        return bool(self.match_blocks or self.dense_target)

    def filled(self) -> Recipe:
        """The same recipe with everything said that the effort decides."""
        effort = self.effort or ("balanced" if self.method == "joint" else None)
        bundle = dict(EFFORTS[effort or "fast"])
        if self.method != "joint":
            del bundle["rounds"]
        if not self._movable:
            bundle["allocate"] = "uniform"
        if self.has_grid or self.factor_bits:
            bundle["match_blocks"] = False
        given = {name: getattr(self, name) for name in bundle if getattr(self, name) is not None}
        return dataclasses.replace(self, effort=effort, **(bundle | given))

    @property
    def _movable(self) -> bool:
        """Whether layers have anything to give each other."""
        ranked = bool(self.rank) or self.ratio is not None
        return self.pattern != "dense" and (ranked or self.pattern == "unstructured")

    def budget(self) -> Budget:
        return Budget(self.pattern or "2:4", self.rank, self.sparsity, self.ratio, self.rank_share)

    def build_method(self) -> Method:
        grid = {name: getattr(self, name) for name in GRID_FIELDS}
        return build_method(self.method, self.pruner, self.low_rank, self.rounds, self.damping, self.refit, **grid)

    def check(self, with_text: bool = True) -> None:
        """Raise a RecipeError with every problem that can be seen without the model.

        Args:
            with_text: look at the calibration text too.
        """
        if problems := [message for _, message in self._problems(with_text)]:
            raise RecipeError("\n".join(problems))

    def _problems(self, with_text: bool) -> typing.Iterator[tuple[tuple[str, ...], str]]:
        """Fields, the likeliest first, and what is wrong with one or several of them."""
        for message in self.budget().problems():
            yield BUDGET_FIELDS, message
        try:
            method = self.build_method()
            method.check(self.rank or 0)
            if not isinstance(method, Prune) and self.rank is None and self.ratio is None:
                yield ("method",), f"method {self.method} needs a rank or a ratio (rank 0 for S alone)"
        except HasslefreeError as error:
            yield METHOD_FIELDS, str(error)
        yield from self._grid_problems()
        if self.factor_bits is not None:
            yield from self._factor_problems()
        for name, least in (("samples", 1), ("seqlen", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield (name,), f"{name} must be at least {least}, got {value}"
        if self.damping is not None and not 0 <= self.damping < float("inf"):
            yield ("damping",), f"damping must be a number and not negative, got {self.damping}"
        if not 0 <= self.seed < 2**63:
            yield ("seed",), f"seed must be between 0 and 2^63 - 1, got {self.seed}"
        if self.effort is not None and self.effort not in EFFORTS:
            yield ("effort",), f"effort is one of {', '.join(EFFORTS)}, got {self.effort!r}"
        if not 0 <= (self.dense_target or 0) <= 1:
            yield ("dense_target",), f"dense_target is a share between 0 and 1, got {self.dense_target}"
        if self.allocate not in (None, *ALLOCATIONS):
            yield ("allocate",), f"allocate is one of {', '.join(ALLOCATIONS)}, got {self.allocate!r}"
        elif self.allocate == "error" and not self._movable:
            yield ("allocate",), f"allocate error has nothing to move: pattern {self.pattern} without rank; give a rank"
        elif self.allocate == "owl" and self.ratio is None and self.sparsity is None:
            yield ("allocate",), "allocate owl moves a ratio, or a sparsity, between blocks: give one of them"
        if self.sequential not in ("layer", "block"):
            yield ("sequential",), f"sequential is layer or block, got {self.sequential!r}"
        if self.dtype not in DTYPES:
            yield ("dtype",), f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}"
        if with_text:
            try:
                check_text(self.calibration)
            except HasslefreeError as error:
                yield ("calibration",), str(error)

    def _grid_problems(self) -> typing.Iterator[tuple[tuple[str, ...], str]]:
        if self.group_size is not None and self.group_size < 0:
            yield ("group_size",), f"group_size is a number of inputs, or 0 for whole rows, got {self.group_size}"
        if self.pattern == "dense" and not self.has_grid:
            quantised = ", ".join(name for name, method in METHODS.items() if grid_of(method))
            yield (
                ("pattern",),
                f"pattern dense keeps every entry of S, and method {self.method} changes none: use a method that puts "
                f"them on a grid ({quantised}), or another pattern",
            )
        if self.has_grid and self.match_blocks:
            yield ("match_blocks",), "match_blocks trains the values of S, which a grid does not let go: leave it out"

    def _factor_problems(self) -> typing.Iterator[tuple[tuple[str, ...], str]]:
        try:
            check_factor_bits(self.factor_bits, 0 if self.rank_share == 0 else self.rank)
        except HasslefreeError as error:
            yield ("factor_bits",), str(error)
        if isinstance(METHODS.get(self.method), Prune):
            yield (
                ("factor_bits",),
                f"factor_bits is for the factors of L, and method {self.method} has none: leave it out",
            )
        if self.match_blocks:
            yield ("match_blocks",), "match_blocks trains the factors, which factor_bits fixes: leave out one of them"

    def to_yaml(self) -> str:
        """The fields that say something, as YAML that `from_yaml` reads."""
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}
        return yaml.safe_dump({name: v for name, v in values.items() if v not in (None, [])}, sort_keys=False)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Recipe:
        """Read a recipe, the ones that it names as its `base`, and put `changes` over their fields.

        Raises:
            RecipeError: with every problem of every field, its file and its line.
        """
        fields = read_fields(Path(path))
        given = fields.given | {name: Given(value, f"given beside {path}") for name, value in changes.items()}
        values, wrong = _typed({name: each.value for name, each in given.items()})
        problems = fields.problems + [f"{given[name].where}: {message}" for name, message in wrong.items()]
        if fields.given or not fields.problems:
            for names, message in cls(**values)._problems(with_text=True):
                # What is wrong already is not complained of once more as missing.
                if not any(re.search(rf"\b{name}\b", message) for name in wrong):
                    problems.append(f"{_place(names, message, given) or path}: {message}")
        if problems:
            raise RecipeError("\n".join(problems))
        return cls(**values)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Recipe:
        """A recipe from plain values, checked for names and types. Raises RecipeError with every problem."""
        values, wrong = _typed(content)
        if wrong:
            raise RecipeError("\n".join(wrong.values()))
        return cls(**values)


def _typed(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of known fields and right types; and for each of the others what is wrong with it."""
    hints = typing.get_type_hints(Recipe)
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for key, value in content.items():
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            wrong[key] = f"unknown field {key!r}; {hint}known: {', '.join(hints)}"
            continue
        if key == "leave_dense" and isinstance(value, list):
            value = tuple(str(glob) for glob in value)
        allowed = _plain_types(hints[key])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join({types.NoneType: "nothing", tuple: "list"}.get(t, t.__name__) for t in allowed)
            wrong[key] = f"{key} must be {names}, got {value!r}" + _yaml_hint(key, value)
        else:
            values[key] = value
    return values, wrong


def _place(names: tuple[str, ...], message: str, given: dict[str, Given]) -> str:
    """Where the fields that a message speaks of were given; empty where none was, which is then what is wrong."""
    having = [name for name in names if name in given]
    meant = [n for n in having if re.search(rf"\b{n}\b", message) or repr(given[n].value) in message]
    return ", ".join(given[name].where for name in meant or having[:1])


def _yaml_hint(key: str, value: Any) -> str:
    """YAML 1.1 reads 2:4 as a number in base 60."""
    return '; put it in quotes, such as "2:4"' if key == "pattern" and isinstance(value, int) else ""


def _plain_types(hint: Any) -> tuple[type, ...]:
    """The classes that a field's annotation admits."""
    if typing.get_origin(hint) is tuple:
        return (tuple,)
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    plain = tuple(str if typing.get_origin(member) is Literal else member for member in members)
    return (*plain, int) if float in plain else plain
