"""Mistakes of people who met the command line for the first time, and the sentence that each of them gets."""

import re

import datasets
import pytest
from huggingface_hub import constants

from hasslefree.demo.run import CALIBRATION, MODEL
from tests.cli.test_commands import run

COMPRESS = "The command is `hasslefree compress MODEL OUT`; `hasslefree compress --help` lists its options"
EXPORT = "The command is `hasslefree export OUT DEST --to FORMAT`; `hasslefree export --help` lists its options"
COMMANDS = "`hasslefree --help` lists the commands"
BUDGET = "method joint needs a budget: give a rank such as --rank 64 (0 for S alone), --ratio or --size"
# As a .jsonl file without documents of 512 tokens.
SHORT = "no document of the calibration text has 512 tokens: the longest of 1 has 7; use longer documents"
HELD = "is already quantised or compressed (hasslefree); start from the checkpoint that it was made from"
# What is typed, with MODEL for a dense folder and OUT for a compressed one → the sentence. NEW does not exist.
MISTAKES = {
    "compress MODEL": f"Missing argument 'OUT'. {COMPRESS}",
    "compress MODEL OUT": "exists and is not empty; use --overwrite, or give another folder",
    "compress MODEL --out NEW": f"No such option: --out. {COMPRESS}",
    "compress --model MODEL NEW": f"No such option: --model. {COMPRESS}",
    "compress MODEL NEW --bit 4": f"No such option: --bit. Did you mean --bits? {COMPRESS}",
    "compress MODEL NEW --rank": f"Option '--rank' requires an argument. {COMPRESS}",
    "compress MODEL NEW --overwrite=1": f"Option '--overwrite' does not take a value. {COMPRESS}",
    "--verbose=1 compress MODEL NEW": f"Option '--verbose' does not take a value. {COMMANDS}",
    "compres MODEL NEW": f"No such command 'compres'. Did you mean 'compress'? {COMMANDS}",
    "MODEL NEW": f"No such command 'MODEL'. Did you mean `hasslefree compress MODEL NEW`? {COMMANDS}",
    "meta/lama NEW": f"No such command 'meta/lama'. Did you mean `hasslefree compress meta/lama NEW`? {COMMANDS}",
    "serve OUT": f"No such command 'serve'. vLLM serves compressed folders: `vllm serve OUT`. {COMMANDS}",
    "compress MODEL NEW --size 5.2": "'5.2' has no unit; give --size 5.2bits for bits for each weight of the "
    "compressed layers, or bytes such as --size 150MB",
    "compress MODEL NEW --size 1GB": "the uncompressed model takes 3.9 MB, which is already within the size of 1.0 GB; "
    "give a smaller size",
    "compress MODEL NEW --size 100kB": "a size of 100.0 kB is too small: the least possible with method joint-grid is "
    "404.2kB (dense, entropy-coded, 1.5 bits, rank 0); use --size 404.2kB",
    "compress MODEL NEW --size 50%": "'50%' is not a size; give bytes of all weights, such as --size 150MB, 1.5GB or "
    "2000000, or bits for each weight of the compressed layers, such as --size 4.8bits",
    "compress MODEL NEW --bits 7": "bits must be one of 2, 3, 4, 5, 6, 8, got 7; use --bits 6 or --bits 8",
    "compress MODEL NEW --bits 1": "bits must be one of 2, 3, 4, 5, 6, 8, got 1; use --bits 2",
    "compress MODEL NEW --scale-bits 12": "scale_bits must be one of 3, 4, 5, 6, 8, 16, got 12; use --scale-bits 8 or "
    "--scale-bits 16",
    "compress MODEL NEW --pattern 4:2": "pattern 4:2 is impossible: N:M needs 0 <= N <= M and M >= 1; use 2:4",
    "compress MODEL NEW --pattern 2:4": BUDGET,
    "compress MODEL NEW --pattern 2:4 --size 5.2bits": "a size of 5.2 bits per weight is too small: the least possible "
    "with method joint is 9bits (2:4, rank 0); use --size 9bits, or --method joint-grid, which also quantises S",
    "compress MODEL NEW --rank 999": "rank 999 is larger than the weight (64×192); use --rank 64 or less "
    "(model.layers.0.self_attn.k_proj)",
    "compress MODEL NEW --effort max": "effort must be 'fast', 'balanced' or 'best', got 'max'",
    "compress MODEL NEW --samples 0": "samples must be at least 1, got 0",
    "compress MODEL NEW --method awq": "unknown method 'awq'. `hasslefree methods` lists all names",
    "methods awq": "unknown method, pruner or low-rank solver 'awq'. `hasslefree methods` lists all names",
    "compress MODEL NEW --engine ollama": "engine must be 'transformers', 'llama.cpp', 'mlx' or 'vllm', got 'ollama'",
    "compress MODEL NEW --device cuda:99": "use --device cpu",
    "compress MODEL NEW --calibration foo": "c4, chat, code, languages, mixed, ptb, python, self, wikipedia, wikitext2",
    "compress MODEL NEW --calibration none.txt": "the text file none.txt does not exist; check its path",
    "compress MODEL NEW --calibration SHORT": SHORT,
    "compress MODEL NEW --calibration c4": "the text 'c4' could not be downloaded from the hub (no connection); give a "
    "local .txt or .jsonl file, or, to compress, let the model write the text (--calibration self)",
    "compress ./none NEW": "the model folder ./none does not exist; check its path",
    "plan meta/lama": "'meta/lama' is neither a local folder nor in the cache, and there is no connection to the hub; "
    "give a folder, or check the network",
    "plan OUT": f"OUT {HELD}",
    "compress OUT NEW": f"OUT {HELD}",
    "chat MODEL": "MODEL has no compressed layers; give a folder that `hasslefree compress` wrote",
    "report MODEL": "MODEL is not a compressed model; give a folder that `hasslefree compress` wrote",
    "generate OUT ": "the prompt is empty; give some text to continue",
    "evaluate OUT": "name at least one text or task, such as --perplexity wikitext2 or --tasks piqa",
    "evaluate OUT --tasks piqa --kl": "--kl needs a text, such as --perplexity wikitext2; name one, or leave it out",
    "evaluate OUT --tasks piqa --max-tokens 9": "--max-tokens needs a text, such as --perplexity wikitext2; name one, "
    "or leave it out",
    "evaluate OUT --perplexity python --limit 9": "--limit needs a task, such as --tasks piqa; name one, or leave it "
    "out",
    "evaluate OUT --tasks rte --batch-size 0": "Invalid value for '--batch-size': Input should be greater than or "
    "equal to 1. The command is `hasslefree evaluate MODEL`; `hasslefree evaluate --help` lists its options",
    "evaluate MODEL --perplexity python --dense original": "MODEL has no compression.json, which would name the dense "
    "model; give that with --dense",
    "report OUT --dense MODEL": "--dense continues the prompts; give some with --prompt, or leave it out",
    "compress MODEL NEW --private": "--private is for --push-to; name a repository, or leave it out",
    "demo --rounds 0": "Invalid value for '--rounds': Input should be greater than or equal to 1. The command is "
    "`hasslefree demo`; `hasslefree demo --help` lists its options",
    "generate OUT --seed x": "Invalid value for '--seed': Input should be a valid integer, unable to parse string as "
    "an integer. The command is `hasslefree generate OUT [PROMPT]`; `hasslefree generate --help` lists its options",
    "generate OUT x --seed -1": "seed must be at least 0, got -1",
    "evaluate OUT --dense MODEL --perplexity python --dtype bf16": "unknown dtype 'bf16'. Did you mean 'bfloat16'? "
    "Known: auto, bfloat16, float16, float32",
    "bench MODEL": "MODEL is not a compressed model; give a folder that `hasslefree compress` wrote",
    "export OUT NEW": f"Missing option '--to'. {EXPORT}",
    "export OUT --to dense": f"Missing argument 'DEST'. {EXPORT}",
    "export OUT NEW --to onnx": "Known: compressed-tensors, dense, gguf, mlx, narrow, peft",
    "export OUT --to gguf NEW.gguf": "its S is not quantised; compress again with --method joint-grid and --engine "
    "llama.cpp, or export with --to dense or --to peft",
}


