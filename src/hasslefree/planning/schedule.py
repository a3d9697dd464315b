"""The settings of training, and the amounts of text for training and for the final check."""

import math
from dataclasses import dataclass

# Training segments per validation segment.
TRAINING_PER_VALIDATION = 16
# The most passes over a short text.
MOST_PASSES = 3
# Tokens held out to measure perplexity, the most held-out segments, and the number of tokens whose
# predictions are in memory at a time.
HELD_OUT_TOKENS = 4096
HELD_OUT_SEGMENTS = 32
HELD_OUT_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of training.

    Args:
        learning_rate: at the peak, times the root mean square of each tensor: a step changes an
            entry by that share of a typical one, whatever the units of the tensor.
        warm_up: share of the steps over which the rate grows linearly; afterwards it falls along
            half a cosine to zero.
        retreats: the most restarts with a third of the rate, if the first validation is much worse
            than before training: the effect of a step on the output grows with the width.
        batch: tokens per step.
        validations: number of validations during training.
    """

    learning_rate: float = 0.0015
    warm_up: float = 0.05
    retreats: int = 2
    batch: int = 2048
    validations: int = 4

    def rate(self, step: float, steps: float) -> float:
        """The learning rate in a step, as a share of the peak. step, steps: in steps or seconds."""
        warm = self.warm_up * steps
        if step + 1 < warm:
            return (step + 1) / warm
        progress = (step + 1 - warm) / max(steps - warm, 1)
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    def tokens(self, seqlen: int) -> int:
        """Tokens per step: whole segments, at least one."""
        return max(self.batch // seqlen, 1) * seqlen


def segments_for(tokens: int, seqlen: int) -> int:
    """The number of segments for this number of training tokens, with validation segments."""
    training = math.ceil(tokens / seqlen)
    return training + math.ceil(training / TRAINING_PER_VALIDATION)


def trained_of(segments: int) -> int:
    """The number of these segments used for training; the others are for validation."""
    return segments * TRAINING_PER_VALIDATION // (TRAINING_PER_VALIDATION + 1)


def passes_over(
    segments: int,
    tokens: int,
    seqlen: int,
) -> int:
    """Number of passes over a text of so many segments that read about `tokens` training tokens."""
    tokens_per_pass = max(trained_of(segments), 1) * seqlen
    passes = round(tokens / tokens_per_pass)
    return min(max(passes, 1), MOST_PASSES)


def segments_held_out(seqlen: int) -> int:
    """The number of segments held out to measure perplexity, if the text has enough.

    Args:
        seqlen: tokens per segment.
    """
    return min(math.ceil(HELD_OUT_TOKENS / seqlen), HELD_OUT_SEGMENTS)
