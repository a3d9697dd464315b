"""Greedy tokens of vLLM, in a process of vLLM's own interpreter: nothing of hasslefree is imported here.

    PYTHON vllm_engine.py JOB.json RESULT.json

JOB holds the arguments of `vllm.LLM` (`engine`), `prompts` as lists of token ids, and `new_tokens`.
"""

import json
import sys
from importlib import metadata
from pathlib import Path


def main() -> None:
    import vllm

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = vllm.LLM(**job["engine"])
    sampling = vllm.SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling)
    versions = {"vllm": vllm.__version__, "transformers": metadata.version("transformers")}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "tokens": tokens}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
