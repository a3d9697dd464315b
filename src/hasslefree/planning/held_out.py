"""The amount of text that is held out to measure the perplexity of a compression."""

import math

# Held-out tokens, the most segments, and the tokens whose predictions are in memory at a time.
TOKENS = 4096
SEGMENTS = 32
ROWS = 256


def segments_held_out(seqlen: int) -> int:
    """The number of segments that are held out, if the text has as many.

    Args:
        seqlen: tokens per segment.
    """
    return min(math.ceil(TOKENS / seqlen), SEGMENTS)
