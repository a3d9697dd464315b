"""Which pattern a method or pruner can be tried with: not all take all."""

from hasslefree import Structured
from hasslefree.solve.methods import METHODS


def suited(plugin, pattern, width=16):
    """The pattern, or half of the channels where nothing but whole channels will do."""
    part = METHODS[plugin] if isinstance(plugin, str) else plugin
    whole = part.whole_channels and not isinstance(pattern, Structured)
    return Structured(width // 2) if whole else pattern
