"""Triton's kernels compiled for GPUs that are not there: registers, spills, and bytes for each instruction.

    python benchmarks/gpu_kernels.py [--json]

A decode kernel reads S once, so that what counts is how many packed bytes an instruction of a warp brings. An H100
issues about 927 G of them a second (132 processors, four schedulers each, 1.755 GHz): its memory is used fully from 3.6
bytes an instruction on. Triton compiles for any architecture (`GPUTarget`), and its wheel has the disassembler.

--json prints one line: by architecture and number of tokens, registers, spilled bytes and packed bytes an instruction.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from harness.record import RESULTS, machine, write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hasslefree.packed.kernels import triton as triton_kernels
from hasslefree.packed.kernels.triton import BLOCK_OUT, PAIRS_BYTES, PAIRS_OUT, block_values

ARCHITECTURES = (80, 90, 100)
TOKENS = (1, 2, 4, 8, 16)
WARPS = 4
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Of 2:4 in bfloat16: two bytes of a value, and a quarter of a byte of its position.
BYTES_A_VALUE = 2.25


def compiled(architecture: int, tokens: int) -> bytes:
    """The machine code of the kernel for 2:4 in bfloat16 and so many tokens."""
    pointers = {"x": "*bf16", "values": "*bf16", "positions": "*u8", "y": "*fp32"}
    sizes = {"out": "i32", "kept": "i32", "code_bytes": "i32"}
    if tokens == 1:
        kernel, constants = triton_kernels._decode_pairs, {"ROWS": PAIRS_OUT, "BYTES": PAIRS_BYTES}
    else:
        blocks = {"TOKENS": tokens, "ROWS": BLOCK_OUT, "VALUES": block_values(tokens)}
        kernel, constants = triton_kernels._decode, {"N": 2, "M": 4, "BITS": 2} | blocks
    signature = pointers | sizes | dict.fromkeys(constants, "constexpr")
    order = {name: signature[name] for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(order) if name in pointers | sizes}
    source = ASTSource(fn=kernel, signature=order, constexprs=constants, attrs=aligned)
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


def longest_loop(cubin: bytes) -> int:
    """The instructions of the longest loop: a jump back to a label, and all from there."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in run_tool("nvdisasm", cubin, "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            jump = re.search(r"BRA\S*\s.*?(\.L_x_\d+)", instruction[1])
            if jump and jump[1] in labels:
                longest = max(longest, count - labels[jump[1]])
    return longest


def row(architecture: int, tokens: int) -> dict[str, Any]:
    cubin = compiled(architecture, tokens)
    registers, spilled = resources(cubin)
    values = PAIRS_OUT * PAIRS_BYTES * 4 if tokens == 1 else BLOCK_OUT * block_values(tokens)
    brought = values * BYTES_A_VALUE / WARPS
    rate = round(brought / longest_loop(cubin), 2)
    return {
        "architecture": f"sm_{architecture}", "tokens": tokens, "registers": registers, "spilled_bytes": spilled,
        "bytes_an_instruction": rate,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line, and write nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_kernels.json")
    args = parser.parse_args()
    rows = [row(architecture, tokens) for architecture in ARCHITECTURES for tokens in TOKENS]
    if args.json:
        print(json.dumps(rows))
    else:
        write(args.output, {"machine": machine(), "triton": triton.__version__, "rows": rows})


if __name__ == "__main__":
    main()
