"""A size for a model: what each layer gets of it, and what `plan` says beforehand."""

import dataclasses
import itertools

import pytest
import torch

import hasslefree
from hasslefree import Gram, Grid, Recipe
from hasslefree.allocate.allocation import Inspection, LayerChoice
from hasslefree.allocate.options import grid_options, joined
from hasslefree.allocate.sensitivity import ProbedLayer, probe_method
from hasslefree.core.patterns import SemiStructured, Unstructured
from hasslefree.distributed import ALONE
from hasslefree.errors import BudgetError, HasslefreeError, ModelError, OutputError, RecipeError
from hasslefree.models.blocks import find_blocks
from hasslefree.pipeline.advise import advise
from hasslefree.planning.plan import LayerPlan, digest
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan, uniform_plans
from hasslefree.recipe.resolve import DEFAULT_SIZE, with_defaults
from hasslefree.units import Size
from tests import oracles
from tests.listeners import by_layer
from tests.tiny_models import NUMBERS, build, segments, tensors_of

DENSE = SemiStructured(1, 1)
QUICK = {"effort": "fast", "group_size": 16, "scale_bits": 16, "rounds": 3}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(NUMBERS)
    return {"calibration": str(tmp_path / "text.txt"), "samples": 4, "seqlen": 16}


def words(text, **options):
    """A tokenizer of numbers."""
    return {"input_ids": [int(word) for word in text.split()]}


def within(size, **fields):
    model = build("llama", torch.bfloat16)
    resolved = Recipe(size=size, **QUICK | fields).resolve(with_text=False)
    return uniform_plans(model, select(find_blocks(model), resolved), resolved)


def bits_and_rank(plan):
    [found] = {(layer.grid.bits, layer.rank) for plans in plan.blocks for layer in plans.values()}
    return found


def stored(folder):
    return sum(tensor.nbytes for tensor in tensors_of(folder).values())


def compressed_weights(report):
    return sum(layer.spec.dense_parameters for layer in report.layers)


@pytest.mark.parametrize(
    ("size", "fields"),
    [("24kB", {}), ("9bits", {}), ("27kB", {"factor_bits": 8}), ("8bits", {"rank": 1}), ("24kB", {"bits": 3}),
     ("9bits", {"bits": 3})],
    ids=str,
)  # fmt: skip
def test_the_bytes_are_within_the_size(size, fields, tmp_path):
    """Oracle: the tensors in the folder. What is left over is less than one bit and eight ranks of a layer take."""
    recipe = Recipe(size=size, **QUICK, **fields)
    report = hasslefree.compress(build("llama", torch.bfloat16), tmp_path / "out", recipe, segments=segments())
    parsed, specs = Size.parse(size), [layer.spec for layer in report.layers]
    in_blocks = [layer.spec for layer in report.layers if ".layers." in layer.name]
    if parsed.in_bits:
        used, room = report.stored_bytes, parsed.amount * compressed_weights(report) / 8
    else:
        used, room = stored(tmp_path / "out"), parsed.amount
    largest = max(spec.dense_parameters / 4 + 2 * 8 * sum(spec.shape) for spec in specs)
    assert room - largest < used <= room
    assert "rank" not in fields or {spec.rank for spec in in_blocks} == {1}
    assert "bits" not in fields or {spec.grid.bits for spec in in_blocks} == {3}
    assert "bits" in fields or len({spec.grid.bits for spec in specs}) > 1
    assert {spec.factor_bits for spec in specs if spec.rank} <= {fields.get("factor_bits")}


def test_allocation_by_error_moves_bits_within_the_bytes_of_the_uniform_plan(tmp_path):
    """Oracle: the tensors of both folders, and the bits of the uniform plan."""
    sizes, bits = {}, {}
    for allocate in ("uniform", "error"):
        recipe, model = Recipe(method="joint-grid", rank=2, allocate=allocate, **QUICK), build("llama", torch.bfloat16)
        report = hasslefree.compress(model, tmp_path / allocate, recipe, segments=segments())
        sizes[allocate], bits[allocate] = stored(tmp_path / allocate), [layer.spec.grid.bits for layer in report.layers]
    assert sizes["uniform"] - 1000 < sizes["error"] <= sizes["uniform"]
    assert set(bits["uniform"]) == {4}
    assert min(bits["error"]) <= 4 < max(bits["error"])


