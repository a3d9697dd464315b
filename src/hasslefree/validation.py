"""JSON that a file holds, as an instance of a dataclass: types are strict, and the first wrong field is named."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from hasslefree.errors import HasslefreeError, with_arguments

T = TypeVar("T")

# The names of dtypes that a user may give; auto: that of the checkpoint.
DTYPES = ("auto", "float32", "bfloat16", "float16")

# A measured number, and a count.
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class InvalidError(ValueError):
    """A value that is not of its type.

    Args:
        field: the name of the field; empty for the whole. cause: what is wrong with it, in words.
        refused: a check of the dataclass itself says so, and not the type of the field.
    """

    def __init__(self, field: str, cause: str, refused: bool = False):
        super().__init__(with_arguments(cause))
        self.field, self.message, self.refused = field, cause, refused


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def validated(kind: type[T], content: Any) -> T:
    """An instance of `kind`, a dataclass or another annotation, from what `json.loads` gave.

    Fields that `kind` does not have are left out. What `__post_init__` of a dataclass refuses is wrong too.

    Raises:
        InvalidError: the first value that is missing or not of its type.
    """
    try:
        found: T = _adapter(kind).validate_json(json.dumps(content), strict=True)  # type: ignore[arg-type]
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = next((str(part) for part in reversed(first["loc"]) if isinstance(part, str)), "")
    if first["type"] == "value_error":
        refusal = first["ctx"]["error"]
        cause = refusal.message if isinstance(refusal, HasslefreeError) else str(refusal)
        raise InvalidError(field, cause, refused=True)
    if first["type"] == "missing":
        raise InvalidError(field, f"{field!r} is missing")
    raise InvalidError(field, f"{field}: {first['msg']}, got {first['input']!r:.60}")
