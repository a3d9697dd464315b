"""Triton's kernels compiled for GPUs that are not there: registers, spills, and bytes for each instruction.

    python benchmarks/gpu_kernels.py [--json]

A decode kernel reads S once, so that what counts is how many packed bytes an instruction of a warp brings. An H100
issues about 927 G of them a second (132 processors, four schedulers each, 1.755 GHz): its memory is used fully from 3.6
bytes an instruction on. Triton compiles for any architecture (`GPUTarget`), and its wheel has the disassembler.

--json prints one line: by architecture, pattern and number of tokens, registers, spilled bytes and packed bytes an
instruction.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from harness.record import RESULTS, machine, write
from hasslefree.packed.kernels.triton import add_up, constants, multiply

ARCHITECTURES = (80, 90, 100)
PATTERNS = ((2, 4), (2, 8))
TOKENS = (1, 2, 16)
WARPS = 4
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions of a loop that only waits, at most.
WAITING = 16
POINTERS = {"positions": "*u8", "sums": "*fp32"} | dict.fromkeys(("x", "values", "v", "u", "bias", "y"), "*bf16")
# What is not a multiple of 16 in a model, so that loads cannot rely on it.
ODD = ("tokens", "parts")


def compiled(kernel: Any, constants: dict[str, Any], architecture: int) -> bytes:
    """The machine code of a kernel for bfloat16.

    Args:
        constants: the arguments that are known when it is compiled; an argument that is 1 is one of them, as in Triton.
    """
    known: dict[str, str] = POINTERS | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(signature)
        if name not in ODD and name not in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": WARPS}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["cubin"]


def run_tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes that it spills."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", run_tool("cuobjdump", cubin, "-res-usage"))
    assert found
    return int(found[1]), int(found[2]) + int(found[3])


def innermost_loops(cubin: bytes) -> list[int]:
    """The instructions of each loop without a loop in it: a jump back to a label, and all from there.

    A loop of a few instructions waits for the memory or for the tensor cores, and does not count as one.
    """
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    count = 0
    for line in run_tool("nvdisasm", cubin, "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            jump = re.search(r"BRA\S*\s.*?(\.L_x_\d+)", instruction[1])
            if jump and jump[1] in labels and count - labels[jump[1]] > WAITING:
                loops.append((labels[jump[1]], count))
    inner = [
        (start, end)
        for start, end in loops
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in loops)
    ]
    return [end - start for start, end in inner]


def row(architecture: int, tokens: int, n: int = 2, m: int = 4) -> dict[str, Any]:
    """What the two launches of a layer are compiled to. The longest loop is that over S."""
    known = {"tokens": 1} if tokens == 1 else {}
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
    of_multiply, of_add_up = constants(x, n, m)
    first = compiled(multiply, of_multiply | known, architecture)
    second = compiled(add_up, of_add_up | known, architecture)
    registers, spilled = resources(first)
    values = of_multiply["ROWS"] * of_multiply["STEP"] * (1 if of_multiply["KERNEL"] == "gather" else 4)
    brought = values * (2 + of_multiply["BITS"] / 8) / WARPS
    return {
        "architecture": f"sm_{architecture}", "pattern": f"{n}:{m}", "tokens": tokens,
        "registers": registers, "spilled_bytes": spilled + resources(second)[1],
        "bytes_an_instruction": round(brought / max(innermost_loops(first)), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line, and write nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_kernels.json")
    args = parser.parse_args()
    rows = [
        row(architecture, tokens, n=n, m=m) for architecture in ARCHITECTURES for n, m in PATTERNS for tokens in TOKENS
    ]
    if args.json:
        print(json.dumps(rows))
    else:
        write(args.output, {"machine": machine(), "triton": triton.__version__, "rows": rows})


if __name__ == "__main__":
    main()
