"""The driver: run the calibration text through the model block by block, and replace each linear layer by S + L."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.checkpoints.format import check_output, check_shard_size, save
from hasslefree.core.gram import Gram
from hasslefree.core.packing import layout_of
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method
from hasslefree.decompose import solve_layer
from hasslefree.errors import CalibrationError, HasslefreeError, ModelError, NonFiniteError
from hasslefree.models.blocks import (
    Blocks,
    Linear,
    dense_weight,
    find_blocks,
    linear_shape,
    replace_module,
    select_linears,
)
from hasslefree.models.linear import SparseLowRankLinear
from hasslefree.models.load import encode, load_config, load_model, load_tokenizer, resolve_seqlen
from hasslefree.models.stream import (
    block_calls,
    first_hidden_states,
    gather_grams,
    groups_by_input,
    run_block,
)
from hasslefree.recipe import Recipe
from hasslefree.report import LayerReport, Report, versions
from hasslefree.texts import calibration_documents, draw_segments

# Called after each layer with its report, the layers done and the layers in all.
Progress = Callable[[LayerReport, int, int], None]


@dataclass(frozen=True)
class LayerPlan:
    """What a layer will become: decided, and checked, before the first one is touched."""

    linear: Linear
    pattern: Pattern
    rank: int


# For every block: the name of a layer in it → its plan.
Plan = list[dict[str, LayerPlan]]


def compress(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    tokenizer: Any = None,
    segments: Tensor | None = None,
    device: str | None = None,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
    progress: Progress | None = None,
) -> Report:
    """Compress a causal language model and write it to a folder that transformers loads.

    Args:
        model: a hub name, a local folder, or a loaded model, which is then changed in place.
        out: the folder to write. recipe: a `Recipe` or the path of a YAML file.
        tokenizer: of a loaded model, if it is not to be found under the model's own name.
        segments: calibration tokens (samples, seqlen) in the place of the recipe's text. A loaded model then needs no
            tokenizer, and the folder holds one only if it is given.
        device: where to compute; None for the GPU if there is one. A loaded model stays where it is.
        overwrite: replace a folder that is not empty, once the new one is complete.
        progress: called after every layer.

    Raises:
        HasslefreeError: anything wrong with the input, before the first layer is touched where it can be seen then.
    """
    start = time.perf_counter()
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe) if recipe else Recipe()
    recipe.check(with_text=segments is None)
    folder = Path(out).resolve()
    check_output(folder, overwrite)
    check_shard_size(max_shard_size)
    name, loaded, tokenizer = open_model(model, recipe.dtype, device, tokenizer)
    blocks = find_blocks(loaded)
    plan = make_plan(blocks, recipe)
    check_output(folder, overwrite, _bytes_needed(loaded, plan))
    if segments is None:
        tokenizer = tokenizer or load_tokenizer(name)
        segments = draw(loaded, tokenizer, recipe)
    check_segments(loaded, segments)
    layers = compress_blocks(loaded, blocks, plan, segments.to(loaded.device), recipe, progress)
    report = Report(
        model=name,
        recipe=dataclasses.asdict(recipe),
        method=repr(recipe.build_method()),
        versions=versions(),
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        seqlen=segments.shape[1],
        tokens=segments.numel(),
        seconds=time.perf_counter() - start,
        layers=tuple(layers),
    )
    save(loaded, tokenizer, folder, report, max_shard_size)
    return report


def open_model(
    model: str | Path | PreTrainedModel, dtype: str, device: str | None, tokenizer: Any
) -> tuple[str, PreTrainedModel, Any]:
    """Name, model and tokenizer: loaded by name, or the loaded model as it is, with the tokenizer that was given.

    Raises:
        ModelError: it cannot be loaded, is compressed already, or is loaded in another dtype than the recipe's.
    """
    if isinstance(model, str | Path):
        name = str(model)
        refuse_compressed(load_config(name), name)
        tokenizer = tokenizer or load_tokenizer(name)
        return name, load_model(name, dtype, device), tokenizer
    name = model.config._name_or_path or type(model).__name__
    refuse_compressed(model.config, name)
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ModelError(f"the loaded model is {model.dtype} and the recipe says {dtype}; cast the model first")
    return name, model.eval(), tokenizer


def refuse_compressed(config: Any, name: str) -> None:
    """Raise a ModelError where a model's configuration says that it is quantised or compressed already."""
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{name} is quantised or compressed already; start from the original checkpoint")


def make_plan(blocks: Blocks, recipe: Recipe) -> Plan:
    """The pattern and rank of every layer.

    Raises:
        HasslefreeError: with the layer's name: a budget that it cannot meet, NaN or Inf in its weight.
    """
    budget, method, plan = recipe.budget(), recipe.build_method(), []
    for index, linears in enumerate(select_linears(blocks, recipe.leave_dense)):
        plans = {}
        for name, linear in linears.items():
            full_name = f"{blocks.prefix(index)}.{name}"
            weight = dense_weight(linear)
            try:
                pattern, rank = budget.resolve(*weight.shape)
                method.check(rank)
            except HasslefreeError as error:
                raise type(error)(f"{error} ({full_name})") from None
            if not torch.isfinite(weight).all():
                raise NonFiniteError(f"the weight of {full_name} holds NaN or Inf; repair the checkpoint")
            plans[name] = LayerPlan(linear, pattern, rank)
        plan.append(plans)
    return plan


