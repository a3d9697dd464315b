"""The entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes.

A vLLM without the names imported here logs that the plugin cannot be loaded, and still serves other models.
"""

from __future__ import annotations

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

from hasslefree.folder.read import QUANT_METHOD
from hasslefree.serve.config import ServedConfig


def register() -> None:
    """Make the folders known to vLLM. Calling it again does nothing.

    An unsuitable version of vLLM is an error when a compressed folder is served, and not here: this runs for every
    model that vLLM serves.
    """
    if QUANT_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(QUANT_METHOD)(ServedConfig)
