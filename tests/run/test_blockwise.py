"""Two streams: targets that lead to the dense model, and blocks that are matched to it; against slow references."""

import dataclasses
import json

import pytest
import torch

import hasslefree
from hasslefree import Gram, Recipe, SparseLowRankLinear
from hasslefree.errors import RecipeError
from hasslefree.levers.targets import corrected, drift_correction
from hasslefree.models.moments import gather
from hasslefree.models.sites import replace_module
from tests.listeners import by_layer
from tests.run.test_compress import ORDER
from tests.tiny_models import build, logits, segments, tensors_of

RECIPE = Recipe(rank=2, method="eora")


def rows_of(model, name, tokens):
    """The inputs of a layer, (tokens, in), in an ordinary forward pass of the whole model."""
    found = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda m, args: found.append(args[0].flatten(0, 1)))
    logits(model, tokens)
    handle.remove()
    return torch.cat(found)


def reference(model, tokens, share):
    """For every layer in order, its inputs in both whole models, its target, and its S and L."""
    dense, errors = build("llama"), {}
    for block in range(2):
        for group in ORDER:
            for leaf in group:
                name = f"model.layers.{block}.{leaf}"
                # The layers of a group read one input: each may be replaced before the next one is looked at.
                x, wanted = rows_of(model, name, tokens), rows_of(dense, name, tokens)
                gram, drift = Gram.from_activations(x), x.T @ (wanted - x) / len(x)
                weight = model.get_submodule(name).weight.detach()
                damping = max(0.01, 0.3 * len(drift) / len(x))
                target = corrected(weight, drift_correction(gram, drift, share, damping))
                result = hasslefree.decompose(target, gram, "2:4", 2, method="eora")
                replace_module(model, name, SparseLowRankLinear.from_decomposition(result, None, "2:4"))
                errors[name] = result.relative_error
    return errors


@pytest.mark.parametrize("sequential", ["layer", "block"])
def test_targets_lead_to_the_dense_model(sequential, tmp_path):
    tokens = segments(6)
    slow, fast = build("llama"), build("llama")
    expected = reference(slow, tokens, 0.5)
    recipe = dataclasses.replace(RECIPE, dense_target=0.5, sequential=sequential)
    report = hasslefree.compress(fast, tmp_path / "out", recipe, segments=tokens)
    found = {layer.name: layer.relative_error for layer in report.layers}
    if sequential == "layer":
        assert found == pytest.approx(expected, rel=5e-3)
        torch.testing.assert_close(logits(fast, tokens), logits(slow, tokens), rtol=5e-3, atol=1e-4)
    else:  # within a block the inputs are those of the dense layers before
        first = "model.layers.0.self_attn.q_proj"
        assert found[first] == pytest.approx(expected[first], rel=5e-3)
        assert found != pytest.approx(expected, rel=5e-3)


def test_without_drift_there_is_nothing_to_lead_to(tmp_path):
    """Oracle: no targets. In the first group of the first block both streams are the same."""
    plain = hasslefree.compress(build("llama"), tmp_path / "a", RECIPE, segments=segments())
    aimed = dataclasses.replace(RECIPE, dense_target=1.0)
    report = hasslefree.compress(build("llama"), tmp_path / "b", aimed, segments=segments())
    errors = [[layer.relative_error for layer in found.layers] for found in (plain, report)]
    assert errors[0][:3] == errors[1][:3]
    assert all(one != other for one, other in zip(errors[0][3:], errors[1][3:], strict=True))


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt", "phi3", "mixtral"])
def test_one_pass_gives_what_a_pass_for_each_group_gives(family, share, tmp_path, monkeypatch):
    """Oracle: the other way, which runs where memory is short."""
    recipe, found = dataclasses.replace(RECIPE, dense_target=share), []
    for at_once in (True, False):
        monkeypatch.setattr("hasslefree.run.blockwise.in_one_pass", lambda *how, at_once=at_once: at_once)
        report = hasslefree.compress(build(family), tmp_path / f"{at_once}", recipe, segments=segments(6))
        found.append({layer.name: layer.relative_error for layer in report.layers})
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize(("room", "passes"), [(10**9, 4), (2 * 12 * 32**2, 8), (0, 10)])
def test_experts_are_gathered_together_as_far_as_there_is_room(room, passes, tmp_path, monkeypatch):
    """Oracle: one group of layers at a time. Four experts: q, k, v; o; gates and ups; downs, which are wider."""
    found, gathered = [], []

    def watched(block, prefix, call, hidden, groups, *rest):
        gathered.append((prefix, len(groups)))
        return gather(block, prefix, call, hidden, groups, *rest)

    monkeypatch.setattr("hasslefree.run.blockwise.in_one_pass", lambda *how: False)
    monkeypatch.setattr("hasslefree.run.blockwise.gather", watched)
    for each in (0, room):
        gathered.clear()
        monkeypatch.setattr("hasslefree.run.blockwise.room_for_sums", lambda device, each=each: each)
        model = build("mixtral")
        hasslefree.compress(model, tmp_path / f"{len(found)}", RECIPE, segments=segments(6))
        found.append(logits(model, segments()))
    assert sum(prefix == "model.layers.1" for prefix, _ in gathered) == passes
    assert sum(count for prefix, count in gathered if prefix == "model.layers.1") == 10
    assert torch.equal(found[0], found[1])


