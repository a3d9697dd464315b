"""The same examples every time, however slow the machine: a red test is a change, not a draw."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
