"""A whole compression: what it will take, and the work itself, block by block."""
