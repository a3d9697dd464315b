"""Triton's kernels compiled for GPUs: what the disassembly says. Bounds: no spills, and what was reached once."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]

# Packed bytes of S for an instruction of a warp in the inner loop, at least, by the number of tokens.
LEAST = {1: 6.5, 2: 5.0, 16: 5.0}


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("tokens", LEAST)
def test_kernels_spill_nothing_and_bring_so_many_bytes_an_instruction(architecture, tokens):
    kernels = importlib.import_module("gpu_kernels")
    found = kernels.row(architecture, tokens)
    assert found["spilled_bytes"] == 0
    assert found["registers"] <= 128
    assert found["bytes_an_instruction"] >= LEAST[tokens]
