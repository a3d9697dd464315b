"""Compress a model and generate with vLLM: python serve_with_vllm.py [MODEL]

It needs vLLM, of a version that docs/howto/serve.md lists. `vllm serve compressed` starts a server instead.
"""

import sys
from importlib.resources import files

from vllm import LLM, SamplingParams

import hasslefree

if __name__ == "__main__":  # vLLM starts processes that import this file
    model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    text = str(files("hasslefree.demo") / "calibration.jsonl")  # a small text of the package; real models need none
    # The kernels of vLLM read 4 bits on every device. On a GPU, leave out bits for the default size.
    recipe = hasslefree.Recipe(engine="vllm", bits=4, effort="fast", calibration=text, samples=16, seqlen=256)
    hasslefree.compress(model, "compressed", recipe, overwrite=True)

    llm = LLM("compressed")
    for output in llm.generate(["Return a new dictionary"], SamplingParams(temperature=0, max_tokens=40)):
        print(output.prompt + output.outputs[0].text)