def test_bits_that_are_given_stay():
    recipe = Recipe(method="joint-grid", rank=8, bits=4, allocate="error").resolve(with_text=False)
    assert [grid.bits for grid in recipe.grids] == [4]


@pytest.mark.parametrize("size", ["22kB", "26kB", "7bits", "11bits"])
def test_uniform_plans_have_the_largest_rank_within_the_size(size):
    """Oracle: the bytes of the plan with eight ranks more, by its tensors' shapes."""
    model = build("llama", torch.bfloat16)
    rest = sum(p.nbytes for p in model.parameters())
    found = within(size)
    assert [bits_and_rank(plan)[0] for plan in found] == sorted((bits_and_rank(p)[0] for p in found), reverse=True)
    for plan in found:
        parsed, weights = Size.parse(size), sum(matrix.dense_parameters for matrix in plan.matrices)
        room = parsed.amount * weights / 8 if parsed.in_bits else parsed.amount - rest + 2 * weights
        more = sum(2 * 8 * sum(layer.shape) for layer in plan.layers)
        used = sum(matrix.size for matrix in plan.matrices)
        assert used <= room
        assert used + more > room or bits_and_rank(plan)[1] == 16


def probed(weight, x, gradients, grid):
    gram = Gram.from_activations(x)
    prepared = probe_method(grid).prepare(gram)
    return ProbedLayer("m.l", weight, gram, prepared, x, gradients, len(x), 0, ALONE), gram


def test_what_bits_and_ranks_lose():
    """Oracle: in the H whose correlations are shrunk, the trace tr(R H Rᵀ) of the rounded weight less its singular
    values, times the divergence on the probes over the trace with their own H; in float64."""
    x = torch.randn(200, 32) @ (torch.eye(32) + 0.2 * torch.randn(32, 32))
    weight, gradients = torch.randn(24, 32), torch.randn(200, 24)
    grid = Grid(4, 16, offset=True)
    layer, gram = probed(weight, x, gradients, grid)
    plan = LayerPlan.of((24, 32), DENSE, 0, torch.bfloat16, grid)
    resolved = Recipe(size="6bits", **QUICK).resolve(with_text=False)
    options, sensitivity = grid_options(layer, plan, resolved)
    shrunk = gram.shrunk().matrix.double()
    errors = {}
    for bits in (2, 3, 4, 5, 6, 8):
        each = dataclasses.replace(grid, bits=bits)
        change = (weight - layer.changed(DENSE, each)).double()
        errors[each] = float(torch.trace(change @ shrunk @ change.T))
    change = (weight - layer.changed(DENSE, grid)).double()
    by_output = (x.double() @ change.T) * gradients
    squares = torch.linalg.svdvals(change @ torch.linalg.cholesky(shrunk)).square()
    rate = float(by_output.square().sum(1).mean()) / 2 / oracles.loss(change, gram.matrix)
    assert sensitivity == pytest.approx(rate * errors[dataclasses.replace(grid, bits=2)], rel=1e-3)
    choice = joined({"layer": LayerChoice(options, sensitivity, "layer")})["layer"]
    options = choice.options
    for each, error in errors.items():
        for rank in (0, 8, 16):
            share = 1 - float(squares[:rank].sum() / squares.sum())
            found = choice.loss(LayerPlan.of((24, 32), DENSE, rank, torch.bfloat16, each))
            assert found == pytest.approx(rate * error * share, rel=1e-3)
    ladder = options.ladders["plan"]
    steps = [options.plan({"plan": step}) for step in range(len(ladder.gains) + 1)]
    assert [later.size - one.size for one, later in itertools.pairwise(steps)] == ladder.cost.tolist()
    losses = [options.loss(step) for step in steps]
    assert [one - later for one, later in itertools.pairwise(losses)] == pytest.approx(ladder.gains.tolist())
    assert all(each.size <= each.dense_size for each in steps)
    assert (steps[0].grid.bits, steps[0].rank) == (2, 0)
    # A uniform plan may have a rank above those of the ladder: at most what the largest of them loses.
    known = {each: losses[:9] for each, losses in options.losses.items()}
    fewer = dataclasses.replace(options, losses=known)
    plans = [LayerPlan.of((24, 32), DENSE, rank, torch.bfloat16, grid) for rank in (8, 24)]
    assert [fewer.loss(each) for each in plans] == [options.loss(plans[0])] * 2


