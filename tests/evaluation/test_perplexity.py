import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import perplexity
from hasslefree.errors import CalibrationError, NonFiniteError
from tests.tiny_models import build, segments


def by_the_guide(model, tokens, window):
    """The loop of https://huggingface.co/docs/transformers/perplexity, written from its description: the model's own
    loss on labels, weighted by the number of labels that it averaged over."""
    total, count = 0.0, 0
    for start in range(0, len(tokens), window):
        piece = tokens[start : start + window][None]
        if piece.shape[1] < 2:
            continue
        with torch.no_grad():
            loss = model(input_ids=piece, labels=piece).loss
        total += loss.double().item() * (piece.shape[1] - 1)
        count += piece.shape[1] - 1
    return math.exp(total / count), count


@pytest.mark.parametrize("length", [2, 16, 17, 18, 100])
@pytest.mark.parametrize("batch", [1, 4])
def test_it_is_that_of_the_guide(length, batch):
    model = build("llama", initializer_range=0.5)
    tokens = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length))
    expected, count = by_the_guide(model, tokens, 16)
    found = perplexity(model, tokens, 16, batch)
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert (found.scored, found.tokens) == (count, length)
    assert length < 16 or found.perplexity > 70, "the model is too flat to tell one window from another"


@given(st.integers(16, 70), st.none() | st.integers(1, 5), st.booleans())
@settings(max_examples=20)
def test_only_the_windows_that_were_asked_for(length, windows, remainder):
    """Oracle: the guide's loop over a text that holds nothing else."""
    model = build("llama", initializer_range=0.5)
    tokens = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length))
    kept = tokens[: 16 * min(length // 16, windows or 99)] if not remainder else tokens[: 16 * (windows or 99)]
    expected, count = by_the_guide(model, kept, 16)
    found = perplexity(model, tokens, 16, 2, windows=windows, remainder=remainder)
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert (found.scored, found.tokens) == (count, len(kept))


def test_too_little_text():
    for tokens, window, remainder, message in [
        (torch.arange(3, 18), 16, False, "15 tokens do not fill one window of 16"),
        (torch.tensor([1]), 16, True, "text of at least 2 tokens, got 1"),
        (torch.arange(3, 40), 1, True, "window of at least 2 tokens, got 1"),
    ]:
        with pytest.raises(CalibrationError, match=message):
            perplexity(build("llama"), tokens, window, remainder=remainder)


def test_the_loss_of_few_logits_at_a_time_is_the_same(monkeypatch):
    model = build("llama", initializer_range=0.5)
    tokens = segments()[0]
    whole = perplexity(model, tokens, 16).perplexity
    monkeypatch.setattr("hasslefree.evaluation.run.ENTRIES", 3 * 64)  # three tokens of the vocabulary of 64
    assert perplexity(model, tokens, 16).perplexity == pytest.approx(whole, rel=1e-6)


def test_the_loss_is_computed_in_float32():
    """Oracle: the log-softmax of the same bfloat16 logits in float64."""
    model = build("llama", torch.bfloat16, initializer_range=0.5)
    tokens = segments(1, 16)[0]
    with torch.no_grad():
        log_p = model(input_ids=tokens[None]).logits[0, :-1].double().log_softmax(-1)
    expected = (-log_p.gather(1, tokens[1:, None]).mean()).exp().item()
    assert perplexity(model, tokens, 16).perplexity == pytest.approx(expected, rel=1e-5)


def test_nan_is_an_error():
    model = build("llama")
    for scale in (1e6, float("nan")):  # the first gives a loss of thousands of nats, whose exponential is infinite
        with torch.no_grad():
            model.model.norm.weight *= scale
        with pytest.raises(NonFiniteError, match="gives NaN or Inf"):
            perplexity(model, torch.arange(3, 40), 16)
