"""Triton kernels for layers S + u v and a few tokens, on CUDA: S is read packed, once for all tokens.

| module | what it multiplies |
|---|---|
| `pairs` | tiles of 2:4 in 16 bits: one token selects its inputs, several go through the tensor cores |
| `groups` | tiles of any N:M that is stored as positions, in any floating dtype |
| `factors` | tiles of the dense factor v |
| `launch` | the two launches of a layer, or of several layers that read the same inputs |

Not measured on a GPU: their results are tested in Triton's interpreter, and `benchmarks/gpu_kernels.py` compiles them.
"""

from hasslefree.packed.kernels.triton.launch import MOST_TOKENS, decode

__all__ = ["MOST_TOKENS", "decode"]
