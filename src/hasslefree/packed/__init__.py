"""The bytes of S and L, and the layer that runs from them."""
