"""The plan of every layer, from shapes alone."""

from __future__ import annotations

import pytest

from hasslefree import Recipe
from hasslefree.errors import BudgetError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites
from hasslefree.planning.plan import make_plan
from tests.tiny_models import build


def test_the_largest_rank_is_that_of_the_narrowest_layer():
    blocks = find_blocks(build("llama"))
    limits = [min(site.shape) for block in blocks.modules for site in find_sites(block).values()]
    assert min(limits) < limits[0]
    plan = make_plan(blocks, Recipe(rank=min(limits)).resolve(with_text=False))
    assert {layer.spec.rank for plans in plan for layer in plans.values()} == {min(limits)}
    with pytest.raises(BudgetError, match=rf"use rank={min(limits)} or less .*k_proj"):
        make_plan(blocks, Recipe(rank=min(limits) + 1).resolve(with_text=False))
