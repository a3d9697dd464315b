"""Run other programs with the format registered in every Python process that they start."""
