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
from hasslefree.core.grids import Grid, Quantised, Scaling
from hasslefree.core.products import tiles
from hasslefree.core.scales import SMALLEST_HALF, Floats, as_float, suits_half

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
# Rows that are decided together: a matrix of all rows of a large vocabulary takes too much memory.
ROWS = 1 << 14


def at_rate(
    grid: Grid,
    target: Tensor,
    widths: Tensor,
    decide: Callable[[slice, Scaling], Tensor],
    heights: Tensor | None = None,
    tolerance: float = 0.0,
) -> Quantised:
    """Put a target on an entropy-coded grid.

    A step that is twice as long takes one bit less, so that two or three tries suffice.

    Args:
        target: (out, in).
        widths: of the steps of the inputs in relation to each other, (in,).
        decide: S of some rows, (rows, in), on given scales.
        heights: of the steps of the rows in relation to each other, (out,); None for equal ones.
        tolerance: the share of the bits by which S may miss those of the grid, either way.
    """
    assert grid.rate is not None
    words = words_for_rate(target.numel(), grid.rate)
    widths = widths / widths.log().mean().exp()
    if heights is None:
        heights = target.new_ones(len(target))
    deviations, reach = deviations_and_reach(target, heights)
    half = suits_half(target, REACH)
    step, least = steps_to_try(deviations, reach / widths, widths, grid.rate)
    if half:  # the scale of no row may become zero
        least = max(least, (SMALLEST_HALF / heights).log2().amax().item())
        step = max(step, least)
    best: Quantised | None = None
    for tries in range(1, MOST_TRIES + 1):
        wide_enough = torch.maximum(widths.clamp(NARROWEST, WIDEST), reach / 2.0**step)
        scale = as_float((heights * 2.0**step).unsqueeze(1), half)
        zero = torch.full_like(scale, (grid.top + 1) / 2)
        scaling = Scaling(grid, scale, zero, Floats(half), as_float(wide_enough, half))
        found = Quantised(codes_on(scaling, decide), scaling)
        used = len(encode(found.codes))
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


def codes_on(scaling: Scaling, decide: Callable[[slice, Scaling], Tensor]) -> Tensor:
    """The codes, uint8 (out, in), of S on given scales. decide: as in `at_rate`."""
    found = []
    for rows in tiles(len(scaling.scale), ROWS):
        part = scaling.of_rows(rows)
        found.append(part.codes(decide(rows, part)))
    return torch.cat(found)


def deviations_and_reach(target: Tensor, heights: Tensor) -> tuple[Tensor, Tensor]:
    """Of the inputs, with rows in units of their heights: the root mean squares, and the shortest
    steps with which `REACH` is the largest code: (in,) each.
    """
    squares = target.new_zeros(target.shape[1])
    reach = torch.zeros_like(squares)
    for rows in tiles(len(target), ROWS):
        part = target[rows] / heights[rows].unsqueeze(1)
        squares += part.square().sum(0)
        reach = torch.maximum(reach, part.abs().amax(0) / REACH)
    return (squares / len(target)).sqrt(), reach


def steps_to_try(
    deviations: Tensor, reach: Tensor, widths: Tensor, rate: float
) -> tuple[float, float]:
    """The binary logarithms of two steps: that at which Gaussian entries would take the bits of a
    rate, and the least one of use.

    With a shorter one than that, the largest codes of all inputs would be `REACH` again, or the
    widths of some would not fit into float16.

    Args:
        deviations: of the entries of each input, (in,). Inputs without weights take no bits.
        reach: the shortest step of each input, in units of its width, (in,).
        widths: of the steps of the inputs, (in,).
    """
    used = reach > 0
    if not used.any():
        return 0.0, 0.0
    octaves = reach[used].log2()
    least = max(octaves.min().item(), octaves.max().item() - OCTAVES_OF_WIDTHS)
    spread = (deviations / widths)[used].log2().mean().item()
    step = spread + GAUSSIAN - rate * len(widths) / int(used.sum())
    return max(step, least), least
