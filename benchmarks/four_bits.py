"""A quantised S with and without L, against other programs that quantise: perplexity by bytes.

    python benchmarks/four_bits.py MODEL TEXT… --calibration FILE [--rows NAME …] [--shared]
        [--programs llama.cpp=PYTHON llm-compressor=PYTHON AutoRound=PYTHON] [--converter FOLDER]
    python benchmarks/four_bits.py MODEL TEXT… --calibration FILE --rows

MODEL is what benchmarks/off_grid.py wrote: on a model that had been quantised before, the grids of some rows are those
that its weights lie on already. Texts, windows and the gap are those of benchmarks/real_model.py, and every row is
written as soon as it is measured; rows that the output file already holds are kept. Without --rows, all of ours are
measured, and those of every program that --programs names. `--rows` alone draws the picture again.

A program runs in an environment of its own, whose interpreter --programs names (harness/rivals.py). It gets the same
calibration segments, unless it uses none (llama.cpp, here without an importance matrix). What its file stores is
dequantised into the model in transformers and evaluated there, in the dtype of the checkpoint, as ours is. Embeddings,
head and norms stay as they were, in every row. Bytes are those of the tensors that replace the weights of the
compressed layers, as the program stores them.

--converter is the folder of llama.cpp that has convert_hf_to_gguf.py. --shared: the machine does other work at the same
time, so no seconds are written, except those of the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import real_model
from elsewhere import HARNESS, named
from harness import frontier, models
from harness.models import Measurement
from harness.record import RESULTS, ROOT, machine, resumed
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.pipeline.inputs import draw
from off_grid import RECORD


@dataclass(frozen=True)
class Spec:
    """What a row is made of, and where it stands in the picture.

    Args:
        settings: fields of the recipe, or what harness/rivals.py takes. curve, label: of its point in the picture.
        program: in harness/rivals.py; None for hasslefree.
    """

    settings: dict[str, Any]
    curve: str
    label: str
    program: str | None = None


ON_GRID: dict[str, Any] = {"method": "joint-grid", "group_size": 64}


def dense_rows(bits: int, ranks: tuple[int, ...], efforts: tuple[str, ...], factors: int | None = None) -> Rows:
    """Rows of a full S with a scale and an offset for each 64 entries. factors: the bits of the factors of L."""
    suffix = f" in {factors} bits" if factors else ""
    coded = {"factor_bits": factors} if factors else {}
    return {
        f"{bits} bits" + (f" + rank {rank}{suffix}" if rank else " alone") + f", {effort}": Spec(
            ON_GRID | coded | {"pattern": "dense", "offset": True, "bits": bits, "rank": rank, "effort": effort},
            f"{bits} bits, {effort}",
            f"{rank}" + (f" int{factors}" if factors else ""),
        )
        for rank in ranks
        for effort in efforts
    }


def sparse_rows(pattern: str, ranks: tuple[int, ...]) -> Rows:
    """Rows of a sparse S on four bits."""
    return {
        f"{pattern} on 4 bits + rank {rank}, fast": Spec(
            ON_GRID | {"pattern": pattern, "bits": 4, "rank": rank, "effort": "fast"}, f"{pattern}, 4 bits", str(rank)
        )
        for rank in ranks
    }


def dealt_rows(bits: float, efforts: tuple[str, ...], **fields: Any) -> Rows:
    """Rows of a size in bits per weight, with bits and ranks chosen for each layer."""
    return {
        f"{bits} bits, dealt, {effort}": Spec(
            fields | {"size": f"{bits}bits", "effort": effort}, f"dealt, {effort}", ""
        )
        for effort in efforts
    }


Rows = dict[str, Spec]
OURS: Rows = {
    "4 bits alone, GPTQ": Spec({"method": "gptq", "pattern": "dense", "bits": 4, "rank": 0}, "GPTQ", "4 bits"),
    **dense_rows(4, (0, 16), ("fast", "balanced", "best")),
    **dense_rows(4, (16, 32), ("fast", "best"), factors=8),
    **dense_rows(3, (0, 16, 32), ("fast", "best")),
    **dense_rows(3, (16, 32), ("best",), factors=8),
    **dense_rows(2, (64,), ("best",)),
    **dense_rows(5, (0, 16), ("fast", "best")),
    **dense_rows(8, (0,), ("fast",)),
    **dense_rows(4, (12,), ("fast",), factors=8),
    **dealt_rows(4.3, ("best",)),
    **dealt_rows(4.6, ("fast", "best")),
    **dealt_rows(4.8, ("fast", "balanced")),
    **dealt_rows(5.2, ("fast", "balanced", "best")),
    **sparse_rows("2:4", (16,)),
    **sparse_rows("6:8", (16, 48, 96)),
}
LLAMA_CPP = ("Q3_K_M", "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q8_0")
RIVALS: Rows = {
    **{f"llama.cpp {kind}": Spec({"type": kind}, "llama.cpp", kind, "llama.cpp") for kind in LLAMA_CPP},
    "llm-compressor GPTQ, 4 bits": Spec(
        {"num_bits": 4, "group_size": 64, "symmetric": False}, "llm-compressor", "GPTQ, 4 bits", "llm-compressor"
    ),
    "AutoRound, 50 iterations, 4 bits": Spec(
        {"bits": 4, "group_size": 64, "sym": False, "iters": 50, "batch_size": 4},
        "AutoRound",
        "4 bits, 50 iterations",
        "AutoRound",
    ),
}
ROWS: Rows = OURS | RIVALS


@dataclass(frozen=True)
class Programs:
    """The interpreters of other programs, by their name in harness/rivals.py, and llama.cpp's scripts."""

    interpreters: dict[str, str]
    converter: str | None

    def check(self, names: list[str]) -> None:
        """Raise SystemExit where a row needs what was not given."""
        for program in {ROWS[name].program for name in names if name != "dense"} - {None}:
            if program not in self.interpreters:
                raise SystemExit(f"the rows of {program} need its interpreter: --programs {program}=PYTHON")
            if program == "llama.cpp" and not self.converter:
                raise SystemExit("the rows of llama.cpp need --converter, the folder of convert_hf_to_gguf.py")


