"""Recipes as YAML files, one on top of another (`base: other.yaml`)."""

import re
from pathlib import Path
from typing import Any

import yaml

from hasslefree.errors import RecipeError

_INT = "tag:yaml.org,2002:int"


class _Loader(yaml.SafeLoader):
    """Plain values; 2:4 is a string, as in YAML 1.2, and no number in base 60. No name may be given twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                twice = f"{key.value} is given twice"
                raise yaml.constructor.ConstructorError(problem=twice, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9]+$"), [*"-+0123456789"])


def read_fields(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a YAML file over those of its base, and the files they are from. above: those that led here."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise RecipeError(f"{place}: the recipe is not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"the recipe {path} must contain fields, such as 'pattern: 2:4'")
    values = {str(name): value for name, value in content.items()}
    base, files = values.pop("base", None), dict.fromkeys(values, path)
    if base is None:
        return values, files
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base must be the path of a recipe, got {base!r}")
    target, above = path.parent / base, (*above, path)
    if target.resolve() in [file.resolve() for file in above]:
        raise RecipeError(f"{path}: these recipes are each other's base: {' → '.join(map(str, (*above, target)))}")
    if not target.is_file():
        raise RecipeError(f"{path}: the base {target} does not exist; the path is relative to {path.name}")
    base_values, base_files = read_fields(target, above)
    return base_values | values, base_files | files
