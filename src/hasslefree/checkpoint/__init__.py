"""A compressed model on disk: written, resumed, checked, described and loaded."""
