"""S on an entropy-coded grid, with scales for which the codes take the bits of the grid.

If input j is rounded to steps of length Δ_j, each entry loses Δ_j² d_j / 12, where d_j is the cost
of a change of 1 in the sweep of GPTQ, and takes −log₂ Δ_j bits plus a constant. At a given number
of bits, the total loss is least if all inputs lose the same: Δ_j ∝ 1 / √d_j (WaterSIC, arXiv
2603.04956).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hasslefree.core.entropy import encode, words_for_rate
from hasslefree.core.grids import Grid, Quantised, Scaling
from hasslefree.core.products import tiles
from hasslefree.core.scales import SMALLEST_HALF, Floats, as_float, suits_half

# The share of the bits that may stay unused, the number of tries after which any share may, and the
# maximum number of tries.
UNUSED = 0.002
TRIES = 4
MOST_TRIES = 100
# The largest code of the target; the larger codes are left for compensations of other entries.
REACH = 120
# Entropy, in bits, of a rounded Gaussian number whose standard deviation is one step.
GAUSSIAN = math.log2(2 * math.pi * math.e) / 2
# Limits of the relative steps of inputs, within the range of float16.
NARROWEST = 2.0**-8
WIDEST = 2.0**8
# The most octaves between the narrowest and the widest step of a matrix.
OCTAVES_OF_WIDTHS = 15
# Number of rows that are decided together: all rows of a large vocabulary take too much memory.
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

    Doubling the step saves one bit per code, so two or three tries are usually enough.

    Args:
        target: (out, in).
        widths: the relative steps of the inputs, (in,).
        decide: a function that computes S for some rows, (rows, in), on given scales.
        heights: the relative steps of the rows, (out,); None for equal steps.
        tolerance: the relative deviation of the bits from those of the grid that is accepted, in
            either direction.
    """
    assert grid.rate is not None
    words = words_for_rate(target.numel(), grid.rate)
    widths = widths / widths.log().mean().exp()
    if heights is None:
        heights = target.new_ones(len(target))
    deviations, reach = deviations_and_reach(target, heights)
    half = suits_half(target, REACH)
    step, least = steps_to_try(deviations, reach / widths, widths, grid.rate)
    if half:  # no scale of a row may become zero
        least = max(least, (SMALLEST_HALF / heights).log2().amax().item())
        step = max(step, least)
    best: Quantised | None = None
    for tries in range(1, MOST_TRIES + 1):
        wide_enough = torch.maximum(widths.clamp(NARROWEST, WIDEST), reach / 2.0**step)
        scale = as_float((heights * 2.0**step).unsqueeze(1), half)
        zero = torch.full_like(scale, (grid.top + 1) / 2)
        scaling = Scaling(grid, scale, zero, Floats(half), as_float(wide_enough, half))
        quantised = Quantised(codes_on(scaling, decide), scaling)
        used = len(encode(quantised.codes))
        if abs(used - words) <= tolerance * words:
            return quantised
        if used <= words:
            best = quantised
            if used >= (1 - UNUSED) * words or step == least:
                break
        if best is not None and tries >= TRIES:
            break
        step += 32 * (used - words) / target.numel() + grid.rate * UNUSED / 2
        step = max(step, least)
    return best or quantised


def codes_on(scaling: Scaling, decide: Callable[[slice, Scaling], Tensor]) -> Tensor:
    """Return the codes, uint8 (out, in), of S on given scales. decide: as in `at_rate`."""
    codes = []
    for rows in tiles(len(scaling.scale), ROWS):
        part = scaling.of_rows(rows)
        codes.append(part.codes(decide(rows, part)))
    return torch.cat(codes)


def deviations_and_reach(target: Tensor, heights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root mean square of each input, and the step for which `REACH` is the largest
    code: (in,) each, with rows in units of their heights.
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
    """Return the binary logarithms of two steps: the step for which Gaussian entries would have a
    rate, and the shortest useful step.

    Below the shortest useful step, the largest code of every input would still be `REACH`, or some
    widths would not fit into float16.

    Args:
        deviations: the root mean square of each input, (in,). Inputs without weights take no bits.
        reach: the shortest step of each input, in units of its width, (in,).
        widths: the relative steps of the inputs, (in,).
    """
    used = reach > 0
    if not used.any():
        return 0.0, 0.0
    octaves = reach[used].log2()
    least = max(octaves.min().item(), octaves.max().item() - OCTAVES_OF_WIDTHS)
    spread = (deviations / widths)[used].log2().mean().item()
    step = spread + GAUSSIAN - rate * len(widths) / int(used.sum())
    return max(step, least), least
