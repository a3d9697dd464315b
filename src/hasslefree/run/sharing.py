"""Which layers several processes share by rows, and which are solved by one process as a whole."""

from collections.abc import Mapping

from hasslefree.core.protocols import Method
from hasslefree.distributed import World
from hasslefree.recipe.plan import LayerPlan, Plan

Plans = Mapping[str, LayerPlan]


def shared_layers(method: Method, plans: Plans, processes: int) -> frozenset[str]:
    """The layers, of those solved at the same time, whose rows the processes share: if large, and the method can."""
    flagged = World(0, processes).too_large([weight_of(layer) for layer in plans.values()])
    return frozenset(
        name
        for (name, layer), large in zip(plans.items(), flagged, strict=True)
        if large and processes > 1 and layer.spec.shape[0] >= processes and method.shares_rows(layer.pattern)
    )


def undivided(method: Method, plan: Plan, processes: int) -> str | None:
    """A remark where the method cannot share rows, so that one process solves each layer; None where it can."""
    layers = [layer for plans in plan for layer in plans.values()]
    whole = {str(layer.pattern) for layer in layers if not method.shares_rows(layer.pattern)}
    if processes == 1 or not whole:
        return None
    patterns = " and ".join(sorted(whole))
    return (
        f"{type(method).__name__} cannot split a layer of pattern {patterns} between processes: each layer is solved "
        f"by one of the {processes} processes, and the others wait until all layers of a group are solved"
    )


def weight_of(layer: LayerPlan) -> float:
    """What the cost of a layer is proportional to: every method does products out × in × in most of the time."""
    out, width = layer.spec.shape
    return out * width**2


def assign_layers(plans: Plans, shared: frozenset[str], processes: int) -> dict[str, int | None]:
    """The rank that solves each layer; None for one that is shared."""
    whole = [name for name in plans if name not in shared]
    owners = World(0, processes).assign([weight_of(plans[name]) for name in whole])
    return dict.fromkeys(plans) | dict(zip(whole, owners, strict=True))
