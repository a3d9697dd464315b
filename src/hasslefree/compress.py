"""The driver: run the calibration text through the model block by block, and replace each linear layer by S + L."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.checkpoints.entries import crc32, entry_of, read_entries
from hasslefree.checkpoints.output import check_output
from hasslefree.checkpoints.transformers_plugin import HasslefreeConfig, empty_layer
from hasslefree.checkpoints.unfinished import Part, Unfinished, fingerprint, unfinished
from hasslefree.core.gram import Gram
from hasslefree.core.protocols import Decomposition, Method
from hasslefree.core.targets import corrected, drift_correction
from hasslefree.decompose import solve_layer
from hasslefree.distributed import World, joined, own_device
from hasslefree.errors import (
    CalibrationError,
    HasslefreeError,
    MemoryShortError,
    ModelError,
    NonFiniteError,
    RecipeError,
)
from hasslefree.footprint import check_memory, footprint
from hasslefree.matching import Matching, match_block
from hasslefree.methods.row_chunks import InRowChunks
from hasslefree.models.activations import Activations, check_place
from hasslefree.models.blocks import Blocks, dense_weight, find_blocks, replace_module
from hasslefree.models.calibration import (
    Moments,
    Stream,
    first_hidden_states,
    gather,
    groups_by_input,
    run_block,
)
from hasslefree.models.calls import BlockCall, block_calls
from hasslefree.models.linear import SparseLowRankLinear
from hasslefree.models.load import (
    encode,
    load_config,
    load_on_disk,
    load_tokenizer,
    refuse_compressed,
    resolve_device,
    resolve_seqlen,
)
from hasslefree.models.streaming import Weights, outside
from hasslefree.plan import LayerPlan, Plan, bytes_on_disk, make_plan
from hasslefree.recipe import Recipe
from hasslefree.report import LayerReport, Report, model_card, versions
from hasslefree.texts import calibration_documents, draw_segments

logger = logging.getLogger(__name__)

# Into so many chunks of rows is a layer cut that the device has no room for.
CHUNKS = (2, 4, 8, 16)

# λ over the mean of diag H, where the target of a layer is moved towards the dense model.
TARGET_DAMPING = 0.01

# Called after each layer with its report, the layers done and the layers in all.
Progress = Callable[[LayerReport, int, int], None]


@dataclass(frozen=True)
class Job:
    """What a compression works on. place: where the hidden states between blocks are."""

    model: PreTrainedModel
    blocks: Blocks
    plan: Plan
    weights: Weights
    recipe: Recipe
    method: Method
    place: str
    note: Callable[[LayerReport], None]
    world: World


def compress(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    tokenizer: Any = None,
    segments: Tensor | None = None,
    device: str | None = None,
    activations: str = "device",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compress a causal language model and write it to a folder that transformers loads.

    One block is in memory at a time. It is on the disk, in `OUT.unfinished`, as soon as it is done.

    Args:
        model: a hub name, a local folder, or a loaded model, which is then changed in place.
        out: the folder to write. recipe: a `Recipe` or the path of a YAML file.
        tokenizer: of a loaded model, if it is not to be found under the model's own name.
        segments: calibration tokens (samples, seqlen) in the place of the recipe's text. A loaded model then needs no
            tokenizer, and the folder holds one only if it is given.
        device: where to compute; None for the GPU if there is one. A loaded model stays where it is.
        activations: where the hidden states between blocks are: on the "device", in RAM ("cpu"), or in a file beside
            OUT ("disk").
        resume: go on after the last whole block of a compression that did not end, if there is one. The result is the
            same, bit for bit.
        overwrite: replace a folder that is not empty, once the new one is complete; begin anew.
        trust_remote_code: run code that comes with the model.
        progress: called after every layer.

    Raises:
        HasslefreeError: anything wrong with the input, before the first layer is touched where it can be seen then.
    """
    start = time.perf_counter()
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe) if recipe else Recipe()
    recipe.check(with_text=segments is None)
    folder = Path(out).resolve()
    check_output(folder, overwrite)
    check_place(activations)
    target = model.device if isinstance(model, PreTrainedModel) else resolve_device(device or own_device())
    with joined(target) as world, workplace(folder, overwrite, resume, world) as work:
        scratch = work.scratch / str(world.rank)
        name, loaded, tokenizer = open_model(model, recipe.dtype, scratch, tokenizer, trust_remote_code)
        blocks = find_blocks(loaded)
        plan = make_plan(blocks, recipe)
        check_output(folder, overwrite, bytes_on_disk(loaded, plan) - work.bytes_done)
        if segments is None:
            tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
            segments = draw(loaded, tokenizer, recipe)
        check_segments(loaded, segments, world)
        if recipe.match_blocks and world.size > 1:
            raise RecipeError("blocks are matched in one process: leave out --match-blocks, or torchrun")
        shape = (segments.shape[0], segments.shape[1])
        check_memory(footprint(loaded, blocks, plan, recipe, shape, target, activations, world.size), target)
        method = recipe.build_method()
        note = _counter(sum(map(len, plan)), progress)
        job = Job(loaded, blocks, plan, Weights(loaded, target), recipe, method, activations, note, world)
        calls, digests = look_over(job, segments[:1].to(target))
        about: dict[str, Any] = {
            "model": name,
            "recipe": dataclasses.asdict(recipe) | {"leave_dense": list(recipe.leave_dense)},
            "method": repr(method),
            "versions": versions(),
            "device": target.type,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "seqlen": segments.shape[1],
            "tokens": segments.numel(),
        }
        if world.writes:
            work.begin(about | {"segments": fingerprint(segments), "weights": digests})
        compress_blocks(job, work, calls, world.share(segments).to(target))
        parts = world.told(work.parts)
        layers = tuple(LayerReport.from_dict(layer) for part in parts for layer in part.layers)
        matching = tuple(part.matching for part in parts if part.matching)
        report = Report(**about, seconds=time.perf_counter() - start, layers=layers, matching=matching)
        if world.writes:
            work.finish(lambda part: write_rest(part, loaded, tokenizer, parts, report))
    return report


