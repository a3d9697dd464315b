"""S on an entropy-coded grid: the scales at which its codes take the bits of the grid.

Rounding to steps of a length Δ_j for input j loses Δ_j² d_j / 12 for each entry, with d_j what the
sweep of GPTQ pays for a change of 1, and takes about −log₂ Δ_j bits. At a given number of bits, the
sum is least where all inputs lose the same: Δ_j ∝ 1 / √d_j (WaterSIC, arXiv 2603.04956).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hasslefree.core.entropy import encode, words_for_rate
from hasslefree.core.grids import Grid, Scaling
from hasslefree.core.protocols import Pruned
from hasslefree.core.scales import Floats, as_float, suits_half

# The share of the bits that may stay unused, the tries after which more may, and all tries.
UNUSED = 0.002
TRIES = 4
MOST_TRIES = 100
# The largest code of the target, which leaves room for what later entries compensate.
REACH = 120
# The bits of a rounded Gaussian number whose standard deviation is one step.
GAUSSIAN = math.log2(2 * math.pi * math.e) / 2
# Relative steps of inputs are within these limits, which float16 holds.
NARROWEST = 2.0**-8
WIDEST = 2.0**8
# What lies between the narrowest and the widest steps of a matrix at most.
OCTAVES_OF_WIDTHS = 15


def at_rate(
    grid: Grid,
    target: Tensor,
    widths: Tensor,
    decide: Callable[[Scaling], Tensor],
    heights: Tensor | None = None,
    tolerance: float = 0.0,
) -> Pruned:
    """Put a target on an entropy-coded grid.

    A step that is twice as long takes one bit less, so that two or three tries suffice.

    Args:
        target: (out, in).
        widths: of the steps of the inputs in relation to each other, (in,).
        decide: S, (out, in), on given scales.
        heights: of the steps of the rows in relation to each other, (out,); None for equal ones.
        tolerance: the share of the bits by which S may miss those of the grid, either way.
    """
    assert grid.rate is not None
    words = words_for_rate(target.numel(), grid.rate)
    widths = widths / widths.log().mean().exp()
    if heights is None:
        heights = target.new_ones(len(target))
    step, least = steps_to_try(target / heights.unsqueeze(1), widths, grid.rate)
    best: Pruned | None = None
    for tries in range(1, MOST_TRIES + 1):
        scaling = scaling_with(grid, target, widths, heights * 2.0**step)
        found = Pruned(decide(scaling), scaling)
        used = len(encode(scaling.codes(found.sparse)))
        if abs(used - words) <= tolerance * words:
            return found
        if used <= words:
            best = found
            if used >= (1 - UNUSED) * words or step == least:
                break
        if best is not None and tries >= TRIES:
            break
        step += 32 * (used - words) / target.numel() + grid.rate * UNUSED / 2
        step = max(step, least)
    return best or found


def steps_to_try(target: Tensor, widths: Tensor, rate: float) -> tuple[float, float]:
    """The binary logarithms of two steps: that at which Gaussian entries would take the bits of a
    rate, and the least one of use.

    With a shorter one than that, the largest codes of all inputs would be `REACH` again, or the
    widths of some would not fit into float16.

    Args:
        target: (out, in). Inputs without weights take no bits.
        widths: of the steps of the inputs, (in,).
    """
    used = target.any(0)
    if not used.any():
        return 0.0, 0.0
    deviations = target.square().mean(0).sqrt()[used]
    reach = target.abs().amax(0)[used] / widths[used] / REACH
    least = max(reach.min().log2().item(), reach.max().log2().item() - OCTAVES_OF_WIDTHS)
    spread = (deviations / widths[used]).log2().mean().item()
    step = spread + GAUSSIAN - rate * len(widths) / int(used.sum())
    return max(step, least), least


def scaling_with(grid: Grid, target: Tensor, widths: Tensor, steps: Tensor) -> Scaling:
    """The scaling with these steps of the rows, (out,), and widths of the inputs that are no
    narrower than codes reach.
    """
    half = suits_half(target, REACH)
    scale = as_float(steps.unsqueeze(1), half)
    reaching = (target / steps.unsqueeze(1)).abs().amax(0) / REACH
    widths = torch.maximum(widths.clamp(NARROWEST, WIDEST), reaching)
    zero = torch.full_like(scale, (grid.top + 1) / 2)
    return Scaling(grid, scale, zero, Floats(half), as_float(widths, half))
