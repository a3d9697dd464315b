"""Layer plans, memory and time, decided from shapes before the work begins."""
