"""Models that cannot be compressed are refused before anything is computed."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import BudgetError, ModelError, NonFiniteError, PatternError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.extra_inputs import same
from hasslefree.models.load import load_config, load_model
from hasslefree.models.probe import sees_later_tokens
from hasslefree.models.tokenizer import load_tokenizer
from tests.hub import Repository
from tests.tiny_models import NO_TOKENIZER, build, segments

RECIPE = Recipe(rank=2, method="eora")


def assert_refused(model, recipe, tmp_path, kind, message):
    with pytest.raises(kind, match=message):
        hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    assert not (tmp_path / "out").exists()


def test_a_model_that_looks_ahead_is_no_decoder(tmp_path):
    config = AutoConfig.for_model(
        "bert", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    assert_refused(AutoModelForCausalLM.from_config(config), RECIPE, tmp_path, ModelError, "is not a decoder")


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj", "model.layers.0.input_layernorm", "model.norm", "model.embed_tokens"]
)
def test_a_weight_with_nan_or_inf_is_named(name, value, tmp_path):
    """Of a compressed layer, or one that is copied."""
    model = build("llama")
    model.get_parameter(f"{name}.weight").data.view(-1)[5] = value
    assert_refused(model, RECIPE, tmp_path, NonFiniteError, f"the weight {name}.weight contains NaN or Inf")


def test_a_weight_that_float16_does_not_hold_is_no_damage(tmp_path):
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = 70_000.0
    model.save_pretrained(tmp_path / "model")
    message = r"layers\.1\.mlp\.up_proj\.weight contains NaN or Inf in torch.float16; use dtype='bfloat16', or download"
    with pytest.raises(NonFiniteError, match=message):
        hasslefree.compress(
            tmp_path / "model", tmp_path / "out", Recipe(rank=2, method="eora", dtype="float16"), segments=segments(),
            tokenizer=NO_TOKENIZER, device="cpu",
        )  # fmt: skip


def test_infinite_activations_are_named(tmp_path):
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[4] = 3e38
    message = r"the output of model\.layers\.1 contains NaN or Inf; try another dtype"
    assert_refused(model, RECIPE, tmp_path, NonFiniteError, message)


def test_the_layer_that_does_not_fit_is_named(tmp_path):
    model = build("llama", intermediate_size=50)
    assert_refused(
        model, RECIPE, tmp_path, PatternError, r"50 inputs, no multiple of 4.*\(model\.layers\.0\.mlp\.down_proj\)"
    )
    assert_refused(
        build("llama"), Recipe(rank=20), tmp_path, BudgetError, r"rank 20 is larger.*16×32.*self_attn\.k_proj"
    )


def test_a_compressed_model_is_not_compressed_again(tmp_path):
    model = build("llama")
    hasslefree.compress(model, tmp_path / "one", RECIPE, segments=segments())
    with pytest.raises(ModelError, match="already"):
        hasslefree.compress(
            AutoModelForCausalLM.from_pretrained(tmp_path / "one"), tmp_path / "two", RECIPE, segments=segments()
        )


@pytest.fixture
def adapter(tmp_path):
    """A model with a LoRA of PEFT, whose folder is tmp_path / "adapter"."""
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "adapter")
    return made


def test_an_adapter_within_a_model_is_to_be_merged_first(adapter, tmp_path):
    loaded = build("llama")
    loaded.load_adapter(str(tmp_path / "adapter"))
    message = r"layers\.0\.self_attn\.q_proj is a layer with an adapter \(PEFT's Linear\); merge it first"
    for model in (loaded, adapter.base_model.model):
        assert_refused(model, RECIPE, tmp_path, ModelError, message)
    assert len(hasslefree.compress(adapter.merge_and_unload(), tmp_path / "out", RECIPE, segments=segments()).layers)


@pytest.mark.parametrize("load", [load_config, load_model, load_tokenizer])
@pytest.mark.parametrize("with_model", [True, False])
def test_the_folder_of_an_adapter_is_no_model(load, with_model, adapter, tmp_path):
    folder = tmp_path / "adapter"
    if with_model:
        build("llama").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"adapter has an adapter, such as a LoRA .*\.merge_and_unload\(\)"):
        load(str(folder))


def test_an_adapter_on_the_hub_is_no_model(hub):
    hub.repositories["ada/lora"] = Repository({"adapter_config.json": b"{}"})
    with pytest.raises(ModelError, match="ada/lora has an adapter, such as a LoRA"):
        load_config("ada/lora")


def test_no_blocks():
    with pytest.raises(ModelError, match="no list of blocks"):
        find_blocks(torch.nn.Linear(3, 3))


class Talkative(torch.nn.Module):
    """A block that is handed something that depends on the text beside the hidden states."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, extra=None, **rest):
        return self.inner(hidden, **rest)


@pytest.mark.parametrize("summed", [1, (0, 1)])
def test_blocks_that_are_told_the_text_are_refused(summed, tmp_path):
    """Stored arguments of one segment would be given to all."""
    model = build("llama")
    tokens = {}
    model.model.register_forward_pre_hook(
        lambda m, args, kwargs: tokens.update(ids=kwargs["input_ids"].float().sum(summed)), with_kwargs=True
    )
    for index, block in enumerate(model.model.layers):
        wrapped = Talkative(block)
        wrapped.register_forward_pre_hook(
            lambda m, args, kwargs: (args, kwargs | {"extra": tokens["ids"]}), with_kwargs=True, prepend=True
        )
        model.model.layers[index] = wrapped
    with pytest.raises(ModelError, match=r"argument 'extra' of model\.layers\.0 depends on the text"):
        hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())


def test_a_layer_that_no_token_reaches_is_named(tmp_path):
    model = build("llama")
    model.model.layers[1].mlp.unused = torch.nn.Linear(32, 32)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not run model\.layers\.1\.mlp\.unused on text"):
        hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    recipe = Recipe(rank=2, method="eora", leave_dense=("*.unused",))
    assert len(hasslefree.compress(model, tmp_path / "out", recipe, segments=segments()).layers) == 14


def test_rounding_is_no_dependence_on_the_text():
    """Threads may round sines and cosines differently from one call to the next; masks and positions are exact."""
    angles = torch.linspace(0, 100, 64)
    assert same(angles.cos(), angles.cos() * (1 + 1e-7))
    assert not same(angles.cos(), angles.sin())
    assert not same(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not same(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize(("dtype", "rounding", "more"), [(torch.float32, 5e-5, 2e-4), (torch.bfloat16, 0.03, 0.04)])
def test_rounding_of_an_earlier_output_is_no_sign_of_an_encoder(dtype, rounding, more):
    """The largest output is 8; float32 may differ by 1e-4 of it, bfloat16 by four of its roundings of 1/128."""
    before = torch.linspace(-8, 8, 65)
    assert not sees_later_tokens(before, before + 8 * rounding, dtype)
    assert sees_later_tokens(before, before + 8 * more, dtype)
