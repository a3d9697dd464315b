"""Products with packed S. `backends.choose` chooses the backend."""
