"""Packed storage of S and L, and the layer that computes from it."""
