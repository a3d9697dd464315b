"""Products with packed S. `choose` names the backend, `product` runs it; Numba and Triton are imported when used."""

from hasslefree.packed.kernels.backends import (
    BACKENDS,
    Case,
    LayerTensors,
    choose,
    layer_products,
    product,
    takes_layers,
    wants_numba,
)

__all__ = [
    "BACKENDS",
    "Case",
    "LayerTensors",
    "choose",
    "layer_products",
    "product",
    "takes_layers",
    "wants_numba",
]
