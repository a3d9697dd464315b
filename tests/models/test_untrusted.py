"""Model folders come from strangers: they are data, and nothing in them is run."""

import json
import pickle
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import MODEL
from hasslefree.errors import CheckpointError, ModelError
from hasslefree.models.load import load_model, load_shapes
from hasslefree.models.tokenizer import encode, load_tokenizer, rendered
from hasslefree.packed.linear import compressed_layers
from tests.tiny_models import build, logits, segments

TOKENIZER = type("Tokenizer", (), {"save_pretrained": lambda self, folder: None})()


class Bomb:
    """What a pickle does when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def folder(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def assert_refused(folder, message, mark=None, **options):
    """By everything that opens a model."""
    for opened in (
        lambda: load_model(str(folder), device="cpu", **options),
        lambda: hasslefree.compress(
            str(folder), folder.parent / "out", Recipe(rank=2, method="eora"), segments=segments(), tokenizer=TOKENIZER,
            device="cpu", **options,
        ),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=message):
            opened()
    assert mark is None or not mark.exists(), "code of the folder was run"
    assert not (folder.parent / "out").exists()


def test_pickles_are_not_read(folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (folder / "model.safetensors").unlink()
    assert_refused(folder, r"weights in pickle files \(pytorch_model.bin\)", mark)


def test_safetensors_are_preferred_to_a_pickle_beside_them(folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    load_model(str(folder), device="cpu")
    assert not mark.exists()


CODE = """
open({mark!r}, "w")
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_is_run_on_request_alone(folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(folder, "own, which is not run; if you trust it, run it with trust_remote_code=True", mark)
    own_tokenizer = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own_tokenizer))
    for load in (load_shapes, load_tokenizer):
        with pytest.raises(ModelError, match="run it with trust_remote_code=True"):
            load(str(folder))
    assert not mark.exists()
    (folder / "tokenizer_config.json").unlink()
    (folder / "processing_own.py").write_text("# the code of a processor\n")
    report = hasslefree.compress(
        str(folder), tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments(), tokenizer=TOKENIZER,
        device="cpu", trust_remote_code=True,
    )  # fmt: skip
    assert mark.exists()
    assert (tmp_path / "out" / "processing_own.py").is_file()
    assert len(report.layers) == 14
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnModel"
    assert len(compressed_layers(loaded)) == 14
    with pytest.raises(ModelError, match="run it with trust_remote_code=True"):
        hasslefree.export(tmp_path / "out", tmp_path / "dense")
    hasslefree.export(tmp_path / "out", tmp_path / "dense", trust_remote_code=True)
    assert (tmp_path / "dense" / "processing_own.py").is_file()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", trust_remote_code=True)
    assert (logits(dense, segments()) - logits(loaded, segments())).abs().max() < 1e-5
    # The configuration is one of transformers', and the model alone has code.
    own_model = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config | own_model))
    with pytest.raises(ModelError, match="own, which is not run; if you trust it, run it with trust_remote_code=True"):
        load_shapes(str(folder))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}'])
def test_an_index_that_is_none(content, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert_refused(folder, "weight_map|contain a JSON object|cannot be read|gone.safetensors is missing")


def test_a_config_with_sizes_that_the_weights_do_not_have(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert_refused(
        folder, r"could not be loaded|gate_proj\.weight has the shape \[48, 32\] in the checkpoint, but \[64, 32\]"
    )
    assert torch.get_default_dtype() == torch.float32, "an error in the middle of loading leaves torch as it was"


TOKENIZERS = {
    "panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "panic while loading": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no unknown token": {"model": {"type": "WordLevel", "unk_token": "nope", "vocab": {"a": 1}}},
}


@pytest.mark.parametrize("fields", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_panics(fields, tmp_path):
    """Rust's panics are no `Exception` in Python."""
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(CheckpointError, match=rf"the tokenizer of '{tmp_path}/model' cannot be used: .*original model"):
        encode(load_tokenizer(str(tmp_path / "model")), "some words")


def test_a_chat_template_that_fails():
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.chat_template = "{{ raise_exception('no system prompt') }}"
    with pytest.raises(CheckpointError, match="cannot write messages of user: no system prompt; give other"):
        rendered(tokenizer, [{"role": "user", "content": "hi"}])
