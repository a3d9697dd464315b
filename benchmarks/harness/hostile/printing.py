"""What a folder or a user names, as it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.hostile.damage import (
    ESCAPE,
    INDEX,
    edited,
    file,
    moved,
    renamed_everywhere,
    with_fields,
)
from harness.hostile.fault import (
    EITHER,
    TYPED_WRONG,
    USUAL,
    WORKS_OR_NOT,
    Fault,
    usual,
)


def printed() -> Iterator[Fault]:
    kind = "control characters"
    names = {
        "an escape sequence": ESCAPE,
        "a bidirectional override": "\u202egnp.",
        "C1": "\x9b31m",
        "a line feed": "a\nb",
        "a backspace": "proj\b\b\b",
    }
    for what, name in names.items():
        hostile = renamed_everywhere("down_proj", f"down{name}_proj")
        yield Fault(
            kind,
            f"{what} in names of layers",
            usual("inspect", "export", "evaluate", "report", "generate", "compress", "plan"),
            hostile,
            exits=WORKS_OR_NOT,
        )
        quoted = f"'{name}'"
        yield Fault(
            kind,
            f"{what} in --leave-dense",
            usual("compress", "plan", more=f"--leave-dense {quoted}"),
            exits=WORKS_OR_NOT,
        )
        yield Fault(
            kind, f"{what} in --output", usual("inspect", "plan", more=f"--output {quoted}"), exits=WORKS_OR_NOT
        )
        yield Fault(
            kind,
            f"{what} in OUT",
            {"compress": USUAL["compress"].replace("OUT", quoted), "export": f"export C {quoted} --to dense"},
            exits=WORKS_OR_NOT,
        )
        gone_model = {
            command: USUAL[command].replace("C", quoted, 1)
            for command in ("inspect", "evaluate", "generate", "export", "report")
        }
        yield Fault(
            kind, f"{what} in the name of no model", gone_model | {"plan": f"plan {quoted} --rank 2"}, exits=EITHER
        )
        yield Fault(
            kind,
            f"{what} in the model's folder",
            {
                "evaluate": USUAL["evaluate"].replace("C", quoted),
                "report": f"report {quoted} --output page.html",
                "inspect": f"inspect {quoted}",
            },
            moved("C", f"{name}"),
            exits=WORKS_OR_NOT,
            may_change=("C",),
        )
        yield Fault(kind, f"{what} in an unknown command", {"methods": f"me{quoted}"}, exits=TYPED_WRONG)
        yield Fault(kind, f"{what} in an unknown name", {"methods": f"methods {quoted}"}, exits=TYPED_WRONG)
        yield Fault(
            kind,
            f"{what} in an index",
            usual("inspect", "evaluate", "export"),
            edited(
                f"C/{INDEX}", lambda content, name=name: content["weight_map"].update({name: name + ".safetensors"})
            ),
            exits=WORKS_OR_NOT,
        )
        yield Fault(
            kind,
            f"{what} in results",
            {"report": "report C dense.json --output page.html"},
            edited("dense.json", lambda content, name=name: content.update(model=name)),
            exits=WORKS_OR_NOT,
        )
        yield Fault(
            kind,
            f"{what} in the record's model",
            usual("inspect", "report", "export", "generate"),
            with_fields("C/compression.json", model=name),
            exits=WORKS_OR_NOT,
        )
        yield Fault(
            kind, f"{what} in a recipe", {"plan": "{usual} --recipe r.yaml"}, with_recipe(name), exits=WORKS_OR_NOT
        )
        yield Fault(
            kind,
            f"{what} in a prompt",
            {
                "generate": f"generate C {quoted} --dense none --max-new-tokens 2",
                "report": f"{{usual}} --prompt {quoted} --dense none --max-new-tokens 2",
            },
            exits=WORKS_OR_NOT,
        )
        yield Fault(kind, f"{what} in a conversation", usual("chat"), stdin=f"{name}\n".encode(), exits=WORKS_OR_NOT)

        def speaks(content: dict[str, Any], name: str = name) -> None:
            content["decoder"] = {
                "type": "Sequence",
                "decoders": [content["decoder"], {"type": "Replace", "pattern": {"Regex": "."}, "content": name}],
            }

        yield Fault(
            kind,
            f"{what} in generated text",
            usual("generate", "chat") | {"report": "{usual} --prompt hi --dense none --max-new-tokens 2"},
            edited("{model}/tokenizer.json", speaks),
            exits=WORKS_OR_NOT,
        )


def with_recipe(name: str) -> Any:
    import yaml

    return file("r.yaml", yaml.safe_dump({name: name, "rank": name}, allow_unicode=False))
