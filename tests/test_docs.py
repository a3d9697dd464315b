"""README.md and docs/: links lead to files and headings, commands parse, the index and the reference are complete."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer.main

import hasslefree
from hasslefree.cli.common import app

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
# [text](target), ![text](target), and the definition of a reference: [text]: target.
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)


def prose(page: Path) -> str:
    """A page without blocks of code, and without code in lines."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`(?:[^`\n]|\n(?!\n))*`", "", re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for inline, reference in LINK.findall(prose(page)):
        target = inline or reference
        if re.match(r"[a-z]+://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert not wrong


def test_the_badge_shows_the_version():
    assert f"badge/version-{hasslefree.__version__}-" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in DOCS:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or f"]({name})" in index, name


def test_the_reference_lists_every_public_name():
    """Oracle: __init__.pyi, which Python itself reads."""
    api = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto(?:class|function):: hasslefree\.(\w+)$", api, re.MULTILINE)
    assert {*listed, "HasslefreeError"} == {*hasslefree.__all__} - {"__version__"}


def command_lines(page: Path) -> list[list[str]]:
    """The arguments of every call of hasslefree in a block of code, after `python -m` and in a pipe too."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|yaml|sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^ {4,}.*\n)+", text, re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    called = [re.search(r"(?:^\s*|\| |-m )hasslefree (?=[a-z])(.*)", line) for line in lines]
    return [shlex.split(call[1], comments=True) for call in called if call]


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.stem)
def test_commands_of_the_pages_parse(page):
    """Oracle: the application's own parser, and the recipe's own checks."""
    fields = {field.name for field in dataclasses.fields(hasslefree.Recipe)}
    commands = typer.main.get_command(app).commands
    for line in command_lines(page):
        name, *arguments = line
        assert name in commands, f"{page.name}: there is no command {name}"
        given = commands[name].make_context(name, arguments).params
        if "recipe" in given and given["recipe"] is None:
            values = {field: value for field, value in given.items() if field in fields and value not in (None, [], ())}
            hasslefree.Recipe(**values).resolve(with_text=False)
