"""Shared by all commands: the application, common options, the console and printed results."""

import copy
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.console import RenderableType
from rich.segment import Segment
from typer.core import TyperCommand, TyperGroup

import hasslefree
from hasslefree.errors import OutputError
from hasslefree.escaping import escaped

# Headings in the help of `hasslefree` and of its commands, besides the groups of a recipe.
COMPRESS = "Compress"
TRY = "Try a result"
MEASURE = "Measure"
ELSEWHERE = "Use in other programs"
RUN = "Where to run"
OUTPUT = "Output"


class Console(rich.console.Console):
    """A console that escapes control characters in texts. Styles are not affected."""

    def render(self, *content: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*content, **options):
            if segment.control:
                yield segment
            else:
                yield Segment(escaped(segment.text, "\n\t"), segment.style)


# Under torchrun, which sets both variables, only the first process prints more than errors.
QUIET_PROCESS = "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"
console = Console(quiet=QUIET_PROCESS)
# Elsewhere lines are not wrapped. A terminal alone would break lines within words.
ON_TERMINAL = bool(sys.stderr) and sys.stderr.isatty()
errors = Console(stderr=True, soft_wrap=not ON_TERMINAL)


# Flags that take several values. --prompt is not one: it is repeated before each text.
LIST_FLAGS = ("--perplexity", "--tasks", "--leave-dense", "--calibration")


# Commands with more parameters have a brief help; this key of the context is true after -h.
MANY = 30
BRIEF = "hasslefree.brief"


class UntypedSwitches:
    """A command or group whose help shows no type for switches."""

    def get_params(self, ctx: Any) -> list[Any]:
        options: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in options:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        return options


class Commands(UntypedSwitches, TyperGroup):
    """The group of all commands. An interruption is reported in a line, with exit code 130."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for command in self.commands.values():  # --verbose may stand before a command or after it
            command.params += [option for option in self.params if option.name == "verbose"]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Suggest the intended command if the first word is not a command."""
        name = args[0]
        if name in self.commands:  # there may be a folder of the same name
            return super().resolve_command(ctx, args)
        if name == "serve":
            ctx.fail("No such command 'serve'. vLLM serves compressed folders: `vllm serve OUT`")
        if "/" in name or Path(name).is_dir():
            meant = f"hasslefree compress {shlex.join(args)}"
            ctx.fail(f"No such command {name!r}. Did you mean `{meant}`?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            if not QUIET_PROCESS:
                errors.print(str(interruption) or "Interrupted.", markup=False, highlight=False)
            raise typer.Exit(130) from None


class Command(UntypedSwitches, TyperCommand):
    """A command whose list flags take several values, as in --tasks piqa rte.

    The values of a list end at the next flag. If the command would then lack an argument, such as
    the model in `evaluate --tasks piqa OUT`, the last values of the list are taken for it.
    """

    def __init__(self, *names: Any, **settings: Any):
        super().__init__(*names, **settings)
        # Lines end where the source has them, and a terminal may be narrower.
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(self.help or ""))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat a list flag before each of its values, as the parser wants it."""
        ctx.meta[BRIEF] = "-h" in args
        words: list[str] = []
        repeated: list[int] = []
        flag = ""
        for argument in args:
            if argument.startswith("-"):
                flag = argument
            elif flag in LIST_FLAGS and words[-1] != flag and ctx.allow_interspersed_args:
                repeated.append(len(words))
                words.append(flag)
            words.append(argument)
        # `invoke` names the command in an error of the parser.
        given, _, _ = ctx.invoke(self.make_parser(ctx).parse_args, list(words))
        for parameter in self.params:
            if parameter.required and not isinstance(given.get(parameter.name), str) and repeated:
                del words[repeated.pop()]
        return super().parse_args(ctx, words)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Explain all options; with -h, only the common ones if there are many, and name the
        others.
        """
        if not ctx.meta.get(BRIEF) or len(self.params) <= MANY:
            super().format_help(ctx, formatter)
            return
        brief = copy.copy(self)
        brief.params = []
        others: dict[str, list[str]] = {}
        for parameter in self.params:
            heading = getattr(parameter, "rich_help_panel", None)
            if heading is None:
                brief.params.append(parameter)
            else:
                others.setdefault(heading, []).append(parameter.opts[0])
        lines = [f"`{ctx.command_path} --help` explains all options. The others are:"]
        lines += [f"{heading}: {', '.join(names)}" for heading, names in others.items()]
        brief.epilog = "\n\n".join(lines)
        TyperCommand.format_help(brief, ctx, formatter)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
command = partial(app.command, cls=Command)
to_json = partial(json.dumps, indent=1, allow_nan=False)


