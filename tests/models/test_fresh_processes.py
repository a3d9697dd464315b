"""Compressed folders in processes that know nothing of how they were made."""

import json
import subprocess
import sys

import torch
from transformers import AutoConfig, PreTrainedModel

import hasslefree
from hasslefree import Recipe
from hasslefree.exports.export import export
from hasslefree.models.load import auto_class
from tests.models.test_multimodal import MODELS
from tests.tiny_models import MIXTURE, MIXTURES, ROTARY, logits, segments

FOLDERS = {
    "gpt_oss": MIXTURE | MIXTURES["gpt_oss"],
    "qwen3_next": MIXTURE
    | {
        "num_experts": 4, "shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "falcon": ROTARY | {"new_decoder_architecture": True, "num_kv_heads": 2},  # a linear layer of its own kind
    "llama4": MODELS["llama4"],
}  # fmt: skip

# Load, predict, generate, save and load again; prints the logits of the last token.
SCRIPT = """
import json, sys
{first}
import torch, transformers
transformers.logging.set_verbosity_error()
found = {{}}
for folder in sys.argv[1:]:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder)
    tokens = torch.tensor({tokens})
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    generated = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape[1] == tokens.shape[1] + 3
    model.save_pretrained(folder + "-again")
    again = type(model).from_pretrained(folder + "-again")
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens, use_cache=False).logits, logits)
    found[folder] = logits[0, -1].tolist()
assert ("hasslefree" in sys.modules) == {known}
print(json.dumps(found))
"""


def made(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **FOLDERS[family])
    config.architectures = {"llama4": ["Llama4ForConditionalGeneration"]}.get(family)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():  # also those that a fresh model leaves empty
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name)
    return model


def last_logits(folders, known):
    script = SCRIPT.format(first="import hasslefree" if known else "", tokens=segments(1).tolist(), known=known)
    command = [sys.executable, "-c", script, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.tensor(row) for row in json.loads(done.stdout.splitlines()[-1]).values()]


def test_mixtures_hybrids_and_models_that_see_load_anywhere(tmp_path):
    """Oracle: the model in memory; the dense exports load in a process that does not know hasslefree."""
    expected = []
    for family in FOLDERS:
        model = made(family)
        recipe = Recipe(rank=2, method="eora")
        hasslefree.compress(model, tmp_path / family, recipe, segments=segments())
        export(tmp_path / family, tmp_path / "dense" / family, "dense")
        expected.append(logits(model, segments(1))[0, -1])
    for known, root in ((True, tmp_path), (False, tmp_path / "dense")):
        found = last_logits([root / family for family in FOLDERS], known)
        for family, one, other in zip(FOLDERS, found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=f"{family}, {root}")
