"""YAML files of fields, one on top of another (`base: other.yaml`); every value knows its file and line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BASE = "base"


@dataclass(frozen=True)
class Given:
    """A value and where it was given, such as recipes/joint.yaml:3."""

    value: Any
    where: str


@dataclass(frozen=True)
class Fields:
    """What a file and its bases give, the nearest file winning; and all that is wrong in them, each with its place."""

    given: dict[str, Given]
    problems: list[str]


def read_fields(path: Path, above: tuple[Path, ...] = ()) -> Fields:
    """The fields of a YAML file over those of its base, which it names by a path relative to itself.

    Args:
        above: the files that led here, for cycles.
    """
    try:
        pairs, problems = _pairs(path)
    except (OSError, UnicodeDecodeError) as error:
        return Fields({}, [f"the recipe {path} cannot be read: {error}"])
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return Fields({}, [f"{path}{line}: the recipe is not YAML: {error.problem}"])
    except yaml.YAMLError as error:
        return Fields({}, [f"the recipe {path} is not YAML: {error}"])
    own: dict[str, Given] = {}
    for name, given in pairs:
        if name in own:
            problems.append(f"{given.where}: {name} is given twice, first at {own[name].where}")
        else:
            own[name] = given
    if BASE not in own:
        return Fields(own, problems)
    base = _base(own.pop(BASE), path, (*above, path))
    return Fields(base.given | own, base.problems + problems)


def _base(given: Given, path: Path, above: tuple[Path, ...]) -> Fields:
    """The fields of the base that `path` names. above: the files that led here, `path` the last."""
    if not isinstance(given.value, str):
        return Fields({}, [f"{given.where}: base must be the path of a recipe, got {given.value!r}"])
    target = path.parent / given.value
    if target.resolve() in [file.resolve() for file in above]:
        circle = " → ".join(map(str, (*above, target)))
        return Fields({}, [f"{given.where}: the bases go in a circle: {circle}"])
    if not target.is_file():
        return Fields({}, [f"{given.where}: the base {target} does not exist; the path is relative to {path.name}"])
    return read_fields(target, above)


def _pairs(path: Path) -> tuple[list[tuple[str, Given]], list[str]]:
    """The names and values of one file in their order, a name as often as it is there; and what cannot be a value.

    Raises:
        OSError, UnicodeDecodeError, yaml.YAMLError: no file, no text, no YAML.
    """
    loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            return [], [f"the recipe {path} must hold fields, such as 'pattern: \"2:4\"'"]
        pairs, problems = [], []
        for key, node in root.value:
            where = f"{path}:{key.start_mark.line + 1}"
            try:
                pairs.append((str(key.value), Given(loader.construct_object(node, deep=True), where)))
            except (yaml.YAMLError, ValueError, TypeError) as error:
                problems.append(f"{where}: {key.value} has no plain value: {getattr(error, 'problem', error)}")
        return pairs, problems
    finally:
        loader.dispose()
