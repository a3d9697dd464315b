"""The description of a layer without its values."""

from hasslefree.packed.spec import LayerSpec


def test_rank_0_has_no_coded_factors():
    spec = LayerSpec("2:4", (10, 24), 0, 120, factor_bits=8)
    assert spec.factor_bits is None
    assert set(spec.tensors()) == {"values", "positions"}
