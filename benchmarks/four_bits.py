"""A quantised S with and without L, against other programs that quantise: perplexity of every text by bytes.

    python benchmarks/four_bits.py MODEL TEXT… --calibration FILE [--mixture TEXT:SHARE% …] [--rows NAME …]
        [--seen TEXT …] [--shared] [--llama FOLDER --converter FOLDER [--work FOLDER]]
        [--programs llm-compressor=PYTHON AutoRound=PYTHON]
    python benchmarks/four_bits.py MODEL TEXT… --calibration FILE --rows

MODEL is what benchmarks/off_grid.py wrote: on a model that had been quantised before, the grids of some rows are those
that its weights lie on already. TEXT… is the folder of texts, for all kinds of harness/texts.py, or some of them. Each
row holds the perplexity of each text, the increase of its logarithm, and the mean and the worst of the increase on
texts of another kind than was calibrated on, which --seen names. Rows whose name ends in "mixture" are calibrated on
the texts of --mixture instead, which have shares; if one of them is `python`, the text `code` counts as seen. A row is
written as soon as it is measured; rows that the output file already holds are kept. Without --rows, all of ours are
measured, and those of every program that was given. benchmarks/pictures.py draws them.

Rows of llama.cpp are made by its library in the folder --llama (harness/llama.py), with an importance matrix of the
same calibration segments ("matrix") and without; the better one is what to compare with. All matrices of their files
are read back, embeddings included. Another program runs in an environment of its own, whose interpreter --programs
names (harness/rivals.py), and gets the same segments; the weights of the layers that it compressed are read back. All
weights are evaluated in the model in transformers, in --dtype. "bytes_a_weight" counts the tensors that replace the
weights of the compressed layers, as the program stores them, and "file_bytes" whole files: of weights, or a GGUF file,
which holds the vocabulary too.

--converter is the folder of llama.cpp that has convert_hf_to_gguf.py. --work keeps the dense GGUF file of the model and
the matrix for later runs, and our compressed folders: a run that was cut off is resumed there. --shared: the machine
does other work at the same time, so no seconds are written, except those of the processor.

results/four_bits.json holds rows of three texts that an earlier version measured: groups of 64 with scales of 16 bits,
embeddings and heads dense, llama.cpp's types without a matrix, and fewer iterations of AutoRound.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import real_model
from elsewhere import HARNESS, named
from harness import llama, models
from harness import texts as kinds
from harness.llama import LlamaCpp
from harness.models import Measurement
from harness.record import RESULTS, machine, resumed
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.pipeline.text import read_texts
from off_grid import RECORD


@dataclass(frozen=True)
class Spec:
    """What a row is made of.

    Args:
        settings: fields of the recipe, or what harness/rivals.py takes.
        program: "llama.cpp", or one in harness/rivals.py; None for hasslefree.
    """

    settings: dict[str, Any]
    program: str | None = None


# Scales as other programs have them, with as many bits in every layer.
ON_GRID: dict[str, Any] = {"method": "joint-grid", "group_size": 64, "scale_bits": 16}


def sized_rows(size: str, efforts: tuple[str, ...], **fields: Any) -> Rows:
    """Rows of a size in codes of one length, with bits and ranks chosen for each matrix."""
    fields = fields | {"size": size, "coding": "fixed"}
    return {f"{size}, {effort}": Spec(fields | {"effort": effort}) for effort in efforts}


def uniform_rows(bits: int, ranks: tuple[int, ...], efforts: tuple[str, ...]) -> Rows:
    """Rows of as many bits in every layer; embedding and head stay dense."""
    return {
        f"{bits} bits + rank {rank}, {effort}": Spec({"bits": bits, "rank": rank, "effort": effort})
        for rank in ranks
        for effort in efforts
    }


def gguf_rows(size: str, efforts: tuple[str, ...]) -> Rows:
    """Rows of a GGUF file in llama.cpp's own types, chosen for each layer within a size of all weights."""
    fields = {"engine": "llama.cpp", "size": size}
    return {f"GGUF, {size}, {effort}": Spec(fields | {"effort": effort}) for effort in efforts}


