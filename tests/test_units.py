"""Sizes and durations as they are shown."""

import pytest

from hasslefree.errors import BudgetError
from hasslefree.units import Size, duration

DAY = 86_400


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42, "42 s"), (119, "119 s"), (120, "2 min"), (7_000, "117 min"), (7_200, "2 h"),
     (7_500, "2 h 5 min"), (35_990, "10 h"), (47_000, "13 h"), (2 * DAY - 60, "48 h"), (2 * DAY, "2 days"),
     (1239.6 * 3600, "52 days")],
)  # fmt: skip
def test_durations_by_hand(seconds, text):
    assert duration(seconds) == text


def test_a_size_is_that_of_its_decimal_digits():
    """By hand; the nearest binary numbers are below."""
    assert Size.parse("1.001kB") == Size(1001)
    assert Size.parse("4.56bits").bytes_for(40_000) == 22_800
    assert int(4.56 * 40_000 / 8) == 22_799


def test_part_of_a_byte_is_no_size():
    """5.2 is meant as bits."""
    with pytest.raises(BudgetError, match=r"'5.2' has no unit; give size='5.2bits'"):
        Size.parse("5.2")
    assert Size.parse("5.2bits") == Size(5.2, True)
    assert Size.parse("2000000") == Size(2_000_000)