def test_what_a_pruned_layer_loses():
    """Oracle: in float64, half the mean square of gᵀ ΔW x on the probes, times the trace in the H whose correlations
    are shrunk over that in their own H."""
    x = torch.randn(100, 32) @ (torch.eye(32) + 0.2 * torch.randn(32, 32))
    weight, gradients = torch.randn(24, 32), torch.randn(100, 24)
    layer, gram = probed(weight, x, gradients, None)
    plan = LayerPlan.of((24, 32), SemiStructured(2, 4), 2, torch.bfloat16)
    inspection = Inspection(Recipe(pattern="2:4", rank=2).resolve(with_text=False))
    _, sensitivity = inspection(layer, plan)
    change = (weight - layer.changed(plan.kept, None)).double()
    on_probes = ((x.double() @ change.T) * gradients).sum(1).square().mean().item() / 2
    chance = oracles.loss(change, gram.shrunk().matrix) / oracles.loss(change, gram.matrix)
    assert chance > 1.1
    assert sensitivity == pytest.approx(chance * on_probes, rel=1e-3)


@pytest.mark.parametrize(
    ("kept", "pattern"),
    [
        (DENSE, {}),
        (Unstructured(2048 * 24), {"method": "joint-grid", "pattern": "unstructured", "sparsity": 0.25}),
    ],
    ids=["dense", "unstructured"],
)
def test_errors_on_grids_are_estimated_from_some_rows(kept, pattern):
    """Oracle: the errors of all rows, which some rows follow up to chance."""
    grid = Grid(4, 16, offset=kept == DENSE)
    weight, x = torch.randn(2048, 32), torch.randn(200, 32)
    layer, gram = probed(weight, x, torch.randn(200, 2048), grid)
    plan = LayerPlan.of((2048, 32), kept, 0, torch.bfloat16, grid)
    options, _ = grid_options(layer, plan, Recipe(size="6bits", **pattern, **QUICK).resolve(with_text=False))
    coarse, fine = (dataclasses.replace(grid, bits=bits) for bits in (2, 6))
    all_rows = [gram.expected_loss(weight - layer.changed(kept, each)) for each in (coarse, fine)]
    losses = {each.bits: float(values[0]) for each, values in options.losses.items()}
    assert losses[6] / losses[2] == pytest.approx(all_rows[1] / all_rows[0], rel=0.15)


def test_a_matrix_with_one_output_has_a_plan():
    """Its inputs have a scale each, with which it is larger than the dense one."""
    resolved = Recipe(size="4bits", effort="fast").resolve(with_text=False)
    least = resolved.grids[0]
    layer, _ = probed(torch.randn(1, 64), torch.randn(200, 64), torch.randn(200, 1), least)
    plan = LayerPlan.of((1, 64), DENSE, 0, torch.bfloat16, least)
    assert plan.size > plan.dense_size
    options, _ = grid_options(layer, plan, resolved)
    assert options.plans == [plan]


def test_a_layer_on_a_grid_gets_the_bits_of_that_grid():
    """Its weight lies on four bits, which lose nothing; on three, it loses something."""
    grid = Grid(4, 16, offset=True)
    weight, x = torch.randn(24, 32), torch.randn(200, 32)
    weight = grid.scaling(weight).nearest(weight)
    layer, _ = probed(weight, x, torch.randn(200, 24), grid)
    plan = LayerPlan.of((24, 32), DENSE, 0, torch.bfloat16, grid)
    options, sensitivity = grid_options(layer, plan, Recipe(size="6bits", **QUICK).resolve(with_text=False))
    assert sensitivity > 0
    every = [dataclasses.replace(plan, grid=Grid(bits, 16, offset=True)) for bits in (2, 4)]
    losses = {each.grid.bits: options.loss(each) for each in every}
    assert losses[4] < 1e-6 < losses[2] / 100


