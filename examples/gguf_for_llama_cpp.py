"""Write a compressed model for llama.cpp: python gguf_for_llama_cpp.py [MODEL [CONVERTER]]

It needs pip install ".[gguf]", and llama.cpp's convert_hf_to_gguf.py as CONVERTER or on the PATH.
"""

import sys
from importlib.resources import files

import hasslefree

model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
text = str(files("hasslefree.demo") / "calibration.jsonl")  # a small text of the package; real models need none
converter = sys.argv[2] if len(sys.argv) > 2 else None
options = {"calibration": text, "samples": 16, "seqlen": 256, "effort": "fast"}
recipe = hasslefree.Recipe(engine="llama.cpp", size="5.2bits", **options)  # each layer in a type of llama.cpp
hasslefree.compress(model, "compressed", recipe, overwrite=True)
hasslefree.export("compressed", "compressed.gguf", to="gguf", converter=converter, overwrite=True)
print("llama-cli -m compressed.gguf")
