"""The tables of README.md and docs/: a specification of each, and what writes them."""
