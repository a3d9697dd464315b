"""Recipes in YAML files, which may extend others (`base: other.yaml`)."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from hasslefree.errors import RecipeError
from hasslefree.files import read_limited, read_small

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
# The most bytes and fields of a recipe, recipes in a chain of bases, and nested lists.
MOST_BYTES = 1 << 18
MOST_FIELDS = 100
MOST_BASES = 16
DEEPEST = 8


class _Loader(yaml.SafeLoader):
    """Plain values; as in YAML 1.2, 2:4 and 1:30.5 are strings, 010 is ten, and 1e-2 is a number.

    Duplicate keys are refused, and so are aliases: a few lines of nested aliases make gigabytes.
    """

    depth = 0

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _refused("lists are nested too deeply", self.peek_event())
        if self.check_event(yaml.AliasEvent):
            raise _refused("aliases (*name) are not supported", self.peek_event())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names: list[Any] = []
        for key, _ in node.value:
            if len(names) == MOST_FIELDS:
                raise _refused("there are too many fields", key)
            if key.value in names:
                raise _refused(f"{key.value} is given twice", key)
            names.append(key.value)
        return super().construct_mapping(node, deep)


def _refused(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """The error for an event or a node of a file."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


_DIGITS = "0123456789"
_NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9]+$"), [*"-+", *_DIGITS])
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, [*"-+.", *_DIGITS])
_Loader.add_constructor(_INT, lambda loader, node: int(node.value))


def read_fields(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a YAML file (-: standard input) and of its bases, and the file of each value.

    Args:
        above: the chain of files whose base this file is, from the first one.
    """
    values = read_values(path)
    base = values.pop("base", None)
    files = dict.fromkeys(values, path)
    if base is None:
        return values, files
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base must be the path of a recipe, got {base!r}")
    target = path.parent / base
    above = (*above, path)
    if not target.is_file():
        raise RecipeError(
            f"{path}: the base {target} does not exist; the path is relative to {path.name}"
        )
    if target.resolve() in [file.resolve() for file in above]:
        raise RecipeError(
            f"{path}: these recipes are each other's base: {' → '.join(map(str, (*above, target)))}"
        )
    if len(above) > MOST_BASES:
        raise RecipeError(
            f"{above[0]}: more than {MOST_BASES} recipes extend one another; merge some of them"
        )
    base_values, base_files = read_fields(target, above)
    return base_values | values, base_files | files


def read_values(path: Path) -> dict[str, Any]:
    """The values of one YAML file (-: standard input), including `base`."""
    try:
        if path == Path("-"):
            text = read_limited(sys.stdin.buffer, MOST_BYTES)
        else:
            text = read_small(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {error}") from None
    try:
        content = yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises others for a tag before a wrong value
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise RecipeError(
            f"{place}: the recipe is not YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    if not isinstance(content, dict):
        raise RecipeError(f"the recipe {path} must contain fields, such as 'pattern: 2:4'")
    return {str(name): value for name, value in content.items()}
