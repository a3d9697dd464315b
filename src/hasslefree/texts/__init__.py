"""Texts: where they come from, and the segments that are drawn from them."""