@contextmanager
def workplace(out: Path, overwrite: bool, resume: bool, world: World) -> Iterator[Unfinished]:
    """The unfinished folder of OUT: that of the process that writes, and for the others a view of what was done."""
    if world.writes:
        with unfinished(out, overwrite, resume) as work:
            world.told(work.parts)
            yield work
    else:
        yield Unfinished(out, None, world.told(None))


def _counter(total: int, progress: Progress | None) -> Callable[[LayerReport], None]:
    done = 0

    def note(report: LayerReport) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(report, done, total)

    return note


def open_model(
    model: str | Path | PreTrainedModel, dtype: str, scratch: Path, tokenizer: Any, trust_remote_code: bool
) -> tuple[str, PreTrainedModel, Any]:
    """Name, model and tokenizer: opened by name with its weights on disk, or the loaded model as it is.

    Args:
        scratch: an empty folder, for weights that have to be converted.

    Raises:
        ModelError: it cannot be loaded, is compressed already, or is loaded in another dtype than the recipe's.
    """
    if isinstance(model, str | Path):
        name = str(model)
        refuse_compressed(load_config(name, trust_remote_code), name)
        tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
        return name, load_on_disk(name, dtype, scratch, trust_remote_code), tokenizer
    name = model.config._name_or_path or type(model).__name__
    refuse_compressed(model.config, name)
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ModelError(f"the loaded model is {model.dtype} and the recipe says {dtype}; cast the model first")
    return name, model.eval(), tokenizer


def draw(model: PreTrainedModel, tokenizer: Any, recipe: Recipe) -> Tensor:
    """The recipe's calibration segments: (samples, seqlen) token ids."""
    seqlen = resolve_seqlen(model, recipe.seqlen)
    documents = calibration_documents(recipe.calibration)
    return draw_segments(documents, lambda text: encode(tokenizer, text), recipe.samples, seqlen, recipe.seed)


def check_segments(model: PreTrainedModel, segments: Tensor, world: World) -> None:
    """Raise a CalibrationError where segments are not (samples, seqlen) token ids that the model can take.

    And where there are fewer than processes.
    """
    if segments.ndim != 2 or segments.is_floating_point() or len(segments) < 1 or segments.shape[1] < 2:
        raise CalibrationError(
            f"segments are token ids (samples, seqlen), seqlen at least 2; got {segments.dtype} {tuple(segments.shape)}"
        )
    if len(segments) < world.size:
        raise CalibrationError(
            f"{world.size} processes share {len(segments)} calibration segments; use fewer processes, or more --samples"
        )
    resolve_seqlen(model, segments.shape[1])
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.num_embeddings
    if segments.min() < 0 or segments.max() >= vocabulary:
        raise CalibrationError(
            f"the calibration tokens do not fit the model: it knows {vocabulary} of them, numbered from 0"
        )


