"""The same examples and the same draws every time, however slow the machine: a red test is a change, not a draw."""

import shutil

import pytest
import torch
from huggingface_hub import constants, hf_api
from hypothesis import settings

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL
from tests.hub import Hub
from tests.tiny_models import build, segments

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws does not depend on the tests that its process ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_timed_products(monkeypatch):
    """What a run is expected to take is not measured: that takes longer than to compress a tiny model."""
    monkeypatch.setattr("hasslefree.planning.duration.product_rate", lambda device: 1e11)


@pytest.fixture(scope="session")
def compressed_once(tmp_path_factory):
    """A function of a recipe, a family and a dtype: the folder, compressed at the first call. Do not write to it;
    `compressed_copy` gives a folder that a test may change.
    """
    root, folders = tmp_path_factory.mktemp("compressed"), {}

    def compressed(recipe, family="llama", dtype=torch.float32):
        key = repr((recipe, family, dtype))
        if key not in folders:
            target = root / str(len(folders))
            hasslefree.compress(build(family, dtype), target, recipe, segments=segments())
            folders[key] = target
        return folders[key]

    return compressed


@pytest.fixture
def compressed_copy(compressed_once, tmp_path):
    """As `compressed_once`, but a copy at `tmp_path / "out"`."""
    return lambda *arguments: shutil.copytree(compressed_once(*arguments), tmp_path / "out")


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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the Hugging Face Hub, for which nobody is logged in. Requests that fail are repeated at once."""
    with Hub() as hub:
        # What huggingface_hub takes from HF_ENDPOINT, HF_HUB_DISABLE_XET, HF_HOME and HF_TOKEN when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield hub
