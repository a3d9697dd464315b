"""Fine-tune L as a LoRA adapter on the sparse S, which stays fixed: python fine_tune_low_rank.py [MODEL]

It needs pip install ".[peft]".
"""

import sys
from importlib.resources import files

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree

model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
text = str(files("hasslefree.demo") / "calibration.jsonl")  # a small text of the package; real models need none
recipe = hasslefree.Recipe(pattern="2:4", rank=16, effort="fast", calibration=text, samples=16, seqlen=256)
hasslefree.compress(model, "compressed", recipe, overwrite=True)
hasslefree.export("compressed", "adapter", to="peft", overwrite=True)

base = AutoModelForCausalLM.from_pretrained("adapter/base")
tuned = PeftModel.from_pretrained(base, "adapter", is_trainable=True)
tokenizer = AutoTokenizer.from_pretrained("adapter")
own_text = (files("hasslefree.demo") / "held_out.txt").read_text(encoding="utf-8")  # put your own text here
ids = tokenizer(own_text[:20_000], return_tensors="pt").input_ids[0]
windows = ids[: len(ids) // 256 * 256].view(-1, 256)
optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-4)
for step, window in enumerate(windows):
    loss = tuned(input_ids=window[None], labels=window[None]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} of {len(windows)}: loss {loss.item():.3f}")
tuned.save_pretrained("tuned")  # load it as before: PeftModel.from_pretrained(base, "tuned")