def flag(panel: str | None, help: str, *names: str, **settings: Any) -> Any:
    """An option under a heading of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def print_versions(wanted: bool) -> None:
    if wanted:
        print("hasslefree", hasslefree.__version__)
        print("python", platform.python_version())
        for name in ("torch", "transformers"):
            print(name, version(name))
        raise typer.Exit


LIBRARIES = "Print the versions of hasslefree, Python, torch and transformers."
VERSIONS = flag(
    None, LIBRARIES, "--version", callback=print_versions, is_eager=True, show_default=False
)
# `exits.report` looks for --verbose.
VERBOSE = flag(
    None, "Show tracebacks too (default: off).", "--verbose", expose_value=False, show_default=False
)


@app.callback(
    epilog="Start with `hasslefree demo`; `hasslefree COMMAND --help` explains all options."
)
def root(
    versions: Annotated[bool, VERSIONS] = False, verbose: Annotated[bool, VERBOSE] = False
) -> None:
    """Make a language model smaller: quantised or sparse layers, plus low-rank ones."""
    console.quiet = QUIET_PROCESS
    console.stderr = False


def set_quiet(quiet: bool) -> bool:
    console.quiet = console.quiet or quiet
    return quiet


def leave_standard_output(as_json: bool) -> bool:
    """With --json, print bars, tables and remarks on standard error, and only JSON on standard
    output.
    """
    console.stderr = as_json
    return as_json


def check_output_file(context: typer.Context, output: Path | None) -> Path | None:
    """Raise an OutputError if --output cannot be written, or holds no results of this command."""
    if output is not None:
        from hasslefree.checkpoint.output import check_file

        check_file(output, f'{{\n "{FIRST_RESULTS[context.command.name or ""]}"'.encode())
    return output


# The first key in the results of each command.
FIRST_RESULTS = {
    "bench": "compressed",
    "evaluate": "model",
    "inspect": "folder",
    "plan": "blocks",
}
AS_JSON = (
    "Print the results as JSON on standard output, even if --quiet, and all else on standard error."
)
Folder = Annotated[
    Path, typer.Argument(metavar="OUT", help="A folder that `hasslefree compress` wrote.")
]
Device = Annotated[str | None, flag(None, "cpu, cuda, cuda:1, … (default: a GPU, if any).")]
Trust = Annotated[
    bool,
    flag(RUN, "Run Python code that comes with the model (default: off).", "--trust-remote-code"),
]
Dtype = Annotated[
    str, flag(RUN, "Dtype of the weights: auto (the checkpoint's), float32, bfloat16 or float16.")
]
Quiet = Annotated[
    bool,
    flag(OUTPUT, "Print errors only.", "--quiet", "-q", callback=set_quiet, show_default=False),
]
Json = Annotated[
    bool, flag(OUTPUT, AS_JSON, "--json", callback=leave_standard_output, show_default=False)
]
Output = Annotated[
    Path | None,
    flag(OUTPUT, "Write that JSON to FILE.", metavar="FILE", callback=check_output_file),
]
PUSH = "Upload the result to this name on the hub (default: none)."
PushTo = Annotated[str | None, flag(OUTPUT, PUSH, metavar="USER/NAME")]
Private = Annotated[
    bool, flag(OUTPUT, "Make a new repository private (default: off).", "--private")
]


def show(
    results: dict[str, Any], output: Path | None, as_json: bool, *tables: RenderableType
) -> None:
    """Print the results of a command as tables, or with --json as JSON, and write the JSON to the
    file of --output.
    """
    if not as_json:
        for table in tables:
            console.print(table)
    elif not QUIET_PROCESS:
        print(to_json(results))
    if output is not None:
        write_file(results, output)
        say(f"Written to {output}.")


def write_file(results: dict[str, Any], output: Path) -> None:
    from hasslefree.checkpoint.output import write_whole

    write_whole(output, to_json(results) + "\n")


def say(text: str, **settings: Any) -> None:
    """Print a text literally: rich could take parts of a path for markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, **settings)


def prepare_push(name: str | None, private: bool) -> None:
    """Check --push-to before the work. Under torchrun the first process uploads."""
    if private and name is None:
        raise OutputError("--private is for --push-to; name a repository, or leave it out")
    if name is not None and not QUIET_PROCESS:
        from hasslefree.checkpoint.hub import prepare_push

        prepare_push(name, private)


def push(folder: Path, name: str | None) -> None:
    """Upload a folder to the repository of --push-to, with huggingface_hub's progress bars."""
    if name is not None and not QUIET_PROCESS:
        from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]

        from hasslefree.checkpoint.hub import upload

        if not console.quiet:
            enable_progress_bars()
        say(f"Uploaded to {upload(folder, name)}.")
