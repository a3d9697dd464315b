"""Triton kernels for layers S + u v and a few tokens, on CUDA: S is read packed, once for all tokens.

Not measured on a GPU: their results are tested in Triton's interpreter, and `benchmarks/gpu_kernels.py` compiles them.
"""

from hasslefree.packed.kernels.triton.launch import MOST_TOKENS, decode

__all__ = ["MOST_TOKENS", "decode"]
