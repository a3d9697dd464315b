"""The Triton kernels in Triton's interpreter, on the CPU. Oracle: float64 on the dense matrix."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_products():
    """In a process of its own: the interpreter is chosen when the kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root, command = Path(__file__).parents[3], [sys.executable, "-m", "tests.packed.kernels.interpreted"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
