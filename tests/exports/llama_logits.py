"""Logits of a GGUF file in llama.cpp itself: LIBRARIES FILE < token ids as JSON > (tokens, vocabulary) as JSON.

LIBRARIES is a folder of llama.cpp's libraries. The package llama-cpp-py-sync, whose own libraries are not used, has
their declarations for cffi.
"""

import ctypes
import json
import sys
from pathlib import Path

from llama_cpp_py_sync._cffi_bindings import get_ffi

folder = Path(sys.argv[1])
base, ggml, llama = (next(folder.glob(name)) for name in ("libggml-base*.so", "libggml.v*.so", "libllama.v*.so"))
ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(ggml), mode=ctypes.RTLD_GLOBAL).ggml_backend_load_all_from_path(str(folder).encode())
ffi = get_ffi()
lib = ffi.dlopen(str(llama))
lib.llama_backend_init()
model = lib.llama_model_load_from_file(sys.argv[2].encode(), lib.llama_model_default_params())
if model == ffi.NULL:
    sys.exit(f"llama.cpp cannot load {sys.argv[2]}")
settings = lib.llama_context_default_params()
settings.n_ctx, settings.n_threads = 256, 1
context = lib.llama_init_from_model(model, settings)
vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
rows = []
for token in json.load(sys.stdin):
    tokens = ffi.new("llama_token[]", [token])  # the batch only points to them
    if lib.llama_decode(context, lib.llama_batch_get_one(tokens, 1)):
        sys.exit("llama.cpp cannot decode")
    rows.append(list(lib.llama_get_logits_ith(context, -1)[0:vocabulary]))
json.dump(rows, sys.stdout)
