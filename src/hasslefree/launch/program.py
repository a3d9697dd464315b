"""Find a Python program and run it, and its child processes, with hasslefree's format registered.

Python imports the module `sitecustomize` when it starts. The folder `site` contains one that
imports hasslefree, and PYTHONPATH, which child processes inherit, lists that folder.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hasslefree.errors import ProgramError

SITE = Path(__file__).parent / "site"
# The extra that installs a program.
EXTRAS = {"lm_eval": "eval", "lm-eval": "eval", "vllm": "vllm"}


def run_program(name: str, arguments: Sequence[str]) -> None:
    """Replace this process with a console script, a module or a .py file. The exit code is that of
    the program.
    """
    path = str(SITE)
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        path += os.pathsep + inherited
    command = [*program_command(name), *arguments]
    environment = os.environ | {"PYTHONPATH": path}
    if os.name == "nt":  # exec on Windows returns to the shell before the program ends
        sys.exit(subprocess.call(command, env=environment))
    os.execve(command[0], command, environment)


def program_command(name: str) -> list[str]:
    """The command that starts a program: its script, or this interpreter with a file or module."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ProgramError(f"there is no file {name}; give the path of a Python script")
        return [sys.executable, name]
    scripts = sysconfig.get_path("scripts")
    script = shutil.which(name, path=scripts)
    if script is not None:
        return [script]
    if not is_runnable(name):
        remedy = "pip install the package that provides it"
        if name in EXTRAS:
            remedy = f'pip install "hasslefree[{EXTRAS[name]}]"'
        raise ProgramError(
            f"there is no program {name!r}: neither a script in {scripts} nor a module that"
            f" {sys.executable} -m runs; check the name, or {remedy}"
        )
    return [sys.executable, "-m", name]


def is_runnable(module: str) -> bool:
    """Return True if `python -m` can run this module: a plain module, or a package with
    __main__.
    """
    sys.path.insert(0, os.getcwd())  # `python -m` looks there first
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):  # a parent package may raise anything when it is imported
        return False
    finally:
        del sys.path[0]
    if spec is None:
        return False
    inside = spec.submodule_search_locations
    if inside is None:
        return True
    return PathFinder.find_spec(f"{module}.__main__", inside) is not None
