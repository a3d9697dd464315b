"""Checks by pydantic of what a file or a user gives: types are strict, and an error names the field."""

import functools
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hasslefree.errors import HasslefreeError, with_arguments

T = TypeVar("T")

# The names of dtypes that a user may give; auto: that of the checkpoint.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# A measured number, and a count.
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class InvalidError(ValueError):
    """A value that is not of its type. field: empty for the whole. cause: what is wrong with it, in words."""

    def __init__(self, field: str, cause: str):
        super().__init__(with_arguments(cause))
        self.field, self.message = field, cause


_adapter = functools.cache(TypeAdapter)


def validated(kind: type[T], content: Any) -> T:
    """An instance of a dataclass or another annotation from what `json.loads` gave, without unknown fields.

    Raises an InvalidError about the first value that is missing, not of its type, or rejected by `__post_init__`.
    """
    try:
        instance: T = _adapter(kind).validate_json(json.dumps(content), strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        raise InvalidError(*describe(error.errors(include_url=False)[0])) from None
    return instance


def describe(error: ErrorDetails) -> tuple[str, str]:
    """The field of an error of pydantic (empty for the whole), and what is wrong with it in a sentence."""
    field = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")
    if error["type"] == "value_error":
        refusal = error["ctx"]["error"]
        return field, refusal.message if isinstance(refusal, HasslefreeError) else str(refusal)
    if error["type"] == "missing":
        return field, f"{field!r} is missing"
    return field, f"{error['msg'].replace('Input should', f'{field} must', 1)}, got {error['input']!r:.60}"
