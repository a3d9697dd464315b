"""README.md of the exported folders, in the Hub's format."""

from __future__ import annotations

_LOAD = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```
"""

_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("path/to/this/folder/base")
model = PeftModel.from_pretrained(base, "path/to/this/folder")  # is_trainable=True to train the adapter on
```

`base` alone is not the model: it lacks the low-rank part.
"""

_WHAT = {
    "dense": (
        "transformers",
        "Every compressed layer holds the sum of its sparse and its low-rank matrix as an ordinary weight. The model "
        "is as large as before its compression, and needs no library of its own.",
        _LOAD,
    ),
    "peft": (
        "peft",
        "A PEFT adapter with the low-rank matrices, and in `base` the model with the sparse ones as its weights.",
        _LOAD_ADAPTER,
    ),
    "base": (
        "transformers",
        "The sparse matrices alone, as the weights of a plain model. It is not the compressed model: the low-rank "
        "part is the adapter in the folder above.",
        _LOAD,
    ),
}


def export_card(kind: str, source: str, recorded: bool) -> str:
    """The card of one folder.

    Args:
        kind: "dense", "peft", or "base" for the base model of a "peft". source: the name of the compressed folder.
        recorded: compression.json lies in the exported folder.
    """
    library, what, load = _WHAT[kind]
    where = "compression.json" if kind != "base" else "../compression.json"
    record = f" `{where}` says of what model, and how it was made." if recorded else ""
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags:
- hasslefree
- sparse
- low-rank
---

# {source}, {kind}

Exported by hasslefree from a model of sparse + low-rank layers, `{source}`.{record}

{what}

## Load it

{load}"""
