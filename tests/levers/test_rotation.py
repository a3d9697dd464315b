"""The model predicts the same in its new coordinates, and the patterns remove less there."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.core.patterns import Row, SemiStructured, Unstructured
from hasslefree.distributed import ALONE
from hasslefree.errors import ModelError, RecipeError
from hasslefree.levers import rotation as rotation_module
from hasslefree.levers.rotation import (
    Learning,
    Term,
    learned,
    of_head_inputs,
    of_head_outputs,
    of_inputs,
    of_outputs,
    rotate,
    some_columns,
    some_rows,
)
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.models.stream import HeadUse, random_rotation
from hasslefree.models.streaming import Weights
from hasslefree.models.walk import Walk
from hasslefree.recipe.plan import make_plan
from tests import oracles
from tests.listeners import by_layer
from tests.tiny_models import FAMILIES, ROTARY, gram_of, logits, segments, tensors_of

# Of each, what it has beside RMS norms and plain projections.
WHOLE = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},  # biases of q, k and v
    "qwen3": {},  # norms of queries and keys
    "mistral": {},
    "phi3": {},  # q, k and v in one matrix
    "gemma": {"head_dim": 8},  # gains 1 + w, and embeddings times a constant
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}

# Saves nothing.
TOKENIZER = type("Tokenizer", (), {"save_pretrained": lambda self, folder: None})()


def made(family, **changes):
    """A model whose gains and biases are not those of a fresh one, and whose head is its own."""
    settings = FAMILIES.get(family, ROTARY) | {"tie_word_embeddings": False} | changes
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def turn(model, tokens=None):
    """`rotate` on a model in memory, in a few steps."""
    tokens, blocks = segments() if tokens is None else tokens, find_blocks(model)
    plan = make_plan(blocks, Recipe(rank=0).resolve(with_text=False))
    walk = Walk.open(model, blocks, Weights(model, model.device), tokens[:1])
    return rotate(walk, plan, tokens, ALONE, Learning(steps=5))


@pytest.mark.parametrize("family", WHOLE)
def test_the_model_predicts_the_same_in_other_coordinates(family):
    """Oracle: the model as it was."""
    model = made(family, **WHOLE[family])
    before, weights = logits(model, segments()), {n: p.clone() for n, p in model.named_parameters()}
    found = turn(model)
    assert found["stream"] < 1
    assert (found["heads"] is None) == (family == "phi3")
    torch.testing.assert_close(logits(model, segments()), before, rtol=1e-5, atol=1e-6)
    matrices = [name for name, weight in weights.items() if weight.ndim == 2]
    assert not [name for name in matrices if torch.allclose(model.get_parameter(name), weights[name], rtol=1e-3)]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"tie_word_embeddings": True}, "tied to the embeddings"),
        ("gemma3_text", {}, "a norm after a layer"),
        ("cohere2", {}, "no linear layer takes its input from an RMSNorm"),
        ("opt", {}, "no linear layer takes its input from an RMSNorm"),
    ],
)
def test_heads_are_rotated_where_the_stream_cannot_be(family, changes, reason):
    """Oracle: the model as it was."""
    model = made(family, **changes)
    before, weights = logits(model, segments()), {n: p.clone() for n, p in model.named_parameters()}
    found = turn(model)
    assert found["stream"] is None
    assert found["heads"] < 1
    assert reason in found["left_out"][0]
    torch.testing.assert_close(logits(model, segments()), before, rtol=1e-5, atol=1e-6)
    changed = {n.split(".")[-2] for n, w in weights.items() if not torch.equal(model.get_parameter(n), w)}
    assert changed in ({"v_proj", "o_proj"}, {"v_proj", "out_proj"})


def test_a_model_that_takes_no_rotation_in_is_an_error_with_every_reason():
    with pytest.raises(ModelError) as error:
        turn(made("gpt_neox"))
    assert "the residual stream cannot be rotated: in gpt_neox.layers.0" in str(error.value)
    assert "the attention heads of gpt_neox.layers.0 cannot be rotated" in str(error.value)
    assert "Leave out rotate=True" in str(error.value)


def test_rotation_without_anything_to_remove_is_refused():
    with pytest.raises(RecipeError, match="pattern dense removes nothing"):
        Recipe(method="joint-grid", rank=2, rotate=True).resolve(with_text=False)


def removed_by_definition(weight, h, pattern):
    """Σ over removed (i, j) of W²_ij / [H⁻¹]_jj, in float64."""
    importance = weight.double().square() / torch.linalg.inv(h.double()).diagonal()
    return (importance * ~pattern.mask(importance)).sum().item()


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), Row(5)], ids=str)
def test_what_a_rotation_leaves_to_remove_is_what_the_rotated_problem_has(pattern):
    """Oracle: the rotated W and H themselves, in float64."""
    weight, h = oracles.problem(24, 16, dtype=torch.float64)
    inverse, heads = torch.linalg.inv(h), HeadUse("v", "o", size=4, count=2)
    q, out = random_rotation((16, 16), weight), random_rotation((24, 24), weight)
    apart = random_rotation((2, 4, 4), weight)
    # Two query heads share a key head.
    inside = torch.block_diag(*apart.repeat_interleave(2, dim=0))
    outside, values = torch.block_diag(*apart), weight[:8]
    for importance, rotation, turned, gram in (
        (of_inputs(weight, inverse), q, weight @ q, q.T @ h @ q),
        (of_outputs(weight, inverse.diagonal()), out, out.T @ weight, h),
        (of_head_inputs(weight, inverse, heads), apart, weight @ inside, inside.T @ h @ inside),
        (of_head_outputs(values, inverse.diagonal(), heads), apart, outside.T @ values, h),
    ):
        found = Term(importance, pattern).removed(rotation).item()
        assert found == pytest.approx(removed_by_definition(turned, gram, pattern), rel=1e-9)


def test_a_rotation_is_found_that_a_pattern_removes_less_after():
    """Oracle: W is 2:4 sparse after one small rotation, and H is the identity."""
    generator = torch.Generator().manual_seed(0)
    sparse = torch.randn(64, 16, generator=generator)
    sparse *= SemiStructured(2, 4).mask(sparse.abs())
    skew = 0.2 * torch.randn(16, 16, generator=generator)
    weight = sparse @ torch.matrix_exp(skew - skew.T)
    term = Term(of_inputs(weight, torch.eye(16)), SemiStructured(2, 4))
    rotation, share = learned([term], torch.eye(16), Learning())
    before, after = (removed_by_definition(w, torch.eye(16), term.pattern) for w in (weight, weight @ rotation))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(16), rtol=0, atol=1e-5)
    assert share == pytest.approx(after / before, rel=1e-3)
    assert share < 0.5


def test_the_share_that_is_reported_is_that_of_the_rotated_model(monkeypatch):
    """Oracle: the weights and Grams of the model as it was, without its gains, and as it is then."""
    monkeypatch.setattr(rotation_module, "DAMPING", 0.0)
    monkeypatch.setattr(rotation_module.Seen, "turn_heads", lambda *args: None)
    model, tokens = made("llama").double(), segments(8)

    def removed():
        found = {}
        for index, block in enumerate(model.model.layers):
            for name, site in find_sites(block).items():
                norm = "input_layernorm" if name[-6] in "qkv" else "post_attention_layernorm"
                reads = not name.endswith(("o_proj", "down_proj"))
                gain = getattr(block, norm).weight.detach() if reads else torch.ones(1, dtype=torch.float64)
                gram = gram_of(model, f"model.layers.{index}.{name}", tokens).matrix.double()
                found[index, name] = removed_by_definition(
                    site.weight() * gain, gram / torch.outer(gain, gain), SemiStructured(2, 4)
                )
        return found

    before = removed()
    found = turn(model, tokens=tokens)
    after = removed()
    shares = [after[key] / before[key] for key in before]
    assert found["stream"] == pytest.approx(sum(shares) / len(shares), rel=1e-4)


def test_a_step_too_far_is_not_taken():
    weight, h = oracles.problem(12, 8)
    term = Term(of_inputs(weight, torch.linalg.inv(h)), SemiStructured(2, 4))
    rotation, share = learned([term], torch.eye(8), Learning(steps=4, learning_rate=0.7))
    after, before = (term.removed(each).item() for each in (rotation, torch.eye(8)))
    assert share == pytest.approx(after / before, rel=1e-4)
    assert share <= 1


def test_no_rotation_is_better_than_a_bad_one():
    """Where nothing can be gained, the identity comes back."""
    weight = torch.eye(8).repeat(2, 1)
    term = Term(of_inputs(weight, torch.eye(8)), SemiStructured(2, 4))
    rotation, share = learned([term], torch.eye(8), Learning(steps=3))
    torch.testing.assert_close(rotation, torch.eye(8))
    assert share <= 1


def test_some_of_a_matrix_keeps_the_groups_of_the_pattern(monkeypatch):
    monkeypatch.setattr(rotation_module, "ROWS", 8)
    weight = torch.arange(20.0)[:, None].expand(20, 24)
    assert some_rows(weight, SemiStructured(2, 4))[:, 0].tolist() == list(range(0, 20, 3))
    columns = some_columns(24, SemiStructured(2, 4))
    assert columns.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert some_columns(24, Unstructured(9)).tolist() == list(range(24))
    assert len(some_rows(weight, Unstructured(9))) == 20


def test_a_streamed_model_is_rotated_as_one_in_memory(tmp_path):
    """Oracle: the same compression of the same model in memory, and what is written of it."""
    made("llama").save_pretrained(tmp_path / "dense")
    recipe = Recipe(pattern="2:4", rank=2, effort="fast", rotate=True)
    tokens = segments()
    streamed = hasslefree.compress(tmp_path / "dense", tmp_path / "a", recipe, segments=tokens, tokenizer=TOKENIZER)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    loaded = hasslefree.compress(model, tmp_path / "b", recipe, segments=tokens)
    assert streamed.rotation == loaded.rotation
    one, other = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    dense = tensors_of(tmp_path / "dense")
    assert not torch.allclose(one["model.embed_tokens.weight"], dense["model.embed_tokens.weight"], atol=1e-3)
    assert torch.equal(one["model.norm.weight"], torch.ones(32))
    content = json.loads((tmp_path / "a" / "compression.json").read_text())
    assert 0 < content["rotation"]["stream"] < 1
    assert "were rotated" in (tmp_path / "a" / "README.md").read_text()


def test_a_compression_of_a_rotated_model_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """Oracle: the same without a stop."""
    made("llama").save_pretrained(tmp_path / "dense")
    recipe, tokens = Recipe(pattern="2:4", rank=2, effort="fast", rotate=True), segments()
    run = partial(hasslefree.compress, tmp_path / "dense", recipe=recipe, segments=tokens, tokenizer=TOKENIZER)
    run(tmp_path / "whole")

    def stop(report, done, total):
        if done == 8:  # the first layer of the second block
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", progress=by_layer(stop))
    run(tmp_path / "cut", resume=True)
    one, other = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut")
    assert all(torch.equal(one[name], other[name]) for name in one | other)
