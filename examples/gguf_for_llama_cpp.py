"""Write a compressed model for llama.cpp: LLAMA_CPP=path/to/llama.cpp python gguf_for_llama_cpp.py [MODEL]

It needs a clone of llama.cpp, and pip install "hasslefree[gguf]" sentencepiece for its converter.
"""

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from huggingface_hub import snapshot_download

import hasslefree

model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
text = str(files("hasslefree.demo") / "calibration.jsonl")  # a small text of the package; use "c4" for real models
converter = Path(os.environ.get("LLAMA_CPP", "llama.cpp")) / "convert_hf_to_gguf.py"
if not converter.exists():
    sys.exit(f"{converter} does not exist; clone https://github.com/ggml-org/llama.cpp and set LLAMA_CPP to its folder")
folder = model if Path(model).is_dir() else snapshot_download(model)

options = {"calibration": text, "samples": 16, "seqlen": 256, "effort": "fast"}
recipe = hasslefree.Recipe(engine="llama.cpp", bits=4, rank=16, **options)  # a grid that llama.cpp holds exactly
hasslefree.compress(folder, "compressed", recipe, overwrite=True)
subprocess.run([sys.executable, converter, folder, "--outfile", "dense.gguf", "--outtype", "bf16"], check=True)
hasslefree.export("compressed", "exported", to="gguf", template="dense.gguf", overwrite=True)
print("llama-cli -m exported/model.gguf --lora exported/adapter.gguf")
