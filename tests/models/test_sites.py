import torch

from hasslefree.models.sites import find_site, find_sites
from tests.tiny_models import build, logits, segments


def test_a_replaced_matrix_can_be_put_back():
    """Oracle: the model as it was."""
    for family in ("llama", "gpt2"):
        model, tokens = build(family), segments()
        before = logits(model, tokens)
        found = find_sites(model)
        assert {name: find_site(model, name) for name in found} == found
        for site in found.values():
            site.replace(torch.nn.Linear(site.shape[1], site.shape[0]))
        assert not torch.equal(logits(model, tokens), before)
        for site in found.values():
            model.set_submodule(site.name, site.module)
        assert torch.equal(logits(model, tokens), before)
