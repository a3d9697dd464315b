"""Training: its gradients are those of the whole model, and it never leaves a model worse."""

import copy
import dataclasses
import json
import math
import re
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Grid, Prune, Recipe, SparseGPT
from hasslefree.checkpoint.record import read_record
from hasslefree.core.low_rank import LowRank
from hasslefree.errors import CalibrationError, ModelError, NonFiniteError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Source, Weights
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.planning.schedule import Training, passes_over, segments_for
from hasslefree.train.gradients import Divergence
from hasslefree.train.optimizer import BlockOptimizer
from hasslefree.train.reference import Reference
from hasslefree.train.trainer import Trainer, reference_of
from tests.tiny_models import build, logits, segments


def prepared(family, storage="device", folder=None, samples=10, **changes):
    """A tiny model whose blocks are compressed, the dense one, and what that makes of some segments."""
    model, tokens = build(family, **changes), segments(samples, 16)
    dense = copy.deepcopy(model)
    blocks = find_blocks(model)
    walk = Walk.open(model, blocks, Weights(model, model.device), tokens[:1], storage, folder)
    reference = reference_of(walk, tokens, samples)
    for block in blocks.modules:
        for site in find_sites(block).values():
            gram = hasslefree.Gram(torch.eye(site.shape[1]), 100)
            found = hasslefree.decompose(site.weight(), gram, "2:4", 2, method="oats")
            site.replace(SparseLowRankLinear.from_decomposition(found, site.bias, "2:4"))
    return walk, reference, dense, tokens


# The weights of norms within blocks, by their names in these families.
NORM = re.compile(r"\b(layers|h|layer)\.\d+\..*(norm|ln_\d)\.weight$")


def divergence(dense, model, tokens):
    """KL(dense ‖ model) of a token, on average, in float64."""
    one, other = (F.log_softmax(logits(each, tokens).double(), -1) for each in (dense, model))
    return float((one.exp() * (one - other)).sum(-1).mean())


def state(walk):
    return {name: tensor.clone() for name, tensor in walk.model.state_dict().items()}


def back_to(walk, before):
    return lambda: walk.model.load_state_dict(before)


FAMILIES = ["llama", "gemma3_text", "gpt2", "gemma4_text", "gemma3n_text"]
LIKE_THEM = ["opt", "gpt_neox", "phi3"]


