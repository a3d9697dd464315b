"""Layer plans, memory and time, computed from shapes before a compression starts."""
