"""Old versions of torch and transformers are refused in one sentence."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from hasslefree.dependencies import OLDEST, check_version
from hasslefree.errors import VersionError

ROOT = Path(__file__).parents[1]


def library(name: str, version: str) -> ModuleType:
    made = ModuleType(name)
    made.__version__ = version
    return made


def test_the_oldest_versions_are_those_that_pip_installs():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert {f"{name}>={major}.{minor}" for name, (major, minor) in OLDEST.items()} <= set(listed)


@pytest.mark.parametrize("version", ["5.20.0", "5.20.0.dev0", "5.100.1", "6.0"])
def test_new_versions_pass(version):
    check_version(library("transformers", version))


@pytest.mark.parametrize("version", ["4.57.6", "5.19.3", "5.3.0"])
def test_old_versions_are_refused(version):
    with pytest.raises(VersionError, match=rf'transformers {version} is too old.*pip install "transformers>=5.20"'):
        check_version(library("transformers", version))


def test_vllm_may_bring_an_older_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    check_version(library("transformers", "5.19.0"))


def test_the_command_line_says_so(tmp_path):
    (tmp_path / "torch.py").write_text('__version__ = "2.5.1+cpu"\n', encoding="utf-8")
    command = [sys.executable, "-m", "hasslefree", "inspect", str(tmp_path)]
    path = f"{tmp_path}:{ROOT / 'src'}"
    ended = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    sentence = 'torch 2.5.1+cpu is too old for hasslefree, which needs torch>=2.6: pip install "torch>=2.6"'
    assert (ended.returncode, ended.stderr) == (1, f"error: {sentence}\n")
