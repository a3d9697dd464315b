"""The commands about compression: `compress`, `plan`, `methods` and `demo`."""

import dataclasses
import functools
import os
import shlex
import textwrap
import time
import typing
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasslefree.cli import common
from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    COMPRESS,
    OUTPUT,
    RUN,
    Device,
    Json,
    Output,
    Quiet,
    Trust,
    command,
    console,
    flag,
    say,
)
from hasslefree.errors import with_flags
from hasslefree.recipe.fields import BUDGET, GROUPS, NAMES, Fields, help_of
from hasslefree.recipe.recipe import Recipe

if TYPE_CHECKING:
    from hasslefree.checkpoint.record import Record

# Advice printed after a compression, in lines of at most 80 columns.
SMALL_ELSEWHERE = """\
To run a small file in llama.cpp, vLLM or MLX, compress again with --engine."""
IMPORT_FIRST = """\
In Python, `import hasslefree` before transformers loads the folder: otherwise
the compressed layers get random weights, and transformers only warns."""
SETTINGS = "List the settings of this method, pruner or low-rank solver instead."
# Short help for the options that most users need, which precede all headings. The reference page on
# recipes explains them in full.
COMMON = {
    "size": "Total bytes (1.5GB) or bits per compressed weight (4.8bits; default: 5.2bits).",
    "bits": "Bits of S in every layer (default: by --size).",
    "rank": "Rank of L, 0 for no L (default: by --size).",
    "pattern": "Zeros of S, such as 2:4 (default: by method).",
    "engine": "Program that runs the result (no default).",
    "effort": "Training after the fit: fast (none), balanced or best (default: by method).",
    "calibration": "Text: mixed, c4, self, FILE",
    "samples": "Number of calibration segments",
    "seqlen": "Tokens in a segment (default: 2048 at most).",
}
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model: a hub name or a local folder.")
]
Activations = Annotated[
    str, flag(RUN, "Where hidden states are kept between blocks: device, cpu (in RAM) or disk.")
]


def recipe_options() -> Iterator[Parameter]:
    """Yield an option for each field: first the common ones, then group by group.

    Options that are not given are None.
    """
    types = typing.get_type_hints(Fields)

    def place(field: Any) -> tuple[int, int]:
        common_first = [*COMMON, field.name].index(field.name)
        return common_first, GROUPS.index(field.metadata["group"])

    for field in sorted(dataclasses.fields(Fields), key=place):
        text = COMMON.get(field.name) or help_of(field.name)
        group = None if field.name in COMMON else field.metadata["group"]
        default = field.default
        if default not in (None, ()):
            if types[field.name] is bool:
                default = "on" if default else "off"
            text = f"{text.rstrip('.')} (default: {default})."
        kind = flag_type(types[field.name])
        # The type of a list would widen the column of types.
        metavar = "<str>" if kind == list[str] else None
        option = flag(group, text, *field.metadata.get("flags", ()), metavar=metavar)
        annotation: Any = Annotated[kind | None, option]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def flag_type(hint: Any) -> Any:
    """The type of a value on the command line.

    It is int for int | None, list[str] for tuple[str, …] or a union with it, and str for a Literal.
    """
    kinds = (hint, *typing.get_args(hint))
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return list[str]
    for kind in (bool, int, float):
        if kind in kinds:
            return kind
    return str


