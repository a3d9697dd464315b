"""Allocation: the share of each layer in one budget of bits, ranks and non-zeros."""