def draw(model: PreTrainedModel, tokenizer: Any, recipe: Recipe) -> Tensor:
    """The recipe's calibration segments: (samples, seqlen) token ids."""
    seqlen = resolve_seqlen(model, recipe.seqlen)
    documents = calibration_documents(recipe.calibration)
    return draw_segments(documents, lambda text: encode(tokenizer, text), recipe.samples, seqlen, recipe.seed)


def check_segments(model: PreTrainedModel, segments: Tensor) -> None:
    """Raise a CalibrationError where segments are not (samples, seqlen) token ids that the model can take."""
    if segments.ndim != 2 or segments.is_floating_point() or len(segments) < 1 or segments.shape[1] < 2:
        raise CalibrationError(
            f"segments are token ids (samples, seqlen), seqlen at least 2; got {segments.dtype} {tuple(segments.shape)}"
        )
    resolve_seqlen(model, segments.shape[1])
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.num_embeddings
    if segments.min() < 0 or segments.max() >= vocabulary:
        raise CalibrationError(
            f"the calibration tokens do not fit the model: it knows {vocabulary} of them, numbered from 0"
        )


def compress_blocks(
    model: PreTrainedModel, blocks: Blocks, plan: Plan, segments: Tensor, recipe: Recipe, progress: Progress | None
) -> list[LayerReport]:
    """Decompose and replace every planned layer; each block is fed with what the compressed ones before it put out."""
    method, total = recipe.build_method(), sum(map(len, plan))
    seen = block_calls(model, blocks, segments[:1])
    if silent := [
        f"{blocks.prefix(i)}.{n}" for i, plans in enumerate(plan) for n in plans if plans[n].linear not in seen.reached
    ]:
        raise ModelError(f"no calibration token reaches {', '.join(silent[:8])}; name them with --leave-dense")
    hidden = first_hidden_states(model, blocks, segments)
    reports: list[LayerReport] = []

    def note(report: LayerReport) -> None:
        reports.append(report)
        if progress is not None:
            progress(report, len(reports), total)

    for index, block in enumerate(blocks.modules):
        call, prefix = seen.calls[index], blocks.prefix(index)
        groups = groups_by_input(block, call, hidden[0], plan[index])
        for together in [groups] if recipe.sequential == "block" else [[group] for group in groups]:
            grams = gather_grams(block, prefix, call, hidden, together)
            for group, gram in zip(together, grams, strict=True):
                compress_group({n: plan[index][n] for n in group}, block, prefix, gram, method, recipe.seed, note)
        if index + 1 < len(blocks.modules):
            hidden = run_block(block, call, hidden)
    return reports


def compress_group(
    plans: dict[str, LayerPlan],
    block: torch.nn.Module,
    prefix: str,
    gram: Gram,
    method: Method,
    seed: int,
    note: Callable[[LayerReport], None],
) -> None:
    """Decompose the layers that share one input, with what depends on the Gram computed once, and put them in place."""
    start = time.perf_counter()
    try:
        prepared = method.prepare(gram)
        shared = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            start = time.perf_counter()
            weight = dense_weight(plan.linear)
            result = solve_layer(weight, gram, method, prepared, plan.pattern, plan.rank, seed)
            bias = None if plan.linear.bias is None else plan.linear.bias.detach()
            replace_module(block, name, SparseLowRankLinear.from_decomposition(result, bias, str(plan.pattern)))
            out, width = weight.shape
            note(
                LayerReport(
                    name=f"{prefix}.{name}",
                    out=out,
                    width=width,
                    pattern=str(plan.pattern),
                    rank=result.low_rank.rank,
                    nonzeros=int(result.sparse.count_nonzero()),
                    relative_error=result.relative_error,
                    relative_error_before_cast=result.relative_error_before_cast,
                    seconds=time.perf_counter() - start + shared,
                    history=result.history,
                )
            )
    except HasslefreeError as error:
        raise type(error)(f"{error} ({prefix}: {', '.join(plans)})") from None


def _bytes_needed(model: PreTrainedModel, plan: Plan) -> int:
    """The size of the folder: what stays dense, the packed layers, and room for the tokenizer."""
    total = 50_000_000 + sum(p.numel() * p.element_size() for p in model.parameters())
    for layer in (layer for plans in plan for layer in plans.values()):
        (out, width), weight = linear_shape(layer.linear), layer.linear.weight
        layout = layout_of(str(layer.pattern))
        shapes = layout.shapes(out, width, layer.pattern.kept((out, width)))
        values = math.prod(shapes["values"]) + layer.rank * (out + width)
        total += (values - out * width) * weight.element_size()
        total += math.prod(shapes[layout.index]) * layout.index_dtype.itemsize
    return total