def test_blocks_that_do_not_take_several_segments_get_one_at_a_time(tmp_path):
    """Oracle: the same model, whose blocks do."""
    expected = hasslefree.compress(build("llama"), tmp_path / "any", RECIPE, segments=segments())
    model, most = build("llama"), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: most.append(len(args[0])))
        forward = layer.forward
        layer.forward = lambda x, *args, forward=forward, **kwargs: forward(x[:1], *args, **kwargs).expand(
            len(x), -1, -1
        )
    report = hasslefree.compress(model, tmp_path / "one", RECIPE, segments=segments())
    assert most.count(2) == 2, "it is tried once for each block"
    assert set(most) == {1, 2}
    for one, other in zip(report.layers, expected.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-3)


def outputs(model, tokens):
    """What leaves the last block: the only one whose error no later block sees."""
    found = []
    handle = model.model.norm.register_forward_pre_hook(lambda m, args: found.append(args[0]))
    logits(model, tokens)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("method", ["eora", "wanda"])
def test_matched_blocks_are_closer_to_the_dense_model(method, tmp_path):
    """Oracle: the dense model's hidden states."""
    tokens = segments(32)
    recipe = Recipe(rank=2 if method == "eora" else None, method=method)
    errors = {}
    for matched in (False, True):
        model = build("llama")
        chosen = dataclasses.replace(recipe, match_blocks=matched)
        report = hasslefree.compress(model, tmp_path / f"{matched}", chosen, segments=tokens)
        errors[matched] = (outputs(model, tokens) - outputs(build("llama"), tokens)).square().sum()
        stored = json.loads((tmp_path / f"{matched}" / "compression.json").read_text())["matching"]
        assert [block["block"] for block in stored] == (["model.layers.0", "model.layers.1"] if matched else [])
    assert errors[True] < 0.9 * errors[False]
    assert all(block["after"] <= block["before"] for block in report.matching)
    assert "seconds" not in report.matching[0]
    before, after = tensors_of(tmp_path / "False"), tensors_of(tmp_path / "True")
    name = "model.layers.0.self_attn.q_proj.positions"
    assert torch.equal(before[name], after[name]), "the first layers are solved alike, and matching keeps the support"


@pytest.mark.parametrize("place", ["device", "disk"])
def test_two_streams_go_on_to_the_same_bytes(place, tmp_path):
    """Oracle: an uninterrupted run."""
    recipe = dataclasses.replace(RECIPE, dense_target=0.5, match_blocks=True)
    tokens = segments(16)
    hasslefree.compress(build("llama"), tmp_path / "whole", recipe, segments=tokens)

    def stop(report, done, total):
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(
            build("llama"), tmp_path / "out", recipe, segments=tokens, progress=by_layer(stop), activations=place
        )
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=tokens, resume=True, activations=place)
    whole, out = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert whole == out


def test_a_share_is_a_share():
    with pytest.raises(RecipeError, match="dense_target must be between 0 and 1, got 1.5"):
        Recipe(rank=2, dense_target=1.5).resolve(with_text=False)
