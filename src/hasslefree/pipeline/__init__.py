"""A whole compression: its estimate, and the work itself, block by block."""