def look_over(job: Job, segment: Tensor) -> tuple[list[BlockCall], dict[str, str]]:
    """One segment (1, tokens) through the whole model, before hours of work are spent.

    Returns:
        How each block is called; and a checksum of each part of the model by its name.

    Raises:
        ModelError: it cannot be run block by block, or a planned layer is not reached.
        NonFiniteError: NaN or Inf in a weight.
    """
    model, blocks = job.model, job.blocks
    with job.weights.present(outside(model, blocks)):
        digests = {"outside": checksum(outside_tensors(model, blocks))}

    def look(index: int) -> None:
        tensors = block_tensors(blocks, index)
        digests[blocks.prefix(index)] = checksum(tensors)
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(f"the weight {name} holds NaN or Inf; repair the checkpoint")

    seen = block_calls(model, blocks, segment, job.weights, look)
    if silent := [
        f"{blocks.prefix(index)}.{name}"
        for index, plans in enumerate(job.plan)
        for name in plans
        if blocks.modules[index].get_submodule(name) not in seen.reached
    ]:
        raise ModelError(f"no calibration token reaches {', '.join(silent[:8])}; name them with --leave-dense")
    return seen.calls, digests


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of the bytes of tensors, one after the other."""
    found = 0
    for tensor in tensors.values():
        found = crc32(tensor, found)
    return f"{found:08x}"


def block_tensors(blocks: Blocks, index: int) -> dict[str, Tensor]:
    """The parameters and stored buffers of a block by their names in the model."""
    state = blocks.modules[index].state_dict()
    return {f"{blocks.prefix(index)}.{name}": tensor for name, tensor in state.items()}


def outside_tensors(model: PreTrainedModel, blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and stored buffers outside the blocks; of tied ones, the one that a checkpoint holds."""
    tied = model.all_tied_weights_keys
    inside = f"{blocks.name}."
    return {n: t for n, t in model.state_dict().items() if not n.startswith(inside) and n not in tied}


def compress_blocks(job: Job, work: Unfinished, calls: list[BlockCall], segments: Tensor) -> None:
    """Decompose, replace and write every planned layer; each block is fed with what those before it put out."""
    count, finished = len(job.blocks.modules), len(work.parts)
    with job.weights.present(outside(job.model, job.blocks)):
        hidden = first_hidden_states(job.model, job.blocks, segments, job.place, work.folder)
        if not finished and job.world.writes:
            work.add(_file(0, count), outside_tensors(job.model, job.blocks))
    dense = hidden.copy() if job.recipe.two_streams else None
    for index, block in enumerate(job.blocks.modules):
        with job.weights.present(block.modules):
            if index + 1 < finished:
                if dense is not None:
                    run_block(block, calls[index], dense)
                put_back(job, work, index)
            else:
                layers, matching = compress_block(job, index, calls[index], hidden, dense)
                if job.world.writes:
                    entries = {report.name: entry_of(layer) for layer, report in layers}
                    reports = [dataclasses.asdict(report) for _, report in layers]
                    tensors = block_tensors(job.blocks, index)
                    work.add(_file(index + 1, count), tensors, entries=entries, layers=reports, matching=matching)
            if index + 1 < count:
                run_block(block, calls[index], hidden)


def _file(part: int, blocks: int) -> str:
    return f"model-{part + 1:05d}-of-{blocks + 1:05d}.safetensors"


def put_back(job: Job, work: Unfinished, index: int) -> None:
    """Put the compressed layers of a finished block in place, as they were written."""
    part, block, prefix = work.parts[index + 1], job.blocks.modules[index], f"{job.blocks.prefix(index)}."
    for name, entry in read_entries(part.entries).items():
        leaf = name.removeprefix(prefix)
        replace_module(block, leaf, empty_layer(block.get_submodule(leaf), name, entry))
    block.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in work.read(part).items()})
    for layer in part.layers:
        job.note(LayerReport.from_dict(layer))


# A layer that was compressed, and its report.
Done = tuple[SparseLowRankLinear, LayerReport]


def compress_block(
    job: Job, index: int, call: BlockCall, hidden: Activations, dense: Activations | None
) -> tuple[list[Done], dict[str, Any] | None]:
    """Decompose and replace the planned layers of one block, each process its share; and match the block, if asked.

    Args:
        dense: what enters the block in the dense model; afterwards what leaves it there. None for one stream.

    Returns:
        The layers with their reports, and the report of the matching.
    """
    block, prefix, plans = job.blocks.modules[index], job.blocks.prefix(index), job.plan[index]
    groups = groups_by_input(block, call, hidden[0], plans)
    original = None if dense is None else copied_but_for(block, plans)
    drifting = (original, dense) if original is not None and dense is not None and job.recipe.dense_target else None
    done = []
    for together in [groups] if job.recipe.sequential == "block" else [[group] for group in groups]:
        done += compress_groups(job, index, call, hidden, together, drifting)
    matching = None
    if original is not None and dense is not None:
        run_block(original, call, dense)
        if job.recipe.match_blocks:
            report = match_block(block, call, hidden, dense, Matching(), job.recipe.seed)
            matching = {"block": prefix, **report.to_dict()}
    return done, matching


