"""What vLLM reads of config.json. It is skipped without vLLM; benchmarks/vllm_tokens.py runs whole models."""

import pytest

from hasslefree.errors import CheckpointError, ServeError
from tests.serve.layers import layer_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")


def config_of(version=2, prefix="model.layers.0.mlp"):
    entry = layer_of("2:4", (16, 64), 2).entry
    modules = {f"{prefix}.{name}": entry.to_dict() for name in ("up_proj", "gate")}
    return {"quant_method": "hasslefree", "version": version, "layout": "packed", "modules": modules}


@pytest.fixture
def config_class():
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return get_quantization_config("hasslefree")


def test_vllm_finds_the_plugin_by_its_entry_point(config_class):
    config = config_class.from_config(config_of())
    assert config.get_name() == "hasslefree"
    assert set(config.entries) == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate"}


def test_layers_are_renamed_as_vllm_does(config_class):
    from vllm.model_executor.models.utils import WeightsMapper

    config = config_class.from_config(config_of())
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert "language_model.model.layers.0.mlp.up_proj" in config.entries


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 3}, CheckpointError, "format version 3.*update hasslefree"),
        ({"prefix": "model.layers.0.mlp.experts.0"}, ServeError, "mixture of experts.*--to dense"),
    ],
)
def test_what_cannot_be_served_is_refused(config_class, change, error, message):
    with pytest.raises(error, match=message):
        config_class.from_config(config_of(**change))


def test_another_version_is_refused_when_a_folder_is_served(config_class, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    with pytest.raises(ServeError, match=r"vLLM 0\.40\.0 is installed: update hasslefree"):
        config_class.from_config(config_of())


def test_a_gpu_without_the_instructions_is_refused(config_class, monkeypatch):
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "device_name", "cuda")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(7, 5))
    with pytest.raises(ServeError, match=r"compute capability 8\.0, and this one has 7\.5"):
        config_class.from_config(config_of())
