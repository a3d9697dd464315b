"""What a plug-in costs on a layer (out, in), for the estimates of `hasslefree plan`: a few declared
numbers.

Operations are `flops` · out · in². Memory besides W and H is float32 matrices: `squares` of in ×
in, `arrays` of out × in, and `THIN` of (out + in) × rank. The numbers are upper bounds that hold
for every shape: `python benchmarks/memory.py layer` measures them, and `make docs` checks that
every measurement is within 1.5 of its bound.
"""

from dataclasses import dataclass

FLOAT = 4
# Matrices (out + in, rank) of a method with a low-rank part.
THIN = 8
# Bytes that matrices cached for the next layer with the same input may take. On a CPU that is
# little, for the widest layers, which have the largest matrices, often have an input of their own.
CACHE = {"cpu": 1 << 27, "cuda": 1 << 31}


@dataclass(frozen=True)
class Cost:
    """What a plug-in takes on one layer. The defaults of `squares` and `arrays` are what every
    layer takes.

    Args:
        flops: operations over out · in², of a method in all, of a pruner or a low-rank solver per
            call. The product of W and H has 2; at out = in, an eigendecomposition has 9 and a thin
            SVD 26.
        squares, arrays: matrices (in, in) and (out, in).
        cached: matrices (in, in) that are kept for the next layer with the same input, while
            `CACHE` has room.
        unstated: names of the plug-ins that state no cost.
    """

    flops: float = 0.0
    squares: float = 1.0
    arrays: float = 8.5
    cached: int = 0
    unstated: tuple[str, ...] = ()

    def joined(self, other: "Cost", flops: float) -> "Cost":
        """The cost of two parts that run in turn. flops: of both together, as above."""
        squares, arrays = max(self.squares, other.squares), max(self.arrays, other.arrays)
        return Cost(
            flops, squares, arrays, max(self.cached, other.cached), self.unstated + other.unstated
        )

    def bytes(self, out: int, width: int, rank: int, device: str = "cpu") -> int:
        """An upper bound of the memory besides W and H for a layer (out, in). device: its type."""
        square = FLOAT * width**2
        numbers = self.arrays * out * width + THIN * (out + width) * rank
        return round(self.squares * square + FLOAT * numbers) + min(
            self.cached * square, cache_bytes(device)
        )


def cache_bytes(device: str) -> int:
    """Bytes that cached matrices may take on a type of device."""
    return CACHE.get(device, CACHE["cpu"])
