"""Several texts with shares, such as `c4:40% code:60%`, and the named mixture."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hasslefree.errors import CalibrationError

MIXED = "mixed"
# The texts of `mixed`, in per cent: web, encyclopedia, code, conversations, other languages, and
# text that the model generates.
MIXTURE = {
    "c4": 30.0,
    "wikipedia": 15.0,
    "code": 10.0,
    "python": 10.0,
    "chat": 15.0,
    "languages": 10.0,
    "self": 10.0,
}
# The tolerance of the sum of shares, in per cent: three shares of 33.3 % are accepted.
ROUNDING = 0.2
_SHARE = re.compile(r"(?P<name>.+):\s*(?P<share>\d{1,3}(\.\d{1,18})?)\s*%")
# The separator of texts in one string.
_BETWEEN = re.compile(r"(?<=%)[,\s]+")
# A malformed share.
_NUMBER = re.compile(r":[-\d.,%\s]*$")


def as_texts(given: Any) -> Any:
    """Normalise the field `calibration` of a recipe: a text, or a tuple ("c4:40%", "code:60%").

    Args:
        given: a text, several in a sequence, a mapping {"c4": "40%", "code": "60%"}, or a string
            "c4:40% code:60%".
    """
    if isinstance(given, Mapping):
        given = [f"{name}:{share}" for name, share in given.items()]
    if isinstance(given, str):
        parts = _BETWEEN.split(given.strip())
        if len(parts) == 1 or not all(map(_SHARE.fullmatch, parts)):
            return given
        given = parts
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"calibration must be a text, or texts with shares, got {given!r:.60}")
    if not all(isinstance(text, str) for text in given):
        raise ValueError(f"calibration must list texts such as 'c4:40%', got {given!r:.60}")
    if len(given) == 1:  # the command line gives a list of one string
        return as_texts(given[0])
    return tuple(given)


def shares_of(calibration: str | Sequence[str]) -> dict[str, float]:
    """The share of each text in the segments, by name. The shares add up to 1.

    Raises:
        CalibrationError: a share is missing, or the shares do not add up to 100 %.
    """
    if calibration == MIXED:
        return {name: share / 100 for name, share in MIXTURE.items()}
    if isinstance(calibration, str) and not _SHARE.fullmatch(calibration):
        return {calibration: 1.0}
    listed = [calibration] if isinstance(calibration, str) else calibration
    shares: dict[str, float] = {}
    for text in listed:
        match = _SHARE.fullmatch(text)
        if match is None:
            name = _NUMBER.sub("", text)
            raise CalibrationError(
                f"the text {text!r} has no share in per cent; give one, such as {name}:20%"
            )
        if match["name"] == MIXED:
            raise CalibrationError(
                f"{MIXED!r} takes no share, but {text!r} has one; leave out the share, or list"
                " other texts"
            )
        if float(match["share"]) == 0:
            raise CalibrationError(f"the share of the text {text!r} is 0; leave it out")
        if match["name"] in shares:
            raise CalibrationError(f"the text {match['name']!r} is named twice; add its shares")
        shares[match["name"]] = float(match["share"])
    total = sum(shares.values())
    if abs(total - 100) > ROUNDING:
        raise CalibrationError(
            f"the shares of the calibration texts add up to {total:g} %, not to 100 %:"
            f" {', '.join(listed)}"
        )
    return {name: share / total for name, share in shares.items()}


def counts_of(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Distribute `total` segments among texts in proportion to their shares, by the largest
    remainders.
    """
    counts = {name: int(share * total) for name, share in shares.items()}
    missing = total - sum(counts.values())
    remainders = {name: share * total - counts[name] for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: -remainders[name])[:missing]:
        counts[name] += 1
    return counts
