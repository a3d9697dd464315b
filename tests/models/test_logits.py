"""What a model says for hidden states that are given."""

import pytest
import torch

from hasslefree.errors import ModelError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calls import hooks
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from tests.tiny_models import FAMILIES, build, logits, segments


def last_states(model, blocks, segment):
    """What the last block puts out: (1, tokens, width)."""
    found = []

    def keep(module, args, output):
        found.append(output[0] if isinstance(output, tuple) else output)

    with hooks([blocks.modules[-1].register_forward_hook(keep)]):
        logits(model, segment[None])
    return found[0]


def prepared(family):
    model = build(family)
    return model, Walk.open(model, find_blocks(model), Weights(model, model.device), segments(1))


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "bamba", "rwkv"])
def test_the_states_decide_and_not_the_text(family):
    """Oracle: the model itself, on the text that the states come from."""
    model, walk = prepared(family)
    here, there = segments()[:2]
    of_here, of_there = logits(model, here[None])[0], logits(model, there[None])[0]
    assert torch.equal(walk.logits(here, last_states(model, walk.blocks, there)), of_there)
    assert torch.equal(logits(model, here[None])[0], of_here), "the blocks run again"


def test_gradients_flow_to_the_states():
    """Oracle: autograd through the last norm and the head alone."""
    model, walk = prepared("llama")
    states = last_states(model, walk.blocks, segments()[1]).requires_grad_()
    found = walk.logits(segments()[0], states)
    expected = model.lm_head(model.model.norm(states))[0]
    one, other = (torch.autograd.grad(each.square().sum(), states)[0] for each in (found, expected))
    assert one.any()
    torch.testing.assert_close(one, other)


def test_what_the_configuration_asks_of_the_blocks_is_not_asked():
    """Routers, attentions and hidden states would come from blocks that do not run."""
    model, walk = prepared("mixtral")
    states = last_states(model, walk.blocks, segments()[1])
    before = walk.logits(segments()[0], states)
    model.config.output_router_logits = model.config.output_hidden_states = True
    assert torch.equal(walk.logits(segments()[0], states), before)
    assert model.config.output_router_logits is True
    assert model.config.output_hidden_states is True


def test_a_model_without_a_head_is_refused():
    model = build("llama").model
    walk = Walk.open(model, find_blocks(model), Weights(model, model.device), segments(1))
    with pytest.raises(ModelError, match="LlamaModel has no output head.*allocate='uniform' and match_predictions=0"):
        walk.logits(segments()[0], torch.zeros(1, 16, 32))