def copied_but_for(block: nn.Module, names: Iterable[str]) -> nn.Module:
    """A copy of a block that shares the named layers with it: in one they are replaced, in the other they stay."""
    shared: dict[int, Any] = {id(layer): layer for layer in map(block.get_submodule, names)}
    return copy.deepcopy(block, shared)


def compress_groups(
    job: Job, index: int, call: BlockCall, hidden: Activations, groups: list[list[str]], dense: Stream | None
) -> list[Done]:
    """Decompose and replace the layers of some groups, each process its share. dense: for targets that lead to it."""
    block, prefix, plans = job.blocks.modules[index], job.blocks.prefix(index), job.plan[index]
    moments = gather(block, prefix, call, hidden, groups, dense, job.world.add)
    names = [name for group in groups for name in group]
    # What every method does most of is products out × in × in.
    owners = job.world.deal([plans[name].shape[0] * plans[name].shape[1] ** 2 for name in names])
    mine = {name for name, owner in zip(names, owners, strict=True) if owner == job.world.rank}
    found: dict[str, Done] = {}
    for group, known in zip(groups, moments, strict=True):
        share = {name: plans[name] for name in group if name in mine}
        found |= compress_group(job, block, prefix, share, known) if share else {}
    return [put_in_place(job, block, n, owner, found.get(n)) for n, owner in zip(names, owners, strict=True)]


def compress_group(
    job: Job, block: nn.Module, prefix: str, plans: dict[str, LayerPlan], known: Moments
) -> dict[str, Done]:
    """Decompose layers that share one input, with what depends on its moments computed once."""
    start, done = time.perf_counter(), {}
    gram, share = known.gram, job.recipe.dense_target
    try:
        prepared = job.method.prepare(gram)
        correction = None if known.drift is None else drift_correction(gram, known.drift, share, TARGET_DAMPING)
        shared = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            start = time.perf_counter()
            linear: Any = block.get_submodule(name)
            weight, pattern = dense_weight(linear), str(plan.pattern)
            target = None if correction is None else corrected(weight, correction)
            result = solve_with_room(weight, gram, job.method, prepared, plan, job.recipe.seed, target)
            bias = None if linear.bias is None else linear.bias.detach()
            layer = SparseLowRankLinear.from_decomposition(result, bias, pattern)
            seconds = time.perf_counter() - start + shared
            done[name] = layer, LayerReport.of(f"{prefix}.{name}", pattern, result, seconds)
            job.note(done[name][1])
    except HasslefreeError as error:
        raise type(error)(f"{error} ({prefix}: {', '.join(plans)})") from None
    return done


def solve_with_room(
    weight: Tensor, gram: Gram, method: Method, prepared: Any, plan: LayerPlan, seed: int, target: Tensor | None
) -> Decomposition:
    """`solve_layer`; where the device has no room for it, again in 2, 4, 8, … chunks of rows. The result remarks it.

    Raises:
        MemoryShortError: no number of chunks helps.
    """
    for chunks in (1, *CHUNKS):
        way = method if chunks == 1 else InRowChunks(method, chunks, gram)
        try:
            return solve_layer(weight, gram, way, prepared, plan.pattern, plan.rank, seed, target)
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory with %d chunk(s) of rows of a layer %s: %s", chunks, plan.shape, error)
        torch.cuda.empty_cache()
    raise MemoryShortError(
        f"{weight.device} has no room for a layer {plan.shape[0]}×{plan.shape[1]}, not even in {CHUNKS[-1]} chunks of "
        "rows; use another method, a larger device, or --device cpu"
    )


def put_in_place(job: Job, block: nn.Module, name: str, owner: int, done: Done | None) -> Done:
    """Put a compressed layer in its place, in all processes. done: what its owner has."""
    entry, report = job.world.told((entry_of(done[0]), done[1]) if done else None, owner)
    if done is None:
        layer = empty_layer(block.get_submodule(name), report.name, read_entries({report.name: entry})[report.name])
        job.note(report)
    else:
        layer = done[0]
    for tensor in layer.state_dict().values():
        job.world.spread(tensor, owner)
    replace_module(block, name, layer)
    return layer, report


def write_rest(folder: Path, model: PreTrainedModel, tokenizer: Any, parts: list[Part], report: Report) -> None:
    """All of the output folder but the weights: configuration, tokenizer, compression.json and the model card."""
    entries = {name: entry for part in parts for name, entry in part.entries.items()}
    model.config.quantization_config = HasslefreeConfig(entries)
    model.config.dtype, model.config.architectures = report.dtype, [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / "compression.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "README.md").write_text(model_card(report), encoding="utf-8")
