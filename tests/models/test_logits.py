"""What a model says for hidden states that are given."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from hasslefree.errors import ModelError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calls import BlockCall, block_calls, hooks
from hasslefree.models.logits import divergence, logits_of
from hasslefree.models.streaming import Weights
from tests.tiny_models import FAMILIES, build, logits, segments


def last_states(model, blocks, segment):
    """What the last block puts out: (1, tokens, width)."""
    found = []

    def keep(module, args, output):
        found.append(output[0] if isinstance(output, tuple) else output)

    with hooks([blocks.modules[-1].register_forward_hook(keep)]):
        logits(model, segment[None])
    return found[0]


def prepared(family, dtype=torch.float32, **changes):
    model = build(family, dtype, **changes)
    blocks = find_blocks(model)
    return model, blocks, block_calls(model, blocks, segments()[:1], Weights(model, model.device))


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "bamba", "rwkv"])
def test_the_states_decide_and_not_the_text(family):
    """Oracle: the model itself, on the text that the states come from."""
    model, blocks, calls = prepared(family)
    here, there = segments()[:2]
    of_here, of_there = logits(model, here[None])[0], logits(model, there[None])[0]
    assert torch.equal(logits_of(model, blocks, calls, here, last_states(model, blocks, there)), of_there)
    assert torch.equal(logits(model, here[None])[0], of_here), "the blocks run again"


def test_a_block_whose_forward_was_replaced_keeps_its_own():
    model, blocks, calls = prepared("llama")
    own = blocks.modules[0].forward
    blocks.modules[0].forward = lambda *args, **kwargs: own(*args, **kwargs)
    replaced = blocks.modules[0].forward
    logits_of(model, blocks, calls, segments()[0], last_states(model, blocks, segments()[1]))
    assert blocks.modules[0].forward is replaced
    assert "forward" not in blocks.modules[1].__dict__


@pytest.mark.parametrize("cap", [None, 0.01])
def test_bfloat16_does_not_round_the_logits(cap):
    """Oracle: the product with the head in float64, and what this family does to it after."""
    model, blocks, calls = prepared("gemma3_text", torch.bfloat16, final_logit_softcapping=cap)
    states = last_states(model, blocks, segments()[1])
    with torch.no_grad():
        rows = model.model.norm(states)[0].double()
    expected = rows @ model.lm_head.weight.double().T
    expected = expected if cap is None else cap * torch.tanh(expected / cap)
    found = logits_of(model, blocks, calls, segments()[0], states)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_bias_of_the_head_is_added():
    """Oracle: the same head in float32."""
    model, blocks, calls = prepared("llama", torch.bfloat16)
    with torch.no_grad():
        bias = torch.nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.bfloat16))
    model.lm_head.bias = bias
    states = last_states(model, blocks, segments()[1])
    found = logits_of(model, blocks, calls, segments()[0], states)
    with torch.no_grad():
        expected = F.linear(model.model.norm(states)[0].float(), model.lm_head.weight.float(), bias.float())
    torch.testing.assert_close(found, expected)


def test_what_the_configuration_asks_of_the_blocks_is_not_asked():
    """Routers, attentions and hidden states would come from blocks that do not run."""
    model, blocks, calls = prepared("mixtral")
    states = last_states(model, blocks, segments()[1])
    before = logits_of(model, blocks, calls, segments()[0], states)
    model.config.output_router_logits = model.config.output_hidden_states = True
    assert torch.equal(logits_of(model, blocks, calls, segments()[0], states), before)
    assert model.config.output_router_logits is True
    assert model.config.output_hidden_states is True


def test_a_head_of_another_kind_speaks_for_itself():
    """Oracle: the head on the last norm's output."""

    class Scaled(torch.nn.Linear):
        def forward(self, rows):
            return F.linear(rows, F.normalize(self.weight))

    model, blocks, calls = prepared("llama", torch.bfloat16)
    model.lm_head = Scaled(32, 64, bias=False, dtype=torch.bfloat16)
    states = last_states(model, blocks, segments()[1])
    with torch.no_grad():
        expected = model.lm_head(model.model.norm(states))[0]
    assert torch.equal(logits_of(model, blocks, calls, segments()[0], states), expected)


def test_a_model_without_a_head_is_refused():
    model = build("llama").model
    blocks = find_blocks(model)
    with pytest.raises(ModelError, match="LlamaModel has no output head.*allocate='uniform'"):
        logits_of(model, blocks, [BlockCall((), {})] * 2, segments()[0], torch.zeros(1, 16, 32))


def kl(found, wanted):
    """Σ KL(wanted ‖ found) by its definition, in float64."""
    here, there = (F.log_softmax(each.double(), -1) for each in (found, wanted))
    return float((there.exp() * (there - here)).sum())


@given(scale=st.sampled_from([1e-4, 1e-2, 1.0, 5.0, 100.0]), seed=st.integers(0, 50))
def test_the_divergence_is_that_of_the_definition_however_small(scale, seed):
    """In float32 the definition itself has no digit right where logits are 1e-4 apart."""
    generator = torch.Generator().manual_seed(seed)
    wanted = 3 * torch.randn(300, 64, generator=generator)
    found = wanted + scale * torch.randn(300, 64, generator=generator)
    known = F.log_softmax(wanted, -1)
    assert divergence(found, known) == pytest.approx(kl(found, wanted), rel=5e-3)
    assert divergence(wanted, known) == pytest.approx(0.0, abs=1e-8)
    assert divergence(wanted + 7, known) == pytest.approx(0.0, abs=1e-8)


def test_the_divergence_of_what_is_all_but_sure():
    """Oracle: the definition. Probabilities that are zero in float32 make no NaN, tokens that both rule out no more."""
    sure = torch.tensor([[0.0, -120.0, -120.0, -110.0]])
    assert divergence(torch.zeros(1, 4), F.log_softmax(sure, -1)) == pytest.approx(math.log(4))
    assert divergence(sure, F.log_softmax(torch.zeros(1, 4), -1)) == pytest.approx(kl(sure, torch.zeros(1, 4)))
    masked = torch.tensor([[1.0, 2.0, -math.inf]])
    assert divergence(masked.flip(1).roll(-1, 1), F.log_softmax(masked, -1)) == pytest.approx(
        kl(torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 2.0]]))
    )
    assert math.isnan(divergence(torch.tensor([[math.nan, 0.0]]), F.log_softmax(torch.zeros(1, 2), -1)))
