"""Train the small Llama that ships inside the package, on the documentation that CPython carries.

    python scripts/train_demo_model.py [--out FOLDER --report FILE]
    python scripts/train_demo_model.py --shape mixture --epochs 2 --out FOLDER --report FILE

The text is what every CPython installation holds: the topics behind ``help()`` and the docstrings of the
standard library, split by whole documents. Under ``--out`` appear ``model/``, a Hugging Face folder with
bfloat16 weights; ``calibration.jsonl``, documents of the training part; and ``held_out.txt``, documents the
model never saw. ``--report`` describes the run.

``--shape mixture`` trains a small mixture of experts for benchmarks, in the layout of Qwen3-MoE: eight experts, two
a token. The source code of the standard library is part of its text, too. It does not ship.
"""

import argparse
import ast
import copy
import json
import math
import os
import platform
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

ROOT = Path(__file__).resolve().parents[1]
NOT_DOCUMENTATION = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
BOS, EOS = "<s>", "</s>"
WINDOW = 256
RUN_OF_WORDS = 12  # a run of this many equal words counts as copied text
SHORTEST = 300  # characters; shorter documents are little more than a heading
COMMON = {
    "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHAPES = {
    "demo": LlamaConfig(vocab_size=2048, intermediate_size=512, **COMMON),
    "mixture": Qwen3MoeConfig(
        vocab_size=4096, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=416, norm_topk_prob=True,
        router_aux_loss_coef=0.01, **COMMON,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One text: a documentation topic, all docstrings of one module, or its source."""

    source: str
    name: str
    text: str

    def runs(self) -> set[str]:
        """Every run of RUN_OF_WORDS words in the text, the unit in which copying is noticed."""
        words = self.text.split()
        return {" ".join(words[i : i + RUN_OF_WORDS]) for i in range(len(words) - RUN_OF_WORDS + 1)}


def docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the docstrings at and below a node, each under its qualified name, in source order."""
    if docstring := ast.get_docstring(node):  # type: ignore[arg-type]
        yield f"{name}\n\n{docstring.strip()}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(child, f"{name}.{child.name}")


def read_documents(sources: bool) -> list[Document]:
    """Collect the topics and the docstrings of the running CPython. sources: and the source of its modules."""
    documents = [Document("topics", name, text.strip()) for name, text in sorted(topics.items())]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if NOT_DOCUMENTATION & set(relative.parts):
            continue
        tree = ast.parse(path.read_bytes())
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        documents.append(Document("docstrings", name, "\n\n\n".join(docstrings(tree, name))))
        if sources:
            documents.append(Document("sources", name, path.read_text(encoding="utf-8", errors="replace")))
    return [document for document in documents if len(document.text) >= SHORTEST]


def without_copies(documents: list[Document]) -> list[Document]:
    """Drop documents that mostly repeat longer ones, as many topics are sections of larger topics."""
    kept: list[Document] = []
    seen: set[str] = set()
    for document in sorted(documents, key=lambda d: (-len(d.text), d.source, d.name)):
        runs = document.runs()
        if len(runs & seen) <= len(runs) / 2:
            kept.append(document)
            seen |= runs
    return kept


def take(candidates: list[Document], size: int) -> list[Document]:
    """Remove documents of about `size` characters from the end of the candidates and return them."""
    taken, room = [], size
    for document in reversed(candidates):
        # No single document may be most of its part: a part should cover many subjects.
        if len(document.text) <= min(room, 0.4 * size):
            taken.append(document)
            room -= len(document.text)
    candidates[:] = [document for document in candidates if document not in taken]
    return taken


def split_documents(documents: list[Document], held_out_size: int, seed: int) -> dict[str, list[Document]]:
    """Return the training, validation and held-out documents, each of both sources.

    Only documents that share no run of words with any other are set apart, so that neither part
    can be answered from memory and no training text has to be dropped for its sake.
    """
    times_seen = Counter(run for document in documents for run in document.runs())
    alone = [d for d in documents if all(times_seen[run] == 1 for run in d.runs())]
    random.Random(seed).shuffle(alone)
    apart: dict[str, list[Document]] = {"validation": [], "held_out": []}
    # Topics are the best prose, so they get a larger share of the held-out text than of the whole. Docstrings share
    # their words with the sources, where those are there.
    rest = "sources" if any(document.source == "sources" for document in documents) else "docstrings"
    for source, share in (("topics", 0.4), (rest, 0.6)):
        candidates = [d for d in alone if d.source == source]
        apart["held_out"] += take(candidates, round(share * held_out_size))
        apart["validation"] += take(candidates, round(share * held_out_size / 2))
    train = [d for d in documents if d not in apart["validation"] + apart["held_out"]]
    random.Random(seed + 1).shuffle(train)
    return {"train": train, **apart}


def train_tokenizer(documents: list[Document], shape: PretrainedConfig) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; it adds no special tokens of its own accord."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size, special_tokens=[BOS, EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS,
        model_max_length=shape.max_position_embeddings, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def loss_of(model: PreTrainedModel, windows: torch.Tensor, balance: float = 0.0) -> torch.Tensor:
    """Mean negative log-likelihood, in nats, of every token but the first of each window.

    balance: how much the loss of experts that are not used alike counts beside it.
    """
    output = model(input_ids=windows, use_cache=False, **({"output_router_logits": True} if balance else {}))
    logits = output.logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    return loss + balance * output.aux_loss if balance else loss


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Mean loss over consecutive full windows that do not overlap."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    return torch.stack([loss_of(model, window[None]) for window in windows]).mean().item()


def train(
    model: PreTrainedModel, tokens: torch.Tensor, validation: torch.Tensor, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Train in place, leave the weights of the best validation loss, and return the loss curve."""
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, (0.9, 0.95), weight_decay=0.1)
    n_windows = len(tokens) // WINDOW - 1  # one window less leaves room for a random offset
    n_steps = options.epochs * math.ceil(n_windows / options.batch)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, options.warm_up, n_steps)
    balance = getattr(model.config, "router_aux_loss_coef", 0.0)
    curve, best, started = [], math.inf, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        # A new offset each epoch cuts the text elsewhere, so no window is ever seen twice as it is.
        offset, total = int(torch.randint(WINDOW, (1,))), 0.0
        windows = tokens[offset : offset + n_windows * WINDOW].view(-1, WINDOW)
        for batch in torch.split(windows[torch.randperm(n_windows)], options.batch):
            loss = loss_of(model, batch, balance)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        score = evaluate(model, validation)
        curve.append({"epoch": epoch, "train": round(total / n_windows, 4), "validation": round(score, 4)})
        seconds = time.perf_counter() - started
        print(curve[-1], f"{seconds:.0f} s, {epoch * windows.numel() / seconds:.0f} tokens/s", flush=True)
        if score < best:
            best, best_weights = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return curve


def save_texts(out: Path, train: list[Document], held_out: list[Document]) -> None:
    """Write the held-out text, and 350 kB of long training documents for calibration."""
    (out / "held_out.txt").write_text("\n\n\n".join(d.text for d in held_out) + "\n", encoding="utf-8")
    long_documents = [document for document in train if len(document.text) >= 4000]
    lines = [json.dumps({"text": d.text}, ensure_ascii=False) + "\n" for d in take(long_documents, 350_000)]
    (out / "calibration.jsonl").write_text("".join(lines), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Read the command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "src/hasslefree/demo")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks/results/demo_training.json")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the peak")
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--held-out-size", type=int, default=100_000, help="characters")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Split the text, train, save, and report."""
    options = parse_options()
    torch.set_num_threads(2)  # the order of sums, and with it the result, depends on the number
    torch.manual_seed(options.seed)
    shape = SHAPES[options.shape]
    documents = without_copies(read_documents(sources=options.shape == "mixture"))
    parts = split_documents(documents, options.held_out_size, options.seed)
    tokenizer = train_tokenizer(parts["train"], shape)
    tokens = {k: torch.tensor(tokenizer.encode(EOS.join(d.text for d in v))) for k, v in parts.items()}
    model = AutoModelForCausalLM.from_config(shape)
    print(f"{len(tokens['train'])} training tokens, {model.num_parameters()} parameters", flush=True)
    started = time.perf_counter()
    curve = train(model, tokens["train"], tokens["validation"], options)
    seconds = time.perf_counter() - started
    tokenizer.save_pretrained(options.out / "model")
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(options.out / "model")
    save_texts(options.out, parts["train"], parts["held_out"])
    # What counts is the shipped file, so the final figure is taken from the weights as they were rounded.
    saved = AutoModelForCausalLM.from_pretrained(options.out / "model", dtype=torch.float32)
    held_out = (options.out / "held_out.txt").read_text(encoding="utf-8")
    row = torch.tensor(tokenizer.encode(held_out))
    loss = evaluate(saved, row)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    report = {
        "machine": {"platform": platform.platform(), "cpu_count": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions},
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        | {"optimizer": "AdamW", "betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine"},
        "window": WINDOW,
        "parameters": model.num_parameters(),
        "documents": {part: len(documents) for part, documents in parts.items()},
        "tokens": {part: len(ids) for part, ids in tokens.items()},
        "seconds": round(seconds, 1),
        "curve": curve,
        "held_out_perplexity": round(math.exp(loss), 4),
        "held_out_bits_per_byte": round(loss / math.log(2) * len(row) / len(held_out.encode()), 4),
    }
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"held-out perplexity {report['held_out_perplexity']}")


if __name__ == "__main__":
    main()