Rows = dict[str, Spec]
OURS: Rows = {
    **sized_rows("105MB", ("fast", "balanced", "best")),
    **sized_rows("398MB", ("fast", "balanced")),
    **sized_rows("247MB", ("fast",)),
    **sized_rows("5.2bits", ("fast", "balanced", "best")),
    **sized_rows("4.6bits", ("fast", "best")),
    **sized_rows("4.3bits", ("fast", "best")),
    **sized_rows("3.54bits", ("best",)),
    **gguf_rows("103.6MB", ("fast", "balanced")),
    **gguf_rows("391MB", ("fast", "balanced")),
    **gguf_rows("979MB", ("fast",)),
    **uniform_rows(4, (0, 16), ("fast", "balanced")),
    **{
        f"2:4 in 6 bits + rank {rank}, fast": Spec(
            {"pattern": "2:4", "bits": 6, "rank": rank, "factor_bits": 8, "effort": "fast"}
        )
        for rank in (96, 144)
    },
    "4 bits alone, GPTQ": Spec(ON_GRID | {"method": "gptq", "pattern": "dense", "bits": 4, "rank": 0}),
}
ENTROPY_CODED: Rows = {
    f"{name}, entropy-coded": Spec(spec.settings | {"coding": "entropy"})
    for size in ("105MB", "398MB", "985MB", "5.2bits", "4.6bits", "4.3bits", "3.54bits")
    for name, spec in sized_rows(size, ("fast", "balanced", "best")).items()
}
MIXED: Rows = {
    f"{name}, mixture": Spec((OURS | ENTROPY_CODED)[name].settings | {"mixed": True})
    for name in (
        "105MB, balanced",
        "398MB, fast",
        "398MB, balanced",
        "247MB, fast",
        "5.2bits, balanced",
        "GGUF, 979MB, fast",
        *ENTROPY_CODED,
    )
}
# What each part of our quantising is worth, without training unless a name says so: rows for a file of their own
# (--output).
COARSE: dict[str, Any] = {"method": "joint-grid", "bits": 3, "group_size": 64, "scale_bits": 16, "effort": "fast"}
FINE = COARSE | {"group_size": 16, "scale_bits": 4}
# Trained, by default on 49,152 tokens. Not checked: that would undo what makes code worse, and code has a column.
TRAINED = FINE | {"rank": 0, "effort": "balanced", "check": False}
EMBEDDING_DENSE: dict[str, Any] = {"leave_dense": ("*embed_tokens*",), "effort": "fast"}
PARTS: Rows = {
    "3 bits in groups of 64, 16-bit scales": Spec(COARSE | {"rank": 0}),
    "3 bits in groups of 16, 4-bit scales": Spec(FINE | {"rank": 0}),
    "3 bits in groups of 16, 4-bit scales, four times the text": Spec(FINE | {"rank": 0, "samples": 256}),
    "3 bits in groups of 16, 4-bit scales, trained": Spec(TRAINED),
    "3 bits in groups of 64, 16-bit scales, rank 16, S fitted with H": Spec(COARSE | {"rank": 16, "projected": False}),
    "3 bits in groups of 64, 16-bit scales, rank 16": Spec(COARSE | {"rank": 16}),
    "3.54 bits entropy-coded, the same in every layer": Spec(
        EMBEDDING_DENSE | {"size": "3.54bits", "allocate": "uniform"}
    ),
    "3.54 bits entropy-coded": Spec(EMBEDDING_DENSE | {"size": "3.54bits"}),
    "105 MB, embedding in bfloat16": Spec(EMBEDDING_DENSE | {"size": "105MB"}),
    "105 MB": Spec({"size": "105MB", "effort": "fast"}),
}
LLAMA_CPP = ("Q4_K_M", "Q5_K_M", "IQ4_XS", "Q3_K_M", "IQ3_M", "Q6_K", "Q8_0")
AUTO_ROUND = {"bits": 4, "group_size": 64, "sym": False, "iters": 200}
RIVALS: Rows = {
    **{
        f"llama.cpp {kind}{', matrix' if matrix else ''}": Spec({"type": kind, "matrix": matrix}, "llama.cpp")
        for kind in LLAMA_CPP
        for matrix in (True, False)
    },
    "llm-compressor GPTQ, 4 bits, best settings": Spec(
        {"num_bits": 4, "group_size": 64, "symmetric": False, "actorder": "static", "observer": "mse"}, "llm-compressor"
    ),
    "AutoRound, 200 iterations, 4 bits": Spec(AUTO_ROUND, "AutoRound"),
    "AutoRound, 200 iterations, extended, 4 bits": Spec(AUTO_ROUND | {"enable_alg_ext": True}, "AutoRound"),
}
# Those that are measured unless others are named.
USUAL: Rows = OURS | ENTROPY_CODED | MIXED | RIVALS
ROWS: Rows = USUAL | PARTS


