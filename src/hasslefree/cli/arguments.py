"""The arguments of the command line: list flags take several values, as in --tasks piqa rte."""

from typing import Any

# Flags that take several values. --prompt does not: it is repeated before each text.
LIST_FLAGS = ("--perplexity", "--tasks", "--leave-dense")


def spread_lists(arguments: list[str], commands: dict[str, Any]) -> list[str]:
    """Repeat a list flag before each of its values, as the parser of the command wants it.

    The values of a list end at the next flag. If the command would then lack an argument, such as
    the model in `evaluate --tasks piqa OUT`, the last values of the list are taken for it.

    Args:
        commands: the commands of click by their names. `run` is left alone: its arguments are those
            of another program.
    """
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name not in commands or name == "run":
        return arguments
    command = commands[name]
    switches = set()
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            switches.update(parameter.opts)
    missing = sum(
        parameter.param_type_name == "argument" and parameter.required
        for parameter in command.params
    )
    groups = _groups(arguments, switches)
    missing -= sum(len(values) for flag, values in groups if flag is None) - 1  # but the command
    spread: list[str] = []
    for flag, values in reversed(groups):
        positional = 0
        if flag in LIST_FLAGS and 0 < missing < len(values):
            positional = missing
            missing = 0
        spread = _spread(flag, values, positional) + spread
    return spread


def _groups(arguments: list[str], switches: set[str]) -> list[tuple[str | None, list[str]]]:
    """Flags with their values; None for values without a flag."""
    groups: list[tuple[str | None, list[str]]] = []
    most = 1  # values that the last group takes
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            groups.append((argument, []))
            if argument in LIST_FLAGS:
                most = len(arguments)
            else:
                most = int(argument not in switches and "=" not in argument)
        elif groups and len(groups[-1][1]) < most:
            groups[-1][1].append(argument)
        else:
            groups.append((None, [argument]))
            most = 1
    return groups


def _spread(
    flag: str | None,
    values: list[str],
    positional: int,
) -> list[str]:
    """A flag and its values as arguments; the last `positional` values stand without the flag."""
    if flag is None:
        return values
    if flag not in LIST_FLAGS or not values:
        return [flag, *values]
    spread: list[str] = []
    count = len(values) - positional
    for value in values[:count]:
        spread += [flag, value]
    return spread + values[count:]
