"""Compress the embedding and the head.

They are compressed before the blocks, so that the blocks get the inputs that they have in the
compressed model. For the head, the inputs are those of the dense model. An embedding that is not
tied has no inputs to weight its errors: H = I. A tied one is compressed as the head, and its
look-ups are added to H if they were measured (`allocate.ends`).
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hasslefree.allocate.allocation import Allocation
from hasslefree.allocate.ends import with_look_ups
from hasslefree.checkpoint.plugin import empty_end
from hasslefree.checkpoint.record import LayerRecord
from hasslefree.core.gram import Gram, relative, working_dtype
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import ModelError, option
from hasslefree.models.calibrate import Collector, checked
from hasslefree.models.calls import Stop, hooks
from hasslefree.models.ends import End
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec
from hasslefree.pipeline.job import Job
from hasslefree.pipeline.layers import Done, memory_errors, share_layer
from hasslefree.planning.plan import LayerPlan
from hasslefree.progress import Phase
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods.joint_on_grid import JointOnGrid
from hasslefree.train.reference import Reference


def compress_ends(
    job: Job, allocation: Allocation, reference: Reference | None, solving: Phase
) -> list[Done]:
    """Compress the embedding and the head; each process solves its share.

    Args:
        reference: outputs of the last block of the dense model; None if the text must run through
            the dense model first.
        solving: the phase that counts layers.

    Returns:
        The compressed layers, the same in all processes.
    """
    plans = allocation.plan.ends
    ends = [end for end in job.walk.blocks.ends if end.name in plans]
    done: list[Done] = []
    for index, end in enumerate(ends):
        if end.head is None:
            gram = Gram.identity(end.shape[1])
        else:
            of_head = head_gram(job, end.head, reference)
            gram = with_look_ups(of_head, allocation.look_ups.get(end.name, 0.0))
        owner = index % job.world.size
        solved = None
        with solving.running():
            if owner == job.world.rank:
                solved = compress_end(job, end, plans[end.name], gram)
            layer, record = share_layer(
                job.world, owner, solved, partial(empty_on_device, job, end)
            )
        done.append((layer, record))
        solving.advance(layer=record)
    return done


def head_gram(job: Job, name: str, reference: Reference | None) -> Gram:
    """The Gram of the head's inputs on the text, in the dense model.

    Raises:
        ModelError: the model does not call the head.
    """
    walk = job.walk
    if reference is None:
        segments = job.local_segments
        states = walk.entering(segments)
        walk.run_dense(states)
    else:
        segments = reference.segments
        states = reference.states
    collector = Collector([name], segments.shape[1])
    collector.calls_per_pass = 1
    sums = collector.sums[name]
    watching = hooks(collector.watch(walk.model))
    with walk.head(), watching, torch.no_grad():
        for index, segment in enumerate(segments):
            collector.called.clear()
            with suppress(Stop):
                walk.logits(segment, states[index])
    if not sums.count:
        raise ModelError(
            f"{type(walk.model).__name__} does not call {name}, so there are no inputs to calibrate"
            f" on; keep it dense with {option('leave_dense', name)}"
        )
    return checked(sums.gram(job.world), name)


def compress_end(job: Job, end: End, plan: LayerPlan, gram: Gram) -> Done:
    """Round a matrix to its grid by GPTQ's sweep and descent, some rows at a time."""
    start = time.perf_counter()
    assert plan.grid is not None
    method = JointOnGrid(plan.grid, relative=True)
    with job.walk.outside():
        module: Any = job.walk.model.get_submodule(end.name)
        weight = module.weight.detach()
        gram = gram.to(weight)
        with memory_errors(f"compress {end.name}", weight.device):
            prepared = method.prepare(gram)
            parts: list[Decomposition] = []
            norms: list[float] = []
            for here, solver in method.by_rows(weight, prepared):
                rows = weight[here]
                parts.append(solve_layer(rows, gram, solver, prepared, plan.kept, 0, seed=0))
                norms.append(gram.loss(rows.to(working_dtype(rows))))
        result = joined(parts, norms)
        layer = end.kind.from_decomposition(result, getattr(module, "bias", None), plan.pattern)
    seconds = time.perf_counter() - start
    return layer, LayerRecord.of(end.name, layer.spec, result, seconds, layer.stored_bytes)


def joined(parts: list[Decomposition], norms: Sequence[float]) -> Decomposition:
    """Join the decompositions of consecutive rows of a matrix.

    The relative error is the mean over parts, weighted by their squared norms.

    Args:
        norms: the squared norm of the rows of each part, tr(W H Wᵀ).
    """
    total = sum(norms)
    pairs = list(zip(parts, norms, strict=True))
    error = sum(part.relative_error * norm for part, norm in pairs)
    error_before_cast = sum(part.relative_error_before_cast * norm for part, norm in pairs)
    return Decomposition(
        torch.cat([part.sparse for part in parts]),
        LowRank(torch.cat([part.low_rank.u for part in parts]), parts[0].low_rank.v),
        relative(error, total),
        relative(error_before_cast, total),
        (),
        tuple(dict.fromkeys(remark for part in parts for remark in part.remarks)),
        stacked([part.quantised for part in parts]),
    )


def stacked(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of tensors, such as codes and scales, also in nested dataclasses.

    Everything else is taken from the first part, and so are the scales of inputs, which all rows
    share.
    """
    first = parts[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(tuple(parts))
    if not dataclasses.is_dataclass(first):
        return first
    whole = {}
    for field in dataclasses.fields(first):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "input_scale":
            whole[field.name] = values[0]
        else:
            whole[field.name] = stacked(values)
    kind: Any = type(first)
    return kind(**whole)


def empty_on_device(job: Job, end: End, spec: LayerSpec) -> SparseLowRankLinear:
    """A compressed layer with uninitialised values, on the device of the job."""
    return empty_end(end, job.walk.model, spec).to_empty(device=job.device)


def use_ends(job: Job, layers: Mapping[str, SparseLowRankLinear]) -> None:
    """Make the walk compute with compressed matrices from now on. layers: by name."""
    job.ends.update(layers)
    for name, layer in layers.items():
        job.walk.rounded[f"{name}.weight"] = layer.unpacked().detach()


def replace_ends(
    job: Job, tensors: dict[str, Tensor], layers: Mapping[str, SparseLowRankLinear]
) -> None:
    """Replace the dense weights of ends with the tensors of their compressed layers."""
    for end in job.walk.blocks.ends:
        if end.name not in layers:
            continue
        for name in end.names:
            tensors.pop(f"{name}.weight", None)
        tensors |= layers[end.name].state_dict(prefix=f"{end.name}.")


def stored_ends(job: Job) -> dict[str, SparseLowRankLinear]:
    """Read the compressed embedding and head from the unfinished folder, by name."""
    outside = job.work.progress.parts[0]
    if not outside.entries:
        return {}
    tensors = job.work.read(outside)
    layers: dict[str, SparseLowRankLinear] = {}
    for end in job.walk.blocks.ends:
        if end.name in outside.entries:
            layer = empty_on_device(job, end, outside.entries[end.name].spec)
            names = layer.state_dict().keys()
            layer.load_state_dict({leaf: tensors[f"{end.name}.{leaf}"] for leaf in names})
            layers[end.name] = layer
    return layers