def needs_llama(spec: Spec) -> bool:
    """Whether a row is a GGUF file, llama.cpp's or ours."""
    return "llama.cpp" in (spec.program, spec.settings.get("engine"))


@dataclass(frozen=True)
class Programs:
    """Other programs: the interpreters of those in harness/rivals.py, by name, and llama.cpp."""

    interpreters: dict[str, str]
    llama: LlamaCpp | None

    def given(self, spec: Spec) -> bool:
        """Whether a row can be measured."""
        if needs_llama(spec):
            return self.llama is not None
        return spec.program is None or spec.program in self.interpreters

    def check(self, names: list[str]) -> None:
        """Raise SystemExit where a row needs what was not given."""
        for spec in (ROWS[name] for name in names if name != "dense"):
            if self.given(spec):
                continue
            if needs_llama(spec):
                raise SystemExit("the rows of llama.cpp need --llama and --converter, the folders of its library and "
                                 "of convert_hf_to_gguf.py")  # fmt: skip
            raise SystemExit(f"the rows of {spec.program} need its interpreter: --programs {spec.program}=PYTHON")


def rival_row(measurement: Measurement, spec: Spec, programs: Programs) -> dict[str, Any]:
    """Quantise with another program, and measure the dequantised weights."""
    model: Any = models.loaded(measurement.model, measurement.dtype)
    blocks = find_blocks(model)
    weights = {
        f"{blocks.prefix(index)}.{name}.weight": site.shape
        for index, block in enumerate(blocks.modules)
        for name, site in find_sites(block).items()
    }
    tokenizer = models.load_tokenizer(measurement.model)
    segments = read_texts(model, tokenizer, measurement.recipe(), model.device).draw()
    request = {"settings": spec.settings, "segments": segments.tolist(), "layers": weights}
    with tempfile.TemporaryDirectory() as work:
        script = [programs.interpreters[str(spec.program)], str(HARNESS / "rivals.py")]
        command = [*script, str(spec.program), str(Path(measurement.model).resolve()), work]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, cwd=work)
        if done.returncode:
            raise RuntimeError(f"{spec.program} failed:\n{done.stderr[-2000:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        state = load_file(f"{work}/dequantised.safetensors")
    with torch.no_grad():
        for name in weights:
            model.get_parameter(name).copy_(state[name])
    size = answer.pop("bytes") / sum(map(math.prod, weights.values()))
    perplexity = models.rounded(measurement.perplexities(model))
    found = {"source": real_model.source(), "processor": machine()["processor"]}
    return found | answer | {"bytes_a_weight": size, "perplexity": perplexity}


def llama_row(measurement: Measurement, spec: Spec, program: LlamaCpp) -> dict[str, Any]:
    """Quantise with llama.cpp, and measure what its file holds."""
    torch.set_num_threads(1)
    model: Any = models.loaded(measurement.model, "float32")
    tokenizer = models.load_tokenizer(measurement.model)
    segments = read_texts(model, tokenizer, measurement.recipe(), model.device).draw()
    found = {"source": real_model.source(), "processor": machine()["processor"]}
    found |= llama.row(program, measurement.model, model, segments, spec.settings["type"], spec.settings["matrix"])
    return found | {"perplexity": models.rounded(measurement.perplexities(model))}


def row(
    measurement: Measurement,
    spec: Spec,
    dense: dict[str, float],
    seen: list[str],
    programs: Programs,
    timed: bool,
    kept: Path | None,
) -> dict[str, Any]:
    """One row, ours or another program's. seen: the texts of the calibration's kind. kept: see `real_model.row`."""
    if spec.program == "llama.cpp":
        found = llama_row(measurement, spec, programs.llama)  # type: ignore[arg-type]  # checked before
    elif spec.program:
        found = rival_row(measurement, spec, programs)
    else:
        exported = partial(llama.exported, programs.llama, measurement.model) if needs_llama(spec) else None
        found = real_model.row(measurement, spec.settings, None, 0, timed, exported=exported, kept=kept)
    if spec.settings.get("mixed") and any(text.startswith("python:") for text in measurement.mixture):
        seen = [*seen, "code"]
    found |= models.increases(found["perplexity"], dense, seen)
    gap = round(models.gap(found["perplexity"], dense), 4)
    return {"program": spec.program, "settings": spec.settings} | found | {"gap": gap}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[models.options(max_tokens=16 * 1024)],
    )
    parser.set_defaults(samples=64, seqlen=512)
    models.mixture_option(parser, help="for the rows of its name")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window of text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", choices=["dense", *ROWS], metavar="NAME", help="; ".join(ROWS))
    parser.add_argument("--programs", nargs="+", type=named, default=[], metavar="PROGRAM=PYTHON")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="of llama.cpp's library")
    parser.add_argument("--converter", type=Path, metavar="FOLDER", help="of llama.cpp's scripts")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for llama.cpp's files of this model")
    parser.add_argument("--seen", nargs="*", default=["c4"], help="texts of the kind that is calibrated on")
    parser.add_argument("--dtype", default="auto", help="in which the models are evaluated")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--output", type=Path, help="the default is benchmarks/results/whole_files_MODEL.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    record = Path(args.model) / RECORD
    if not record.exists():
        raise SystemExit(f"{args.model} has no {RECORD}: write an off-grid copy with benchmarks/off_grid.py")
    with tempfile.TemporaryDirectory() as scratch:
        run(args, record, Path(args.work or scratch).resolve())