def test_more_bits_go_to_layers_that_matter_more(tmp_path):
    """Behind a down_proj of zeros, errors are lost however large they are."""
    model = build("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    report = hasslefree.compress(model, tmp_path / "out", Recipe(size="7bits", **QUICK), segments=segments())
    bits = {layer.name: layer.spec.grid.bits for layer in report.layers}
    assert {bits[f"model.layers.1.mlp.{name}_proj"] for name in ("gate", "up")} == {2}
    assert max(bits.values()) > 4


def test_plan_says_what_compress_does(text, tmp_path):
    """Oracle: the record of the compression, and its bytes."""
    recipe = Recipe(size="24kB", **QUICK, **text)
    dealt, *uniform = advise(build("llama", torch.bfloat16), recipe, tokenizer=words)
    out = tmp_path / "out"
    model = build("llama", torch.bfloat16)
    report = hasslefree.compress(model, out, recipe, tokenizer=Words())
    planned = [(matrix.grid, matrix.rank) for matrix in dealt.plan.matrices]
    assert sorted(map(str, planned)) == sorted(str((layer.spec.grid, layer.spec.rank)) for layer in report.layers)
    assert stored(out) == dealt.bytes <= 24_000
    assert sum(report.sensitivities.values()) > 0
    assert all(dealt.divergence < each.divergence and each.bytes <= 24_000 for each in uniform)
    assert [each.bits[0] for each in uniform] == sorted((each.bits[0] for each in uniform), reverse=True)


class Words:
    """A tokenizer of numbers that can be saved."""

    def __call__(self, text, **options):
        return words(text)

    def save_pretrained(self, folder):
        pass


def test_more_bytes_lose_less(text):
    found = [advise(build("llama"), Recipe(size=size, **QUICK, **text), tokenizer=words)[0]
             for size in ("8bits", "10bits", "13bits")]  # fmt: skip
    for less, more in itertools.pairwise(found):
        assert more.divergence < less.divergence


def test_ranks_of_a_pattern_are_dealt_too(tmp_path, text):
    """2:4 without a grid: a method of another kind, which moves ranks alone."""
    recipe = Recipe(size="14bits", pattern="2:4", effort="fast", rounds=3)
    report = hasslefree.compress(build("llama", torch.bfloat16), tmp_path / "out", recipe, segments=segments())
    assert {layer.spec.pattern for layer in report.layers} == {"2:4"}
    assert {layer.spec.grid for layer in report.layers} == {None}
    assert len({layer.spec.rank for layer in report.layers}) > 1
    assert 13 < 8 * report.stored_bytes / compressed_weights(report) <= 14
    dealt, uniform = advise(build("llama", torch.bfloat16), dataclasses.replace(recipe, **text), tokenizer=words)
    assert dealt.bits is None
    assert dealt.divergence < uniform.divergence


def test_a_run_with_another_size_is_not_resumed(tmp_path):
    def run(size="7bits", **options):
        recipe = Recipe(size=size, **QUICK)
        hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments(), **options)

    def stop(report, done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=by_layer(stop))
    with pytest.raises(OutputError, match="recipe"):
        run("6bits", resume=True)
    run(resume=True)


def test_a_digest_tells_grids_apart():
    four, five = within("8bits", bits=4)[0], within("8bits", bits=5)[0]
    assert (bits_and_rank(four), bits_and_rank(five)) == ((4, 0), (5, 0))
    assert digest(four) != digest(five)


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (
            "1kB",
            {},
            r"1\.0 kB is too small: the least possible with .* is 10\.1kB \(dense, int2 .*rank 0",
        ),
        ("2bits", {}, r"2 bits per weight is too small: .* is 4bits .*use size='4bits'"),
        ("4.5bits", {"bits": 3}, r"the least possible .* is 5\.06bits \(dense, int3"),
        ("1GB", {}, r"the uncompressed model takes \d+\.\d kB, which is already within the size of 1\.0 GB"),
        ("16bits", {}, r"the uncompressed model takes 16 bits per weight, which"),
        ("8bits", {"pattern": "2:4"}, r"the least possible with method joint is 9bits \(2:4, rank 0\)"),
        (
            "9bits",
            {"pattern": "unstructured", "sparsity": 0.02},
            r"16\.68bits .* the uncompressed model takes less; use another pattern, or method='joint-grid'",
        ),
    ],
)
def test_a_size_that_no_choice_reaches(size, fields, message):
    with pytest.raises(BudgetError, match=message):
        within(size, **fields | ({"group_size": None, "scale_bits": None} if "pattern" in fields else {}))


