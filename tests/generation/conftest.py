"""The demo's model, compressed in a second, beside a tokenizer with a chat template."""

import shutil

import pytest

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """A compressed folder without a chat template."""
    folder = tmp_path_factory.mktemp("generation") / "out"
    recipe = Recipe(rank=2, method="eora", calibration=str(CALIBRATION), samples=2, seqlen=32, dtype="float32")
    hasslefree.compress(str(MODEL), folder, recipe, device="cpu")
    return folder


@pytest.fixture(scope="session")
def with_template(out, tmp_path_factory):
    """The same with one."""
    folder = tmp_path_factory.mktemp("template") / "out"
    shutil.copytree(out, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
