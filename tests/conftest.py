"""The same examples and the same draws every time, however slow the machine: a red test is a change, not a draw."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws does not depend on the tests that its process ran before it."""
    torch.manual_seed(0)
