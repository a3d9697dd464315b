"""Products with packed S. `choose` names the way, `product` goes it; Numba and Triton are imported when used."""

from hasslefree.kernels.choose import WAYS, Case, choose, product, wants_numba

__all__ = ["WAYS", "Case", "choose", "product", "wants_numba"]
