"""The coder of symbols by Numba. Oracle: constriction's coder."""

import numpy as np
import pytest

from hasslefree.core import coder
from hasslefree.core.coder import CLASSES, MIDDLE, OCTAVES, STEPS, LibraryStack

BOTTOM = np.array([0, 1], np.uint32)


@pytest.fixture
def compiled():
    pytest.importorskip("numba", reason="needs hasslefree[fast]")
    from hasslefree.core.coder_numba import CompiledStack

    return CompiledStack


def draw(count, seed, classes=CLASSES):
    """Symbols and their classes, whose deviations they have; some of them are improbable."""
    generator = np.random.default_rng(seed)
    found = generator.integers(0, classes, count).astype(np.uint8)
    steps = generator.normal(size=count) * 2 ** (found / STEPS - OCTAVES)
    symbols = np.clip(np.rint(steps) + MIDDLE, 0, 255).astype(np.uint8)
    rare = generator.random(count) < 0.01
    symbols[rare] = generator.integers(0, 256, rare.sum())
    return symbols, found


@pytest.mark.parametrize("count", [0, 1, 2, 20_000])
def test_both_coders_write_and_read_the_same_words(compiled, count):
    drawn = [draw(count, 0), draw(count, 1, classes=1), (np.arange(256, dtype=np.uint8), np.full(256, 40, np.uint8))]
    library, ours = LibraryStack(BOTTOM), compiled(BOTTOM)
    for symbols, classes in drawn:
        library.push(symbols, classes)
        ours.push(symbols, classes)
        assert np.array_equal(ours.words(), library.words())
    library, ours = LibraryStack(ours.words()), compiled(library.words())
    for symbols, classes in reversed(drawn):
        assert np.array_equal(library.pop(classes), symbols)
        assert np.array_equal(ours.pop(classes), symbols)
        assert np.array_equal(ours.words(), library.words())
    assert np.array_equal(ours.words(), BOTTOM)


@pytest.mark.parametrize("words", [[7], [0, 1], [1, 2, 3, 0xFFFFFFFF]])
def test_words_that_no_coder_wrote_give_the_same_symbols(compiled, words):
    """Also beyond the bottom of the stack."""
    words = np.array(words, np.uint32)
    _, classes = draw(500, 2)
    assert np.array_equal(compiled(words).pop(classes), LibraryStack(words).pop(classes))


@pytest.mark.parametrize("words", [[], [0], [5, 0]])
def test_words_of_no_stack_are_refused(compiled, words):
    words = np.array(words, np.uint32)
    with pytest.raises(ValueError, match="the last word"):
        compiled(words)
    if words.size:  # constriction begins on no words, too
        with pytest.raises(ValueError, match="zero word"):
            LibraryStack(words)


def test_the_coder_is_numba_s_where_it_is_installed(compiled, monkeypatch):
    assert isinstance(coder.stack_on(BOTTOM), compiled)
    monkeypatch.setattr(coder, "HAS_NUMBA", False)
    assert isinstance(coder.stack_on(BOTTOM), LibraryStack)
