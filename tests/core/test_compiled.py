"""Functions that Numba compiles."""

import logging

import pytest

pytest.importorskip("numba")

from numba.core.caching import CacheImpl

from hasslefree.core.compiled import compiled, log_uncached


def twice(x):
    return 2 * x


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_function_is_compiled_whether_or_not_it_can_be_kept(is_writable, monkeypatch, caplog):
    """Oracle: the function itself. A read-only container has no folder for a cache."""
    log_uncached.cache_clear()
    if not is_writable:
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with caplog.at_level(logging.WARNING):
        assert compiled()(twice)(21) == twice(21)
    assert ("set NUMBA_CACHE_DIR" in caplog.text) != is_writable