@pytest.fixture
def place(out, tmp_path, monkeypatch):
    """A folder that holds what the mistakes name, without programs on the PATH and without a network."""
    (tmp_path / "MODEL").symlink_to(MODEL)
    (tmp_path / "OUT").symlink_to(out)
    (tmp_path / "SHORT.txt").write_text("too short a text ")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")

    def unreachable(**_):
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    return tmp_path


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_gets_one_sentence_with_its_remedy(typed, place, monkeypatch, capsys):
    before = set(place.iterdir())
    words = [word.replace("SHORT", "SHORT.txt") for word in typed.split(" ")]
    code, text = run(monkeypatch, capsys, *words)
    assert code == 2, text
    assert text.startswith("error: ")
    assert text.endswith(f"{MISTAKES[typed]}\n"), text
    assert text.count("\n") == 1
    assert set(place.iterdir()) == before, "something was written"


def test_too_few_minutes_say_how_to_go_on(place, monkeypatch, capsys):
    words = ["--rank", "2", "--method", "eora", "--allocate", "uniform", "--samples", "8", "--seqlen", "32"]
    words += ["--calibration", CALIBRATION, "--match-predictions", "64", "--no-check", "--minutes", "0.0001"]
    code, text = run(monkeypatch, capsys, "compress", "MODEL", "NEW", *words)
    assert code == 2
    assert re.search(
        r"^error: 0.0001 minutes are too short: at the speed of the first 3 blocks, the layers alone take \d+ minutes, "
        r"and fine-tuning comes after them; the finished blocks are kept: continue with --resume and --minutes \d+\n$",
        text,
        re.MULTILINE,
    )
