"""Products with packed S. `backends.choose` names the backend, `backends.product` runs it."""
