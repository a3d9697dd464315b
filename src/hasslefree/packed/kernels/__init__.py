"""Products with packed S. `choose` names the backend, `product` runs it; Numba and Triton are imported when used."""

from hasslefree.packed.kernels.backends import (
    BACKENDS,
    Case,
    choose,
    layer_product,
    product,
    takes_layers,
    wants_numba,
)

__all__ = ["BACKENDS", "Case", "choose", "layer_product", "product", "takes_layers", "wants_numba"]
