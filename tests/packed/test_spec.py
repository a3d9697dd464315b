"""The description of a layer without its values."""

import torch

from hasslefree.packed import layouts
from hasslefree.packed.spec import LayerSpec


def test_a_pattern_is_parsed_once_for_all_sizes(monkeypatch):
    """Oracle: a count of the calls of the parser. An allocation asks for the bytes of a layer at many ranks."""
    calls = []
    parse = layouts.parse_pattern
    monkeypatch.setattr(layouts, "parse_pattern", lambda name: calls.append(name) or parse(name))
    sizes = [LayerSpec("3:17", (34, 34), rank, 34 * 6).bytes(torch.bfloat16) for rank in range(20)]
    assert len(set(sizes)) == 20
    assert calls == ["3:17"]


def test_rank_0_has_no_coded_factors():
    spec = LayerSpec("2:4", (10, 24), 0, 120, factor_bits=8)
    assert spec.factor_bits is None
    assert set(spec.tensors()) == {"values", "positions"}
