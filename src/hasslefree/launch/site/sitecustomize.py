"""Imported by Python at startup, because `hasslefree run` puts this folder on PYTHONPATH."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import hasslefree  # noqa: F401  # registers the format as soon as transformers is imported

# The environment's own sitecustomize, which this one hides.
_HERE = Path(__file__).parent
_hidden = PathFinder.find_spec(
    "sitecustomize", [entry for entry in sys.path if Path(entry) != _HERE]
)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
