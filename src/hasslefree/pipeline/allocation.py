"""The plan of the layers as a recipe asks for it; a resumed run takes that of the first run."""

import dataclasses

from hasslefree.allocate.allocation import Allocation, Choices, by_sensitivity
from hasslefree.allocate.owl import by_outliers
from hasslefree.checkpoint.journal import Dealt
from hasslefree.checkpoint.resume import Unfinished
from hasslefree.packed.spec import LayerSpec
from hasslefree.pipeline.job import Job
from hasslefree.planning.plan import LayerPlan, Plan


def allocate(job: Job) -> Allocation:
    """Plan the layers as the recipe's `allocate` asks for, in all processes alike.

    A plan that is not uniform is kept in the unfinished folder.
    """
    plan = job.plan
    if job.resolved.allocate == "uniform":
        return Allocation(plan)
    if job.work.progress.dealt is not None:
        return kept(job.work.progress.dealt, plan, job.work)
    segments = job.local_segments
    if job.resolved.allocate == "owl":
        allocation = by_outliers(job.walk, plan, job.resolved, segments, job.world)
    else:
        allocation = by_sensitivity(job.walk, plan, job.resolved, job.room, segments, job.world)
        allocation = dataclasses.replace(allocation, choices=Choices())  # others need none
    allocation = job.world.broadcast(allocation)
    if job.world.writes:
        keep(allocation, job.work)
    return allocation


def keep(allocation: Allocation, work: Unfinished) -> None:
    """Keep an allocation for a resumed run."""
    matrices: list[dict[str, LayerSpec]] = []
    for plans in allocation.plan.parts:
        matrices.append({name: plan.spec for name, plan in plans.items()})
    dealt = Dealt(matrices, allocation.sensitivities)
    work.keep_plan(dealt, allocation.output_weights)


def kept(dealt: Dealt, uniform: Plan, work: Unfinished) -> Allocation:
    """The allocation of an earlier run, which has compressed the ends: it needs no look-ups.

    Args:
        uniform: the plan from which it was made.
    """
    parts: list[dict[str, LayerPlan]] = []
    for plans, specs in zip(uniform.parts, dealt.matrices, strict=True):
        parts.append({name: plans[name].like(spec) for name, spec in specs.items()})
    ends, *blocks = parts
    return Allocation(Plan(blocks, ends), dealt.sensitivities, work.output_weights(dealt))
