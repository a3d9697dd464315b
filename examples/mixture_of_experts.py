"""Compress a mixture of experts, here a tiny one with random weights: python mixture_of_experts.py [MODEL]"""

import sys
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import hasslefree

recipe = hasslefree.Recipe(pattern="2:4", rank=4, effort="fast", samples=16, seqlen=128)
if len(sys.argv) > 1:  # a real one: allenai/OLMoE-1B-7B-0924-Instruct has 7 B parameters
    text = str(files("hasslefree.demo") / "calibration.jsonl")
    recipe = hasslefree.Recipe(pattern="2:4", rank=32, effort="fast", calibration=text, samples=64, seqlen=256)
    record = hasslefree.compress(sys.argv[1], "compressed", recipe, overwrite=True)
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, num_local_experts=4))
    tokens = torch.randint(256, (16, 128))  # a model that has no tokenizer is calibrated on tokens
    record = hasslefree.compress(model, "compressed", recipe, segments=tokens, overwrite=True)

for layer in record.layers:
    print(f"{layer.name}: relative error {layer.relative_error:.3f}")
print("kept dense:", ", ".join(record.dense))