def with_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a recipe, and `--recipe`, to a command, which receives the resulting
    recipe as `recipe`.
    """

    @functools.wraps(command)
    def wrapped(recipe: Path | None, **values: Any) -> None:
        given: dict[str, Any] = {}
        for name in NAMES:
            value = values.pop(name)
            if value not in (None, []):
                given[name] = value
        made = Recipe.from_yaml(recipe, **given) if recipe else Recipe(**given)
        command(recipe=made, **values)

    text = (
        "YAML file (-: standard input) with any of these options; the command line overrides it"
        " (default: none)."
    )
    file = Annotated[Path | None, flag(BUDGET, text, metavar="FILE")]
    parameters = [
        Parameter("recipe", Parameter.KEYWORD_ONLY, default=None, annotation=file),
        *recipe_options(),
    ]
    for name, parameter in signature(command, eval_str=True).parameters.items():
        if name != "recipe":
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return wrapped


@command(
    "compress",
    rich_help_panel=COMPRESS,
    epilog="Example: hasslefree compress MODEL OUT --size 1.5GB",
)
@with_recipe
def call_compress(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    recipe: Any,
    device: Device = None,
    activations: Activations = "device",
    trust_remote_code: Trust = False,
    resume: Annotated[
        bool, flag(None, "Continue an interrupted run (default: off).", "--resume")
    ] = False,
    overwrite: Annotated[
        bool, flag(None, "Replace OUT, and start over (default: off).", "--overwrite")
    ] = False,
    push_to: common.PushTo = None,
    private: common.Private = False,
    quiet: Quiet = False,
) -> None:
    """Compress MODEL into the folder OUT, which transformers loads."""
    try:
        from hasslefree.checkpoint.resume import describe_progress
        from hasslefree.pipeline.compress import compress
        from hasslefree.report.seconds import read_seconds, write_seconds
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before anything was written.") from None

    read_seconds(out)  # raises an error if a foreign file is in the way
    common.prepare_push(push_to, private)
    try:
        with phase_bars() as progress:
            report = compress(
                model,
                out,
                recipe,
                resume=resume,
                overwrite=overwrite,
                device=device,
                activations=activations,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; {with_flags(describe_progress(out))}.") from None
    verdict = textwrap.indent(report.summary(), " ")
    say(f"Written to {out}:\n\n{verdict}\n\n{next_commands(out, recipe, report)}")
    if not common.QUIET_PROCESS:
        write_seconds(out, report)
    common.push(out, push_to)


def next_commands(out: Path, recipe: Recipe, report: "Record") -> str:
    """The commands to type after a compression."""
    folder = shlex.quote(str(out))
    targets = {
        "llama.cpp": "gguf FILE.gguf",
        "mlx": "mlx DEST",
        "vllm": "compressed-tensors DEST",
    }
    target = targets.get(recipe.engine or "", "dense DEST")
    commands = [f"hasslefree chat {folder}", f"hasslefree report {folder}"]
    if not report.outside:  # vLLM serves no compressed embedding or head
        note = "with hasslefree[vllm]"
        if recipe.engine != "vllm":
            note += "; as large in memory as the dense model"
        commands.append(f"vllm serve {folder}  # {note}")
    commands.append(f"hasslefree export {folder} --to {target}")
    listed = "Next:  " + "\n       ".join(commands)
    if recipe.engine is None and any(layer.spec.grid for layer in report.layers):
        listed += "\n\n" + SMALL_ELSEWHERE
    return f"{listed}\n\n{IMPORT_FIRST}"


@command(rich_help_panel=COMPRESS)
@with_recipe
def plan(
    model: Model,
    recipe: Any,
    device: Device = None,
    activations: Activations = "device",
    processes: Annotated[
        int, flag(RUN, "Processes under torchrun; estimates are per process.", min=1, max=2**20)
    ] = 1,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Show the memory, disk and time that `compress` would take.

    The options are those of `compress`. For a size (the default), MODEL and the calibration text
    are read to choose bits and ranks; otherwise, or with --allocate uniform, no weights are read.
    """
    from hasslefree.models.load import resolve_device
    from hasslefree.planning.setup import setup_of
    from hasslefree.planning.tables import advice_table, plan_summary, plan_table

    setup = setup_of(
        model, recipe, resolve_device(device), activations, processes, trust_remote_code
    )
    summary = plan_summary(setup)
    tables: list[Any] = []
    shares_size = setup.resolved.size is not None and setup.resolved.allocate == "error"
    if shares_size and not summary["problem"]:
        from hasslefree.pipeline.advise import advise

        with phase_bars() as progress:
            advice = advise(
                model,
                recipe,
                device=device,
                activations=activations,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        setup = dataclasses.replace(setup, plan=advice[0].plan)
        summary = plan_summary(setup) | {"advice": [choice.to_dict() for choice in advice]}
        tables = [advice_table(advice)]
    common.show(summary, output, as_json, plan_table(setup, *tables))


@command(rich_help_panel=COMPRESS)
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=SETTINGS)] = None,
    as_json: Json = False,
) -> None:
    """List methods, pruners, low-rank solvers, patterns and efforts."""
    from hasslefree.recipe import listing

    results, text = listing.overview() if name is None else listing.describe_plug_in(name)
    common.show(results, None, as_json, text)


@command(rich_help_panel=common.TRY)
def demo(
    out: Annotated[
        Path | None, flag(OUTPUT, "Folder for the compressed models (default: they are not kept).")
    ] = None,
    rounds: Annotated[
        int, flag(None, "Rounds of hassle-free; the paper takes 80.", min=1, max=10**6)
    ] = 5,
    quiet: Quiet = False,
) -> None:
    """Compress a small model that ships with the package, in a minute.

    Several methods are compared by perplexity; then the dense and the last compressed model
    continue a prompt.
    """
    # torch reads this when it is imported. The demo's matrices are small: a second thread gains
    # little on an idle machine, and on a busy one the threads mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hasslefree.demo.run import demo_table, run_demo, sample_table

    start = time.perf_counter()
    with phase_bars() as progress:
        rows, samples = run_demo(out, rounds, progress)
    console.print(demo_table(rows))
    console.print(sample_table(samples))
    say(f"Finished in {time.perf_counter() - start:.0f} seconds.")