def rival_row(measurement: Measurement, spec: Spec, programs: Programs) -> dict[str, Any]:
    """Quantise with another program, and measure the dequantised weights."""
    model: Any = models.loaded(measurement.model, "auto")
    blocks = find_blocks(model)
    weights = {
        f"{blocks.prefix(index)}.{name}.weight": site.shape
        for index, block in enumerate(blocks.modules)
        for name, site in find_sites(block).items()
    }
    segments = draw(model, models.load_tokenizer(measurement.model), measurement.recipe())
    request = {
        "settings": spec.settings, "segments": segments.tolist(), "converter": programs.converter, "layers": weights
    }  # fmt: skip
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


def row(
    measurement: Measurement, spec: Spec, dense: dict[str, float], programs: Programs, timed: bool
) -> dict[str, Any]:
    """One row, ours or another program's."""
    if spec.program:
        found = rival_row(measurement, spec, programs)
    else:
        found = real_model.row(measurement, spec.settings, None, 0, timed)
    place = {"curve": spec.curve, "label": spec.label, "program": spec.program, "settings": spec.settings}
    return place | found | {"gap": round(models.gap(found["perplexity"], dense), 4)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[models.options(max_tokens=16 * 1024)],
    )
    parser.set_defaults(samples=64, seqlen=512)
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window of text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", choices=["dense", *ROWS], metavar="NAME", help="; ".join(ROWS))
    parser.add_argument("--programs", nargs="+", type=named, default=[], metavar="PROGRAM=PYTHON")
    parser.add_argument("--converter", help="the folder of llama.cpp's scripts")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "four_bits.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "results" / "frontier.png")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    record = Path(args.model) / RECORD
    if not record.exists():
        raise SystemExit(f"{args.model} has no {RECORD}: write an off-grid copy with benchmarks/off_grid.py")
    programs = Programs(dict(args.programs), args.converter and str(Path(args.converter).resolve()))
    given = [name for name, spec in ROWS.items() if spec.program is None or spec.program in programs.interpreters]
    names = given if args.rows is None else args.rows
    programs.check(names)

    header = {name: getattr(args, name) for name in ("samples", "seqlen", "window", "max_tokens", "seed")}
    header |= {"model": Path(args.model).name, "off_grid": json.loads(record.read_text())}
    content = resumed(args.output, header, "results")
    measurement, seed = Measurement.of(args), str(args.seed)
    timed = not args.shared
    models.fill(content, args.output, {("dense", seed): (measurement, None, None, 0, timed)}, real_model.row)
    dense = content["results"]["dense"][seed]["perplexity"]
    jobs = {(name, seed): (measurement, ROWS[name], dense, programs, timed) for name in names if name != "dense"}
    models.fill(content, args.output, jobs, row)
    frontier.draw(args.plot, four_bits=args.output)
    frontier.draw_next_to_others(args.plot.with_name("next_to_others.png"), args.output)


if __name__ == "__main__":
    main()
