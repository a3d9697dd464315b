"""The same examples and the same draws every time, however slow the machine: a red test is a change, not a draw."""

import shutil

import pytest
import torch
from hypothesis import settings

import hasslefree
from hasslefree import Recipe
from tests.tiny_models import build, segments

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws does not depend on the tests that its process ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def compressed_once(tmp_path_factory):
    """A function of a family, a dtype and fields of a recipe: the folder, compressed at the first call. Do not write to
    it; `compressed_copy` gives a folder that a test may change.
    """
    root, folders = tmp_path_factory.mktemp("compressed"), {}

    def compressed(family="llama", dtype=torch.float32, **recipe):
        key = repr((family, dtype, sorted(recipe.items())))
        if key not in folders:
            target = root / str(len(folders))
            hasslefree.compress(build(family, dtype), target, Recipe(**recipe), segments=segments())
            folders[key] = target
        return folders[key]

    return compressed


@pytest.fixture
def compressed_copy(compressed_once, tmp_path):
    """As `compressed_once`, but a copy at `tmp_path / "out"`."""
    return lambda *args, **recipe: shutil.copytree(compressed_once(*args, **recipe), tmp_path / "out")
