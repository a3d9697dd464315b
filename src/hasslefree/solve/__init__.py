"""One layer: a weight and the Gram of its inputs become S + L."""