@pytest.mark.parametrize(
    ("family", "storage", "keep_graphs"),
    [
        ("llama", "device", True),
        pytest.param("gemma3n_text", "device", True, marks=pytest.mark.nightly),
        ("gemma4_text", "disk", False),
        *((family, "device", False) for family in FAMILIES),
        *(pytest.param(family, "device", False, marks=pytest.mark.nightly) for family in LIKE_THEM),
    ],
)
def test_the_gradients_are_those_of_the_divergence_of_the_whole_model(
    family, storage, keep_graphs, tmp_path, monkeypatch
):
    """Oracle: autograd through both models at once."""
    walk, reference, dense, tokens = prepared(family, storage, tmp_path)
    found = {}

    def update(self, rate):
        for variable in self.variables:
            found[id(variable.leaf)], variable.leaf.grad = variable.leaf.grad.clone(), None

    monkeypatch.setattr(BlockOptimizer, "update", update)
    chosen = [3, 5, 6]
    trainer = Trainer(walk, reference, Training(), keep_graphs=keep_graphs)
    trainer.open(1.0)
    trainer.step(chosen, 1.0)
    layers = compressed_layers(walk.model)
    parameters = {f"{n}.{k}": p for n, layer in layers.items() for k, p in layer.named_parameters() if p.numel()}
    assert len(parameters) >= 3 * len(layers) > 7
    parameters |= {name: p for name, p in walk.model.named_parameters() if NORM.search(name)}
    assert {id(p) for p in parameters.values()} == set(found)
    predicted = F.log_softmax(walk.model(input_ids=tokens[chosen], use_cache=False).logits, -1)
    target = F.log_softmax(logits(dense, tokens[chosen]), -1)
    loss = (target.exp() * (target - predicted)).sum()
    expected = torch.autograd.grad(loss, list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        if name.endswith("k_proj.bias"):
            continue  # a softmax does not see it
        if "per_layer" in name and not gradient.any():  # a fresh model multiplies it by zero
            assert not found[id(parameter)].any()
            continue
        scale = gradient.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(found[id(parameter)] / scale, gradient / scale, rtol=1e-3, atol=1e-3, msg=name)


@pytest.fixture
def two_held_out(monkeypatch):
    """Of ten segments."""
    monkeypatch.setattr("hasslefree.planning.schedule.TRAINING_PER_VALIDATION", 4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_judges_is_the_divergence_on_segments_that_are_not_trained_on(family, two_held_out):
    """Oracle: the definition, in float64."""
    walk, reference, dense, tokens = prepared(family)
    before = divergence(dense, walk.model, tokens[:2])
    record = Trainer(walk, reference, Training(batch=32)).train(back_to(walk, state(walk)))
    assert record["before"] == pytest.approx(before, rel=2e-3)
    assert record["after"] == pytest.approx(divergence(dense, walk.model, tokens[:2]), rel=2e-3)
    assert record["after"] == record["history"][-1] < record["before"]
    assert record["tokens"] == 8 * 16
    assert len(record["history"]) == 4
    assert not any(p.requires_grad and p.grad is not None for p in walk.model.parameters())


def test_zeros_stay_zeros_and_what_is_not_compressed_stays(two_held_out):
    walk, reference, *_ = prepared("llama")
    before = state(walk)
    support = {name: layer.unpacked() != 0 for name, layer in compressed_layers(walk.model).items()}
    Trainer(walk, reference, Training(batch=32)).train(back_to(walk, before))
    changed = {name for name, tensor in walk.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {n for n in before if re.search(r"(values|low_rank_[uv])$", n) or NORM.search(n)}
    for name, layer in compressed_layers(walk.model).items():
        assert not (layer.unpacked() != 0)[~support[name]].any(), name


@pytest.mark.parametrize(("rate", "retreats", "validations"), [(30.0, 1, 4), (1e30, 1, 0), (1e30, 0, 0)])
def test_a_rate_that_is_too_high_is_retreated_from_and_at_worst_the_model_is_as_it_was(
    rate, retreats, validations, two_held_out
):
    """At 1e30 the weights become NaN, which no comparison sees and JSON does not have."""
    walk, reference, *_ = prepared("llama")
    before = state(walk)
    record = Trainer(walk, reference, Training(learning_rate=rate, batch=32, retreats=retreats)).train(
        back_to(walk, before)
    )
    assert record["learning_rate"] == rate / 3**retreats
    assert len(record["history"]) == validations, "the last attempt goes on to the end, if its predictions are finite"
    assert record["after"] == record["before"]
    assert record["before"] < min(record["history"], default=math.inf)
    json.dumps(record, allow_nan=False)
    for name, tensor in walk.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(("first", "rate"), [(1.09, 0.0015), (1.11, 0.0005), (math.nan, 0.0005)])
def test_training_goes_on_unless_the_first_validation_is_worse_by_a_tenth(first, rate, two_held_out, monkeypatch):
    """Measured on SmolLM2: as before training at the first validation, and a seventh lower at the last."""
    walk, reference, *_ = prepared("llama")
    found = iter([1.0, first] + ([] if rate == 0.0015 else [1.0, 0.9]) + [0.8, 0.8, 0.8])
    monkeypatch.setattr(Trainer, "validate", lambda self: next(found))
    record = Trainer(walk, reference, Training(batch=32)).train(back_to(walk, state(walk)))
    assert record["learning_rate"] == pytest.approx(rate)
    assert record["after"] == 0.8


def test_weights_that_become_nan_after_a_success_are_not_kept(two_held_out, monkeypatch):
    """The first validation is better than before, and NaN comes later."""
    walk, reference, *_ = prepared("llama")
    before, step = state(walk), Trainer.step

    def spoilt(self, segments, rate):
        step(self, segments, rate)
        if 6 in segments:  # in the third of four steps
            walk.model.model.layers[0].mlp.up_proj.low_rank_u.data[0] = math.nan

    monkeypatch.setattr(Trainer, "step", spoilt)
    record = Trainer(walk, reference, Training(batch=32)).train(back_to(walk, before))
    assert record["history"][0] < record["before"] == record["after"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in walk.model.state_dict().items())


def test_embeddings_and_head_are_read_once_in_a_training(tmp_path, monkeypatch):
    """Oracle: a count of the reads while the model is trained."""
    build("llama").save_pretrained(tmp_path / "model")
    read, training, of_file, train = [], [], Source.read, Trainer.train

    def counted(source):
        read.extend([source.name] * len(training))
        return of_file(source)

    def noted(self, restore):
        training.append(True)
        record = train(self, restore)
        training.clear()
        return record

    monkeypatch.setattr(Source, "read", counted)
    monkeypatch.setattr(Trainer, "train", noted)
    hasslefree.compress(
        tmp_path / "model", tmp_path / "out", RECIPE, tokenizer=NoTokenizer(), segments=segments(12, 16)
    )
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize(
    ("segments", "tokens", "passes"),
    [(34, 100, 1), (34, 512, 1), (34, 760, 1), (34, 780, 2), (34, 1024, 2), (34, 10**6, 3), (2, 10**6, 3)],
)
def test_how_often_a_text_is_read_by_hand(segments, tokens, passes):
    """Of 34 segments of 16 tokens, 32 are trained on."""
    assert passes_over(segments, tokens, 16) == passes


def test_a_short_text_is_read_several_times(two_held_out, monkeypatch):
    """Oracle: by hand. Eight segments, two a step, three times, at the rates of twelve steps."""
    walk, reference, *_ = prepared("llama")
    read, rates, step = [], [], Trainer.step

    def noted(self, segments, rate):
        step(self, segments, rate)
        read.append(list(segments))
        rates.append(rate)

    monkeypatch.setattr(Trainer, "step", noted)
    settings = Training(batch=32)
    record = Trainer(walk, dataclasses.replace(reference, tokens=3 * 8 * 16), settings).train(
        back_to(walk, state(walk))
    )
    assert read == 3 * [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert rates == pytest.approx([settings.rate(step, 13) for step in range(12)])
    assert record["tokens"] == 3 * 8 * 16
    assert record["after"] < record["before"]


def test_a_compression_reads_a_short_text_again_and_says_so(tmp_path, caplog):
    """Oracle: by hand. Five of six segments of 16 tokens are trained on; twice, they are as many tokens as asked."""
    recipe = Recipe(rank=2, rounds=2, allocate="uniform", match_predictions=160)
    record = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments(6, 16))
    assert record.predictions["tokens"] == 160
    assert "the calibration text has 6 of the 11 segments for fine-tuning, and is read more than once" in caplog.text


def test_a_training_with_a_deadline_reads_the_text_until_then(two_held_out, monkeypatch):
    """Oracle: a clock on which a step takes a second. In 19 seconds, the four mini-batches are read nearly five times,
    and the rate of each step is that of 19 steps: it falls to zero at the deadline."""
    walk, reference, *_ = prepared("llama")
    now, rates = [100.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    step = Trainer.step

    def timed(self, segments, rate):
        step(self, segments, rate)
        rates.append(rate)
        now[0] += 1

    monkeypatch.setattr(Trainer, "step", timed)
    settings = Training(batch=32)
    record = Trainer(walk, reference, settings, deadline=119.0).train(back_to(walk, state(walk)))
    assert now[0] == 119
    assert record["tokens"] == 19 * 32
    assert record["after"] < record["before"]
    assert len(record["history"]) == settings.validations
    assert rates == pytest.approx([settings.rate(step, 20) for step in range(19)])
    assert rates[-1] < 0.01 < max(rates)


def test_processes_with_clocks_of_their_own_end_together(two_held_out, monkeypatch):
    """Oracle: the steps of the process that owns the clock."""
    walk, reference, *_ = prepared("llama")
    now, sent = [100.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def batches(broadcast, deadline):
        world = SimpleNamespace(broadcast=broadcast)
        found = []
        for batch in Trainer(walk, reference, Training(batch=32), world=world, deadline=deadline).batches():
            found.append(batch)
            now[0] += 1
        return found

    def owner(value):
        sent.append(value)
        return value

    first = batches(owner, 110.0)
    received = iter(sent)
    assert batches(lambda value: next(received), 120.125) == first
    assert first[-1].done == first[-1].length == 10


def test_a_training_whose_deadline_has_passed_leaves_a_model_no_worse(two_held_out):
    walk, reference, *_ = prepared("llama")
    record = Trainer(walk, reference, Training(batch=32), deadline=time.perf_counter() - 5).train(
        back_to(walk, state(walk))
    )
    assert record["after"] <= record["before"]


def test_predictions_that_are_nan_are_an_error():
    walk, reference, *_ = prepared("llama")
    compressed_layers(walk.model)["model.layers.1.mlp.up_proj"].values.data[0, 0] = math.inf
    with pytest.raises(NonFiniteError, match="predictions of the compressed model contain NaN or Inf"):
        Trainer(walk, reference, Training()).train(back_to(walk, {}))


def test_a_divergence_that_rounds_below_zero_is_zero(monkeypatch):
    """A record holds no negative divergence, and a folder with one could not be read."""
    walk, reference, *_ = prepared("llama")
    monkeypatch.setattr(Trainer, "divergence", lambda self, *_: nullcontext(torch.tensor(-3e-8)))
    trainer = Trainer(walk, reference, Training())
    trainer.open(1.0)
    assert trainer.validate() == 0


@given(st.integers(1, 10**6), st.integers(2, 4096))
def test_one_segment_of_seventeen_is_held_out(tokens, seqlen):
    reference = Reference(torch.empty(0, seqlen), None, segments_for(tokens, seqlen))
    training, validation = reference.training, reference.validation
    assert [*validation, *training] == [*range(reference.total)]
    assert len(validation) >= 1
    assert len(training) * seqlen >= tokens > (len(training) - 1) * seqlen
    assert len(validation) <= 1 + reference.total / 17


def test_a_step_is_that_of_adam_in_units_of_the_inputs():
    """Oracle: S D, v D and u as dense matrices, D the root mean square of each input, and one step of torch's Adam."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(12, 16, generator=generator) for _ in range(2))
    units = torch.logspace(-1, 1, 16)
    decomposition = hasslefree.decompose(weight, None, "2:4", 2, method="oats")
    layer = SparseLowRankLinear.from_decomposition(decomposition, None, "2:4")
    mask, scaled = layer.unpacked() != 0, layer.unpacked().detach() * units
    balanced = LowRank(layer.low_rank_u.detach(), layer.low_rank_v.detach() * units).balanced()
    masters = [part.clone().requires_grad_() for part in (scaled, balanced.u, balanced.v)]
    groups = [{"params": [m], "lr": 1e-3 * rms(m.detach()[mask] if m is masters[0] else m.detach())} for m in masters]
    optimizer = torch.optim.Adam(groups, eps=1e-12)
    merged = masters[0] * mask / units + masters[1] @ masters[2] / units
    (merged * gradient).sum().backward()
    optimizer.step()
    block = torch.nn.Sequential(layer)
    trained = BlockOptimizer(block, {layer: units}, 1e-3)
    for variable in trained.variables:  # or the first gradients would be those of other units
        torch.testing.assert_close(variable.leaf, variable.master / variable.unit)
    ((layer.unpacked() + layer.low_rank_u @ layer.low_rank_v) * gradient).sum().backward()
    trained.update(1.0)
    torch.testing.assert_close(layer.unpacked(), masters[0] * mask / units)
    torch.testing.assert_close(layer.low_rank_u @ layer.low_rank_v, masters[1] @ masters[2] / units)


@pytest.mark.parametrize("scale_bits", [None, 6])
def test_rows_of_zeros_have_no_say_in_the_learning_rate(scale_bits):
    """Oracle: the matrix without its row of zeros."""
    weight = 0.02 * torch.randn(64, 64)
    with_zeros = torch.cat([weight, torch.zeros(1, 64)])
    moved = []
    for matrix in (weight, with_zeros):
        method = Prune(SparseGPT(grid=Grid(4, 32, offset=True, scale_bits=scale_bits)))
        found = hasslefree.decompose(matrix, None, "dense", 0, method=method)
        layer = SparseLowRankLinear.from_decomposition(found, None, "dense")
        before = layer.weight_scale.detach().clone()
        trained = BlockOptimizer(torch.nn.Sequential(layer), {layer: torch.ones(64)}, 1e-3)
        for variable in trained.variables:
            variable.leaf.grad = torch.ones_like(variable.leaf)
        trained.update(1.0)
        moved.append((layer.weight_scale.detach() - before)[:64])
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=0)


def rms(tensor):
    return float(tensor.square().mean().sqrt())


def test_masters_gather_steps_that_bfloat16_would_lose():
    """Oracle: the sum of the steps. Adam's step is the rate for a constant gradient, here 2⁻¹⁰ of each value."""
    decomposition = hasslefree.decompose(torch.ones(4, 8), None, "2:4", 0, method="magnitude")
    layer = SparseLowRankLinear.from_decomposition(decomposition, None, "2:4").to(torch.bfloat16)
    masters = BlockOptimizer(torch.nn.Sequential(layer), {layer: torch.ones(8)}, 2.0**-10)
    for _ in range(64):
        layer.values.grad = torch.ones_like(layer.values)
        masters.update(1.0)
    torch.testing.assert_close(layer.values.float(), torch.full_like(layer.values, 1 - 64 / 1024).float())


def test_the_learning_rate_rises_and_falls_to_zero():
    """Oracle: the corners, and a cosine half way."""
    plan = Training(warm_up=0.1)
    rates = [plan.rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert rates[54] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0, abs=1e-9)
    assert rates[:9] == sorted(rates[:9])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("entries", [1, 30, 2**20])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(entries, monkeypatch):
    """Oracle: the definition in float64, by autograd. One token is ruled out by both, and has no part in it."""
    monkeypatch.setattr("hasslefree.train.gradients.ENTRIES", entries)
    generator = torch.Generator().manual_seed(0)
    target, logits = (3 * torch.randn(7, 11, generator=generator) for _ in range(2))
    for each in (target, logits):
        each[:, 4] = -math.inf
    leaf = logits.clone().requires_grad_()
    (2 * Divergence.apply(target, leaf)).backward()
    others = [i for i in range(11) if i != 4]
    exact = logits[:, others].double().requires_grad_()
    p, q = target[:, others].double().log_softmax(-1), exact.log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    (2 * expected).backward()
    assert Divergence.apply(target, logits).item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(leaf.grad[:, others].double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert not leaf.grad[:, 4].any()


RECIPE = Recipe(rank=2, method="eora", match_predictions=160)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_compression_ends_with_it(streamed, tmp_path):
    """Oracle: the folder that was written, its divergence from the dense model on the judging segment."""
    dense, tokens = build("llama"), segments(12, 16)
    dense.save_pretrained(tmp_path / "model")
    model = tmp_path / "model" if streamed else build("llama")
    options = {"segments": tokens, "tokenizer": None}
    if streamed:
        options["tokenizer"] = NoTokenizer()
    report = hasslefree.compress(model, tmp_path / "out", RECIPE, **options)
    found = report.predictions
    written = read_record(tmp_path / "out")
    assert written.predictions == found
    assert found["after"] < found["before"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found["after"] == pytest.approx(divergence(dense, loaded, tokens[:1]), rel=2e-3)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]


def test_a_training_that_is_undone_says_so(tmp_path, monkeypatch, caplog):
    settings = Training(learning_rate=30.0, retreats=0)
    monkeypatch.setattr("hasslefree.pipeline.training.Training", lambda: settings)
    report = hasslefree.compress(build("llama"), tmp_path / "out", RECIPE, segments=segments(12, 16))
    assert report.predictions["after"] == report.predictions["before"]
    assert "fine-tuning is undone: on the segments that are held out of it" in caplog.text


BLOCKS = {
    "bfloat16": ("llama", "bfloat16", {}),
    "float16": ("llama", "float16", {}),
    "unstructured": ("gpt2", "float32", {"pattern": "unstructured", "sparsity": 0.5}),
    "rank 0": ("opt", "bfloat16", {"method": "sparsegpt", "rank": 0}),
    "a grid with offsets": ("llama", "bfloat16", {"method": "joint-grid", "group_size": 8, "bits": 3}),
    "a grid with zeros": ("llama", "float32", {"method": "gptq", "rank": 0, "group_size": 0}),
    "2:4 on a grid": ("llama", "float32", {"method": "joint-grid", "pattern": "2:4", "group_size": 8}),
    "coded factors": ("llama", "float32", {"factor_bits": 8}),
    "a grid and coded factors": ("opt", "bfloat16", {"method": "joint-grid", "group_size": 8, "factor_bits": 8}),
    "a dense block": ("llama", "float32", {"leave_dense": ("model.layers.0.*",)}),
}


# A combination of two others, or another dtype of one.
ALIKE = ("float16", "2:4 on a grid", "a grid and coded factors")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind in ALIKE else kind for kind in BLOCKS]
)
def test_every_kind_of_layer_is_trained(kind, tmp_path, monkeypatch):
    """Oracle: the divergence of the folder that was written; no parameter is kept in another dtype."""
    family, dtype, changes = BLOCKS[kind]
    keep = len(kind) % 2 == 0  # half of the kinds with checkpoints of the inputs
    monkeypatch.setattr("hasslefree.pipeline.training.in_one_pass", lambda *args: keep)
    fields = {"rank": 2, "method": "eora", "match_predictions": 160} | changes
    dense, tokens = build(family, getattr(torch, dtype)), segments(12, 16)
    with torch.no_grad():  # as a caller may have it
        report = hasslefree.compress(
            build(family, getattr(torch, dtype)), tmp_path / "out", Recipe(**fields), segments=tokens
        )
    found = report.predictions
    assert found["after"] <= found["before"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {getattr(torch, dtype)}
    given = divergence(dense.float(), loaded.float(), tokens[:1])
    assert found["after"] == pytest.approx(given, rel=0.002 if dtype == "float32" else 0.05)


class NoTokenizer:
    """Stands for a tokenizer where segments are given."""

    def save_pretrained(self, folder):
        pass


def test_too_little_text_is_an_error_before_the_work(tmp_path):
    with pytest.raises(
        CalibrationError, match=r"needs at least 2 segments of 16 tokens, and the calibration text has 1; "
    ):
        hasslefree.compress(build("llama"), tmp_path / "out", RECIPE, segments=segments(1, 16))
    assert not (tmp_path / "out.unfinished").exists()


def test_a_model_without_predictions_is_an_error_before_the_work(tmp_path):
    with pytest.raises(ModelError, match="no output head"):
        hasslefree.compress(build("llama").model, tmp_path / "out", RECIPE, segments=segments(8, 16))
