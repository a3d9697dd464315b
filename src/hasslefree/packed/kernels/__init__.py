"""Products with packed S. `choose` names the backend, `product` runs it; Numba and Triton are imported when used."""

from hasslefree.packed.kernels.backends import BACKENDS, Case, choose, product, wants_numba

__all__ = ["BACKENDS", "Case", "choose", "product", "wants_numba"]