def test_a_given_rank_on_a_matrix_that_is_narrower_is_that_of_its_plan():
    """Or its bytes are not those for which there is room."""
    layer, _ = probed(torch.randn(12, 32), torch.randn(200, 32), torch.randn(200, 12), Grid(4, 16, offset=True))
    model = build("llama", torch.bfloat16, num_attention_heads=4, num_key_value_heads=1, head_dim=12)
    resolved = Recipe(size="100kB", rank=20, **QUICK).resolve(with_text=False)
    [plan] = {matrix for matrix in make_plan(select(find_blocks(model), resolved), resolved, 20).layers
              if matrix.shape == (12, 32)}  # fmt: skip
    options, _ = grid_options(layer, plan, resolved)
    assert {each.rank for each in options.plans} == {plan.rank} == {8}


@pytest.mark.parametrize("size", ["4bits", "10.2kB"])
def test_the_least_possible_size_is_possible(size):
    assert [bits_and_rank(plan) for plan in within(size)] == [(2, 0)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": "much"}, "'much' is not a size; give bytes of all weights, such as size='150MB'"),
        ({"size": "5bits", "ratio": 0.5}, "give size or ratio, not both"),
        ({"size": "5bits", "bits": 4, "rank": 8}, "nothing left that a size could choose: leave out bits and rank"),
        (
            {"size": "5bits", "method": "joint-grid", "pattern": "unstructured", "sparsity": 0.5, "allocate": "owl"},
            "allocate owl ignores the size: leave out the size, or use allocate error",
        ),
        ({"size": "5bits", "method": "wanda"}, "with method wanda, .*: use method joint-grid"),
        ({"size": "5bits", "pattern": "2:4", "rank": 8}, "with method joint, .* leave out rank"),
    ],
)
def test_sizes_that_mean_nothing(fields, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields).resolve(with_text=False)


def test_advice_needs_a_size():
    with pytest.raises(RecipeError, match="give size="):
        advise(build("llama"), Recipe(rank=4))


def test_a_model_alone_gets_the_default_size():
    recipe = with_defaults(Recipe(effort="fast"))
    assert (recipe.size, recipe.method, recipe.pattern, recipe.allocate) == (
        DEFAULT_SIZE, "joint-grid", "dense", "error")  # fmt: skip
    for fields in ({"rank": 4}, {"pattern": "2:4"}, {"method": "wanda"}, {"bits": 4, "rank": 0}):
        assert with_defaults(Recipe(**fields)).size is None


def test_a_layer_that_is_not_there_is_said_to_be_that():
    with pytest.raises(HasslefreeError, match="none"):
        within("8bits", leave_dense=("*.none",))


@pytest.mark.parametrize(
    ("text", "size"),
    [("150MB", Size(150 * 10**6)), ("1.5 gb", Size(15 * 10**8)), ("20000", Size(20000)), ("4.8bits", Size(4.8, True)),
     ("5 bits", Size(5, True))],
)  # fmt: skip
def test_sizes(text, size):
    assert Size.parse(text) == size
    rounded = Size.parse(size.rounded_up)
    assert size.amount <= rounded.amount < 1.01 * size.amount
    assert rounded.in_bits == size.in_bits


@pytest.mark.parametrize("text", ["", "much", "-3MB", "1.5.2", "3 MiB", "4 Mbits"])
def test_what_is_no_size(text):
    with pytest.raises(BudgetError, match="such as size='150MB'"):
        Size.parse(text)


def test_advice_leaves_a_loaded_mixture_as_it_was(text):
    model = build("mixtral").train()
    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    advise(model, Recipe(size="7bits", **QUICK, **text), tokenizer=words)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (value, trainable) in before.items():
        assert torch.equal(after[name], value)
        assert after[name].requires_grad == trainable
    assert model.training


def test_advice_within_inference_mode(text):
    """Oracle: the same call outside of it."""
    recipe = Recipe(size="7bits", **QUICK, **text)
    expected = advise(build("llama"), recipe, tokenizer=words)
    model = build("llama")
    with torch.inference_mode():
        assert advise(model, recipe, tokenizer=words) == expected
        with pytest.raises(ModelError, match="load it outside"):
            advise(build("llama"), recipe, tokenizer=words)