def run(args: argparse.Namespace, record: Path, work: Path) -> None:
    """Measure. record: of the off-grid copy. work: for llama.cpp's files."""
    work.mkdir(parents=True, exist_ok=True)
    with_llama = args.llama and args.converter
    llama_cpp = LlamaCpp(args.llama.resolve(), args.converter.resolve(), work) if with_llama else None
    programs = Programs(dict(args.programs), llama_cpp)
    names = args.rows
    if names is None:
        names = [name for name, spec in USUAL.items() if programs.given(spec)]
        names = [name for name in names if args.mixture or not USUAL[name].settings.get("mixed")]
    programs.check(names)
    models.check_mixture((ROWS[name].settings for name in names if name != "dense"), args.mixture)

    measurement, seed = Measurement.of(args), str(args.seed)
    tokenizer = models.load_tokenizer(args.model)
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "window", "max_tokens", "seed", "dtype")}
    moved = json.loads(record.read_text())
    header |= {"model": Path(args.model).name, "off_grid": {name: moved[name] for name in ("sigma", "seed")}}
    header |= {"seen": args.seen}
    header["texts"] = {kinds.name(text): kinds.digest(text, tokenizer) for text in measurement.texts}
    output = args.output or RESULTS / f"whole_files_{Path(args.model).name}.json"
    content = resumed(output, header, "results")
    timed = not args.shared
    models.fill(content, output, {("dense", seed): (measurement, None, None, 0, timed)}, real_model.row)
    dense = content["results"]["dense"][seed]["perplexity"]
    jobs = {}
    for name in names:
        kept = work / name if args.work else None
        if name != "dense":
            jobs[name, seed] = (measurement, ROWS[name], dense, args.seen, programs, timed, kept)
    models.fill(content, output, jobs, row)


if __name__ == "__main__":
    main()
