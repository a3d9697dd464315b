"""Blocks that are given what depends on the text beside the hidden states, and other shapes of those."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.allocate.sensitivity import sensitivities
from hasslefree.distributed import ALONE
from hasslefree.errors import ModelError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calibrate import run_block, with_batching
from hasslefree.models.extra_inputs import Column
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan
from tests.listeners import by_layer
from tests.tiny_models import BESIDE, NO_TOKENIZER, build, logits, segments, tensors_of

beside = pytest.mark.parametrize("family", BESIDE)


@beside
def test_block_by_block_is_the_whole_model_on_other_texts(family):
    """Oracle: what leaves the last block in an ordinary forward pass of each text."""
    model, tokens = build(family), segments(seed=1)
    blocks = find_blocks(model)
    walk = Walk.open(model, blocks, Weights(model, model.device), segments(1))
    calls = walk.calls
    assert calls[0].extra.columns
    hidden = walk.entering(tokens)
    for block, call in zip(blocks.modules, calls, strict=True):
        assert with_batching(block, call, hidden).batched
        run_block(block, call, hidden)
    expected = []
    handle = blocks.modules[-1].register_forward_hook(
        lambda m, args, output: expected.append(output[0] if isinstance(output, tuple) else output)
    )
    for row in tokens:
        logits(model, row[None])
    handle.remove()
    rows = torch.cat([calls[-1].as_rows(each) for each in expected])
    torch.testing.assert_close(calls[-1].hidden(hidden[:]), rows, rtol=1e-4, atol=1e-5)


@beside
def test_every_lever_takes_it_and_it_loads(family, tmp_path):
    model, tokens = build(family), segments()
    recipe = Recipe(rank=2, rounds=2, effort="best", match_predictions=64)
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=tokens)
    assert all(0 <= layer.relative_error < 1 for layer in report.layers)
    assert report.predictions["after"] <= report.predictions["before"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded, tokens), logits(model, tokens))
    generated = loaded.generate(tokens[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape == (1, tokens.shape[1] + 3)


def test_streamed_and_resumed_it_is_the_same(tmp_path):
    """Oracle: the model in memory."""
    build("gemma4_text").save_pretrained(tmp_path / "dense")
    recipe = Recipe(rank=2, rounds=2, effort="fast")
    hasslefree.compress(build("gemma4_text"), tmp_path / "one", recipe, segments=segments())
    done = []

    def stop(report, count, total):
        done.append(count)
        if count == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(tmp_path / "dense", tmp_path / "two", recipe, segments=segments(), tokenizer=NO_TOKENIZER,
                            progress=by_layer(stop))  # fmt: skip
    hasslefree.compress(tmp_path / "dense", tmp_path / "two", recipe, segments=segments(), tokenizer=NO_TOKENIZER,
                        resume=True)  # fmt: skip
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_layer_that_only_chooses_counts_as_the_others_of_its_block(tmp_path):
    """The indexer of GLM-5 has no gradient: its output is compared, and the positions are numbers."""
    model, tokens = build("glm_moe_dsa"), segments()
    resolved = Recipe(rank=2).resolve(with_text=False)
    blocks = find_blocks(model)
    plan = make_plan(select(blocks, resolved), resolved)
    walk = Walk.open(model, blocks, Weights(model, model.device), tokens[:1])

    def pruned(layer, its_plan):
        return None, layer.divergence(layer.changed(its_plan.kept, None))

    measured = sensitivities(walk, plan, tokens, ALONE, pruned)
    for layers in measured:
        one = {name: sensitivity for name, (_, sensitivity) in layers.items()}
        chosen = [name for name in one if ".indexer." in name]
        rest = [sensitivity for name, sensitivity in one.items() if name not in chosen]
        assert all(sensitivity > 0 for sensitivity in rest)
        assert all(one[name] == pytest.approx(sum(rest) / len(rest)) for name in chosen)
    assert chosen


@pytest.mark.parametrize(
    ("family", "name"),
    [("mamba", ".mixer.dt_proj"), ("falcon_mamba", ".mixer.dt_proj"), ("zamba2", ".shared_transformer.")],
)
def test_what_kernels_read_and_blocks_share_stays_dense_and_is_stored_once(family, name, tmp_path):
    """A compressed projection of time steps has no weight to be read, and Zamba's attention would be compressed in each
    block that has it."""
    model = build(family)
    report = hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    assert any(name in full for full in report.dense)
    assert not any(name in layer.name for layer in report.layers)
    stored = [
        full for full in tensors_of(tmp_path / "out") if full.endswith("shared_transformer.self_attn.q_proj.weight")
    ]
    assert len(stored) == (family == "zamba2")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, segments()), logits(model, segments()))


@pytest.mark.parametrize(("shape", "axis"), [((16,), 1), ((16, 3), 1), ((2, 16, 3), 2), ((2, 3, 16), 3)])
def test_a_column_is_the_tensor_again(shape, axis):
    for dtype in (torch.float32, torch.int64, torch.bool):
        value = (torch.randn(1, *shape) * 10).to(dtype)
        column = Column.of(value, 16, 5)
        assert column.axis == axis
        rows = column.rows(value).to(torch.float32)
        assert rows.shape == (1, 16, value.numel() // 16)
        found = column.value(torch.cat([torch.zeros(1, 16, 5), rows, torch.ones(1, 16, 2)], -1))
        assert torch.equal(found, value)
        assert found.dtype == dtype


def test_a_model_that_changes_hidden_states_between_its_blocks_is_refused(tmp_path):
    model = build("llama")
    model.model.layers[1].register_forward_pre_hook(
        lambda m, args, kwargs: ((2 * args[0], *args[1:]), kwargs), with_kwargs=True, prepend=True
    )
    with pytest.raises(ModelError, match=r"changes the hidden states between its blocks \(before model\.layers\.1\)"):
        hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
