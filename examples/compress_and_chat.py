"""Compress a model and chat with it: python compress_and_chat.py [MODEL]"""

import sys
from importlib.resources import files

from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree

model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
text = str(files("hasslefree.demo") / "calibration.jsonl")  # a small text of the package; real models need none
recipe = hasslefree.Recipe(bits=4, rank=16, effort="fast", calibration=text, samples=16, seqlen=256)
record = hasslefree.compress(model, "compressed", recipe, overwrite=True)
print(f"The layers take {record.stored_bytes / 1e6:.1f} MB instead of {record.dense_bytes / 1e6:.1f} MB.")

compressed = AutoModelForCausalLM.from_pretrained("compressed")
tokenizer = AutoTokenizer.from_pretrained("compressed")
print("Write a line, or press Ctrl-D to end.")
for line in sys.stdin:
    prompt = line.strip()
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    tokens = compressed.generate(**inputs, max_new_tokens=60, do_sample=False)
    print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
