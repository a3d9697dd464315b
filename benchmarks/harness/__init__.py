"""What the benchmarks share. Calls into the insides of hasslefree stand here, and not in the scripts."""
