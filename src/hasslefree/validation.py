"""Checks of files and arguments by pydantic: types are strict, and errors name the field."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model, validate_call
from pydantic_core import ErrorDetails

from hasslefree.errors import ArgumentError, BudgetError, HasslefreeError, with_arguments

T = TypeVar("T")

# The names of dtypes that a user may give; auto: that of the checkpoint.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Types of fields: measured numbers, parts of a whole, growth factors, counts and seeds.
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class InvalidError(ValueError):
    """A value of the wrong type. field: its name; empty for the whole. cause: in words."""

    def __init__(self, field: str, cause: str):
        super().__init__(with_arguments(cause))
        self.field = field
        self.message = cause


_adapter = functools.cache(TypeAdapter)


def validated(kind: type[T], content: Any) -> T:
    """An instance of a dataclass or other type from parsed JSON, without unknown fields.

    Raises an InvalidError about the first value that is missing, of the wrong type, or rejected by
    `__post_init__`.
    """
    try:
        instance: T = _adapter(kind).validate_json(json.dumps(content), strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        raise InvalidError(*describe(error.errors(include_url=False)[0])) from None
    return instance


class Checked:
    """A frozen dataclass that checks the types and limits of its fields; an `error` names the first
    wrong one.
    """

    error: ClassVar[type[HasslefreeError]] = BudgetError

    def __post_init__(self) -> None:
        given = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        try:
            checked = _fields(type(self)).model_validate(given)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            first["loc"] = first["loc"][:1]  # without the branches of a union
            field, cause = describe(first)
            raise self.error(cause, (field,)) from None
        for name in given:
            object.__setattr__(self, name, getattr(checked, name))


@functools.cache
def _fields(kind: Any) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    fields: Any = {field.name: (hints[field.name], ...) for field in dataclasses.fields(kind)}
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return create_model(kind.__name__, __config__=config, **fields)


F = TypeVar("F", bound=Callable[..., Any])

# pydantic's names of errors about a number that is too small.
LIMITS = ("greater_than_equal", "greater_than")


def typed(function: F) -> F:
    """Check the types of a function's arguments; an ArgumentError names the first wrong one."""

    @functools.cache
    def checked() -> Callable[..., Any]:
        config = ConfigDict(strict=True, arbitrary_types_allowed=True)
        return validate_call(config=config)(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return checked()(*args, **options)
        except ValidationError as error:
            raise argument_error(function, error.errors()) from None

    return call  # type: ignore[return-value]


def argument_error(function: Callable[..., Any], errors: list[ErrorDetails]) -> ArgumentError:
    """The error about the first wrong argument of a call."""
    first = errors[0]
    names = list(inspect.signature(function).parameters)
    place = first["loc"][0]
    name = names[place] if isinstance(place, int) else place
    if name not in names or first["type"] == "missing_argument":
        return ArgumentError(f"{function.__name__}: {name}: {first['msg']}")
    limits = [each["msg"] for each in errors if each["type"] in LIMITS]
    if limits:
        cause = describe_limit(limits[0])
    else:
        kind = inspect.formatannotation(get_type_hints(function)[name])
        cause = kind.replace("'", "")
    return ArgumentError(f"{name} must be {cause}, got {first['input']!r:.60}", (name,))


def plain(value: Any) -> Any:
    """A Python number for a scalar of numpy or torch; any other value unchanged."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def describe(error: ErrorDetails) -> tuple[str, str]:
    """The field of a pydantic error (empty for the whole), and the problem in a sentence."""
    field = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")
    if error["type"] == "value_error":
        refusal = error["ctx"]["error"]
        return field, refusal.message if isinstance(refusal, HasslefreeError) else str(refusal)
    if error["type"] == "missing":
        return field, f"{field!r} is missing"
    cause = re.sub("^(Input|String) should", f"{field} must", error["msg"])
    return field, f"{describe_limit(cause)}, got {error['input']!r:.60}"


def describe_limit(message: str) -> str:
    """A message of pydantic about a number, in shorter words: at least 1."""
    message = message.removeprefix("Input should be ")
    return message.replace("greater than or equal to", "at least").replace("greater than", "above")
