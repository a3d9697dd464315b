"""Training of a whole compressed model against the predictions of the dense one."""
