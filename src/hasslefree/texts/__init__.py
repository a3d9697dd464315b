"""Read calibration and evaluation texts, and draw segments from them."""
