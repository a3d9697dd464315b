"""The command line on the embedded model: what works, and what a user sees when something is wrong."""

import contextlib
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer.main
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hasslefree.cli import run_app
from hasslefree.cli.common import app
from hasslefree.demo.run import CALIBRATION, HELD_OUT, MODEL
from hasslefree.recipe.resolve import DEFAULT_SIZE
from hasslefree.units import size
from tests.evaluation.task_rows import write_rows
from tests.tiny_models import NUMBERS, build, number_tokenizer, tensors_of

QUICK = ["--calibration", str(CALIBRATION), "--samples", "2", "--seqlen", "32"]


def run(monkeypatch, capsys, *arguments):
    """The exit code, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["hasslefree", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        run_app()
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out + printed.err


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The arguments of a command that name a model of two narrow blocks, and those that name a text for it."""
    folder = tmp_path_factory.mktemp("small")
    build("llama", torch.bfloat16, hidden_size=64, intermediate_size=96).save_pretrained(folder / "model")
    number_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(NUMBERS)
    return folder / "model", ["--calibration", folder / "text.txt", "--samples", "4", "--seqlen", "16"]


SIZES = {"fixed": "72kB", "entropy": "50kB"}


@pytest.mark.parametrize(
    ("coding", "ranges"), [("fixed", r"int\d–\d"), ("entropy", r"dense, entropy-coded, [\d.]+–[\d.]+ bits")]
)
def test_plan_shows_what_a_size_gives_each_layer_and_compress_does_it(
    coding, ranges, small, monkeypatch, capsys, tmp_path
):
    """Oracle: the folder that `compress` writes."""
    model, text = small
    flags = ["--size", SIZES[coding], "--coding", coding, *text, "--effort", "fast"]
    code, printed = run(monkeypatch, capsys, "plan", model, *flags, "--output", tmp_path / "a.json")
    assert code == 0, printed
    found = json.loads((tmp_path / "a.json").read_text())
    dealt, *uniform = found["advice"]
    room = 1000 * int(SIZES[coding].removesuffix("kB"))
    assert dealt["bytes"] <= room
    assert all(dealt["divergence"] < each["divergence"] and each["bytes"] <= room for each in uniform)
    assert re.search(r"by layer +[\d.]+–[\d.]+ .*uniform +\d ", printed, re.DOTALL)
    assert re.search(rf"_proj +.*{ranges} ", printed)
    code, printed = run(monkeypatch, capsys, "compress", model, tmp_path / "out", *flags)
    assert code == 0, printed
    assert sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values()) == dealt["bytes"]
    layers = json.loads((tmp_path / "out" / "compression.json").read_text())["layers"]
    planned = {(row["kind"], row["bits"], row["rank"]) for row in found["layers"]}
    written = {(row["name"].rpartition(".")[2], bits_of(row["grid"]), row["rank"]) for row in layers}
    assert written == planned


def bits_of(grid):
    """The bits of a code on a grid of compression.json."""
    return grid.get("rate") or grid["bits"]


@pytest.mark.parametrize(
    ("wrong", "message"), [("much", "such as --size 150MB"), ("1kB", "is too small: the least possible")]
)
def test_plan_refuses_a_size_that_is_none(wrong, message, small, monkeypatch, capsys):
    code, printed = run(monkeypatch, capsys, "plan", small[0], "--size", wrong, *small[1])
    assert code == 2
    assert message in printed


def test_a_model_alone_can_be_compressed(small, monkeypatch, capsys, tmp_path):
    """Nothing but the text is given, and how much of it is read."""
    model, text = small
    words = [model, tmp_path / "out", *text, "--match-predictions", "64"]
    code, printed = run(monkeypatch, capsys, "compress", *words)
    assert code == 0, printed
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["recipe"]["size"] == DEFAULT_SIZE
    assert "vllm serve" not in printed  # the embedding is compressed
    assert 8 * record["stored_bytes"] / record["dense_parameters"] <= float(DEFAULT_SIZE.removesuffix("bits"))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A folder, and what the command line printed. A terminal library may take [v2] for a style, [/a] for its end."""
    out, printed = tmp_path_factory.mktemp("cli") / "runs[v2]" / "p[/a]", io.StringIO()
    words = ["compress", MODEL, out, "--rank", "4", "--method", "eora", "--leave-dense", "*.0.*", "*.1.*", *QUICK]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        root = typer.main.get_command(app)
        root(args=list(map(str, words)), standalone_mode=False)
    return out, printed.getvalue()


def test_compress(compressed):
    out, text = compressed
    assert f"Written to {out}:" in text
    assert f"Next:  hasslefree chat '{out}'\n" in text
    assert f"vllm serve '{out}'  # with hasslefree[vllm]; as large in memory as the dense model" in text
    assert "`import hasslefree` before" in text
    record = json.loads((out / "compression.json").read_text())
    before, after = record["dense_bytes"], record["stored_bytes"]
    assert f"compressed layers  {size(before)} → {size(after)} ({100 * after / before:.0f} %)" in text
    assert f"perplexity         {record['held_out']['dense']:.2f} → {record['held_out']['compressed']:.2f} (+" in text
    assert f"largest errors     {max(layer['relative_error'] for layer in record['layers']):.2g} in " in text
    assert not re.search(r"^\d\d:\d\d:\d\d ", text, re.MULTILINE), "lines come once a minute"
    files = {path.name for path in out.iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
                     "README.md", "compression.json"}  # fmt: skip
    assert json.loads((out / "compression.json").read_text())["recipe"]["leave_dense"] == ["*.0.*", "*.1.*"]
    assert AutoModelForCausalLM.from_pretrained(out).dtype == AutoModelForCausalLM.from_pretrained(MODEL).dtype


def test_inspect(compressed, monkeypatch, capsys, tmp_path):
    out, results = compressed[0], tmp_path / "results.json"
    code, text = run(monkeypatch, capsys, "inspect", out, "--output", results)
    assert code == 0, text
    sizes = json.loads(results.read_text())
    assert len(sizes["layers"]) == 14
    stored = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert 0 < stored - sizes["bytes"] < 10_000, "the headers are the only thing beside"
    assert f"{sizes['bytes'] / 1e6:.1f} MB" in text
    assert len([line for line in text.splitlines() if "_proj" in line]) == 7, "a line for each kind of layer"
    recorded = json.loads((out / "compression.json").read_text())["layers"]
    errors = {layer["name"]: layer["relative_error"] for layer in recorded}
    assert {layer["name"]: layer["relative_error"] for layer in sizes["layers"]} == errors
    assert "–".join(f"{end(errors.values()):.2g}" for end in (min, max)) in text
    words = ["evaluate", out, "--perplexity", HELD_OUT, "--output", results]
    code, text = run(monkeypatch, capsys, *words)
    assert code == 2
    assert "is read-only or not from this command" in text
    assert "perplexity of" not in text, "it was measured in vain"
    code, text = run(monkeypatch, capsys, "inspect", out, "--layers")
    assert code == 0, text
    lines = [line.split()[0] for line in text.splitlines() if "_proj" in line]
    assert [f"model.layers.{name}" for name in lines] == [layer["name"] for layer in sizes["layers"]]


def test_evaluate(compressed, monkeypatch, capsys, tmp_path):
    out, results = compressed[0], tmp_path / "results.json"
    code, text = run(monkeypatch, capsys, "evaluate", out, "--perplexity", HELD_OUT, f"{CALIBRATION}[:1]", "--seqlen",
                     "64", "--max-tokens", "640", "--output", results)  # fmt: skip
    assert code == 0, text
    found = json.loads(results.read_text())["perplexity"]
    assert set(found) == {str(HELD_OUT), f"{CALIBRATION}[:1]"}
    assert found[str(HELD_OUT)]["tokens"] == 640
    dense = json.loads(results.read_text())["dense"]
    assert dense["model"] == str(MODEL)
    row, before = found[str(HELD_OUT)], dense["perplexity"][str(HELD_OUT)]
    assert 10 < before["perplexity"] < row["perplexity"] < 200
    increase = 100 * (row["perplexity"] / before["perplexity"] - 1)
    for shown in (f"{row['perplexity']:.3f}", f"{before['perplexity']:.3f}", f"{increase:+.1f} %"):
        assert shown in text
    kl = row["kl"]
    assert 0 < kl["median"] < kl["mean"] < kl["percentile_99"]
    assert "kl" not in before
    assert f"KL divergence from {MODEL}" in text.replace("\n", "")
    line = [f"{kl[name]:.3g}" for name in ("mean", "median", "percentile_99")]
    line += [f"{100 * kl['same_top_token']:.2f}", "%"]
    assert re.search(" +".join(map(re.escape, line)), text)


def test_results_are_kept_if_the_dense_model_cannot_be_measured(compressed, monkeypatch, capsys, tmp_path):
    shutil.copytree(MODEL, tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").unlink()
    words = ["evaluate", compressed[0], "--perplexity", HELD_OUT, "--max-tokens", "128", "--seqlen", "64"]
    words += ["--dense", tmp_path / "dense", "--output", tmp_path / "results.json"]
    code, text = run(monkeypatch, capsys, *words)
    assert code != 0
    assert not (tmp_path / "results.json").exists(), "side by side, both are loaded first"
    code, text = run(monkeypatch, capsys, *words, "--no-kl")
    assert code != 0
    measured = json.loads((tmp_path / "results.json").read_text())["perplexity"][str(HELD_OUT)]["perplexity"]
    assert f"perplexity of {compressed[0]} on {HELD_OUT}: {measured:.3f}" in text.replace("\n", "")
    assert len(re.findall(f"{measured:.3f}", text)) == 2, "the table is printed too"


@pytest.mark.parametrize(("spare", "dtype", "fit"), [(-1, "auto", False), (0, "auto", True), (0, "float32", False)])
def test_models_that_do_not_fit_together_are_measured_one_after_the_other(
    spare, dtype, fit, compressed, monkeypatch, capsys
):
    files = [file for folder in (compressed[0], MODEL) for file in folder.glob("*.safetensors")]
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    logits = 2 * 64 * vocabulary * 4  # of two models, for a window of 64 tokens, in float32
    free = sum(tensor.nbytes for file in files for tensor in load_file(file).values()) + logits + spare
    monkeypatch.setattr("hasslefree.evaluation.continuation.free_memory", lambda device: free)
    words = ["evaluate", compressed[0], "--perplexity", HELD_OUT, "--max-tokens", "128", "--seqlen", "64"]
    code, text = run(monkeypatch, capsys, *words, "--dense", MODEL, "--dtype", dtype)
    assert code == 0, text
    assert ("do not fit in memory at once" in text) != fit
    assert ("KL divergence from" in text) == fit
    assert "increase" in text, "both perplexities are there"


@pytest.mark.parametrize(("dense", "said"), [("none", None), (None, "name it with --dense"), (MODEL, None)])
def test_the_dense_model_of_evaluate(dense, said, compressed, monkeypatch, capsys, tmp_path):
    """Left out, or given if the folder names one that is not here."""
    out = shutil.copytree(compressed[0], tmp_path / "out")
    record = json.loads((out / "compression.json").read_text())
    (out / "compression.json").write_text(json.dumps(record | {"model": "no/such"}))
    words = ["evaluate", out, "--perplexity", HELD_OUT, "--max-tokens", "64", "--json"]
    code, text = run(monkeypatch, capsys, *words, *(["--dense", dense] if dense else []))
    assert code == 0, text
    assert ('"dense"' in text) == (dense == MODEL)
    assert said is None or said in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dense", "none"], "--kl needs the dense model; name one with --dense"),
        ([], "has no compression.json, which would name the dense model; give that with --dense"),
        (["--dense", MODEL, "--no-kl"], None),
    ],
)
def test_kl_that_is_asked_for_or_not(words, said, monkeypatch, capsys):
    """Of a dense model, which has none by itself."""
    words = ["evaluate", MODEL, "--perplexity", HELD_OUT, "--max-tokens", "64", "--json", "--kl", *words]
    code, text = run(monkeypatch, capsys, *words)
    assert code == (2 if said else 0), text
    assert (said or '"dense"') in text.replace("\n", " ")
    assert '"kl"' not in text


def test_a_recipe_and_options_that_win_over_it(small, monkeypatch, capsys, tmp_path):
    model, text = small
    # The recipe alone would lack a rank.
    (tmp_path / "r.yaml").write_text(f'pattern: "2:8"\nmethod: eora\ncalibration: {text[1]}\nsamples: 2\nseqlen: 32\n')
    code, printed = run(monkeypatch, capsys, "compress", model, tmp_path / "out", "--recipe", tmp_path / "r.yaml",
                        "--rank", "3", "--dtype", "float32")  # fmt: skip
    assert code == 0, printed
    recipe = json.loads((tmp_path / "out" / "compression.json").read_text())["recipe"]
    assert (recipe["pattern"], recipe["method"], recipe["rank"], recipe["dtype"]) == ("2:8", "eora", 3, "float32")


def test_report(compressed, monkeypatch, capsys, tmp_path):
    (out, text), page = compressed, tmp_path / "page.html"
    seconds = json.loads(Path(f"{out}.seconds.json").read_text())["seconds"]
    assert f"time               {seconds:.0f} s" in text
    # Where the page names it, rich must not take it for markup.
    code, text = run(monkeypatch, capsys, "report", out, "--output", page, "--figures", tmp_path / "[red]")
    assert code == 0, text
    assert f"Written to {page}." in text
    assert "figures written to" in text
    assert "[red]" in text
    assert f"hasslefree compress {MODEL} OUT --pattern 2:4 --method eora --rank 4" in page.read_text()
    assert list((tmp_path / "[red]").glob("relative-error-*.svg"))
    for arguments, message in [
        (["report", MODEL], "is not a compressed model"),
        (["report", "none"], "none does not exist"),
        (["report", out, "--output", tmp_path], "is a folder"),
        (["report", out, "--output", page, "--figures", page], "is a file"),
    ]:
        code, text = run(monkeypatch, capsys, *arguments)
        assert code == 2, text
        assert message in text


BAD = {
    "unknown pruner": (["--rank", "4", "--pruner", "sparsgpt"], "Did you mean 'sparsegpt'"),
    "width": (["--pattern", "2:7", "--rank", "4"], "divides 192, or --pattern row --sparsity 0.71"),
    "rank": (["--rank", "65"], "rank 65 is larger than the weight (64×192); use --rank 64"),
    "two budgets": (["--ratio", "0.4", "--rank", "4"], "not both"),
    "missing text": (["--rank", "4", "--calibration", "none.txt"], "none.txt does not exist"),
    "positions": (["--rank", "4", "--seqlen", "4096"], "takes at most 512 tokens"),
    "device": (["--rank", "4", "--device", "gpu"], "device 'gpu' cannot be used"),
    "groups": (["--method", "gptq", "--group-size", "128"], "the 192 inputs of the layer; use --group-size 64"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_a_user_s_mistake_is_one_message_and_exit_code_2(monkeypatch, capsys, tmp_path, arguments, message):
    given = arguments if "--calibration" in arguments else ["--calibration", CALIBRATION, *arguments]
    code, text = run(monkeypatch, capsys, "compress", MODEL, tmp_path / "out", *given)
    assert code == 2
    assert message in text.replace("\n", " ")
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir()), "something was written"


def test_other_mistakes(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "x").write_text("x")
    for arguments, message in [
        (["compress", MODEL, folder, "--rank", "4", *QUICK], "use --overwrite"),
        (["compress", MODEL, tmp_path / "out", "--rank", "four"], "valid integer"),
        (["inspect", MODEL], "is not a compressed model"),
        (["inspect", MODEL, "--output", tmp_path], "is a folder"),
        (["evaluate", MODEL], "name at least one text or task"),
        (["evaluate", MODEL, "--perplexity", HELD_OUT, "--output", "/none/r.json"], "does not exist"),
        (["evaluate", MODEL, "--perplexity", HELD_OUT, "--seqlen", "1"], "--seqlen"),
        (["evaluate", MODEL, "--perplexity", HELD_OUT, "--max-tokens", "-5"], "--max-tokens"),
    ]:
        code, text = run(monkeypatch, capsys, *arguments)
        assert code == 2, text
        assert message in text.replace("\n", " "), text


def test_export(compressed, monkeypatch, capsys, tmp_path):
    out = compressed[0]
    for to, file in [("dense", "model.safetensors"), ("peft", "adapter_model.safetensors")]:
        code, text = run(monkeypatch, capsys, "export", out, "--to", to, tmp_path / to)
        assert code == 0, text
        assert f"Written to {tmp_path / to}" in text
        assert (tmp_path / to / file).is_file()
    for arguments, message in [
        ([out, tmp_path / "new"], "--to"),
        ([out, "--to", "dense"], "DEST"),
        ([out, "--to", "dense", tmp_path / "peft"], "use --overwrite"),
    ]:
        code, text = run(monkeypatch, capsys, "export", *arguments)
        assert code == 2, text
        assert message in text.replace("\n", " "), text
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "peft"}


def test_a_checkpoint_that_is_cut_short(monkeypatch, capsys, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    code, text = run(monkeypatch, capsys, "compress", tmp_path / "model", tmp_path / "out", "--rank", "4", *QUICK)
    assert code == 1
    assert text.startswith("error: ")
    assert text.endswith("download or copy it again\n")


@pytest.mark.parametrize(
    ("words", "lists", "argument"),
    [
        ("evaluate m --perplexity a b --seqlen 9", {"perplexity": ["a", "b"]}, "m"),
        ("evaluate --tasks piqa m", {"tasks": ["piqa"]}, "m"),
        ("evaluate --tasks piqa rte m --perplexity a", {"tasks": ["piqa", "rte"], "perplexity": ["a"]}, "m"),
        ("evaluate --quiet --tasks piqa rte m", {"tasks": ["piqa", "rte"]}, "m"),
        ("compress --leave-dense x y m OUT", {"leave_dense": ["x", "y"]}, "m"),
        ("compress m OUT --leave-dense x y", {"leave_dense": ["x", "y"]}, "m"),
        ("run lm_eval --tasks piqa rte", {"arguments": ["--tasks", "piqa", "rte"]}, "lm_eval"),
    ],
)
def test_a_list_flag_leaves_the_arguments_of_the_command(words, lists, argument):
    name, *rest = words.split()
    given = typer.main.get_command(app).commands[name].make_context(name, rest).params
    assert {flag: list(given[flag]) for flag in lists} == lists
    assert argument in given.values()


def test_tasks_and_texts_of_one_model(monkeypatch, capsys, tmp_path):
    pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install "hasslefree[eval]"')
    rows, results = write_rows(tmp_path / "rows"), tmp_path / "r.json"
    rest = ["--task-data", rows, "--cache", tmp_path / "cache", "--output", results, "--max-tokens", "128"]
    code, text = run(monkeypatch, capsys, "evaluate", MODEL, "--tasks", "winogrande", "piqa", "--limit", "3",
                     "--perplexity", HELD_OUT, *rest)  # fmt: skip
    assert code == 0, text
    found = json.loads(results.read_text())
    assert list(found["tasks"]) == ["winogrande", "piqa"]
    assert list(found["perplexity"]) == [str(HELD_OUT)]
    for task, row in found["tasks"].items():
        line = next(line for line in text.splitlines() if line.split()[:1] == [task])
        error = row[f"{row['metric']}_stderr"]
        assert error > 0, "nothing to print"
        assert line.split() == [task, row["metric"], f"{100 * row['value']:.2f}", f"{100 * error:.2f}", "3"]
    assert (
        f"perplexity of {MODEL} on {HELD_OUT}: {found['perplexity'][str(HELD_OUT)]['perplexity']:.3f}"
        in text.replace("\n", "")
    )
    assert f"{100 * found['average']:.2f}" in next(line for line in text.splitlines() if "average" in line)
    assert "only the first 3 rows" in " ".join(text.split())
    assert "Traceback" not in text
    for arguments, message in [
        (["--tasks", "winograde"], "Did you mean 'winogrande'"),
        (["--tasks", "rte", "--task-data", tmp_path], "the folder of --task-data must contain rte.jsonl"),
        (["--tasks", "rte", "--batch-size", "many"], "valid integer"),
        (["--tasks", "rte", "--task-data", rows, "--cache", results], "give another folder with --cache"),
    ]:
        code, text = run(monkeypatch, capsys, "evaluate", MODEL, *arguments)
        assert code == 2, text
        assert message in text.replace("\n", " "), text


def test_data_sets_show_no_bars_of_their_own(monkeypatch, capsys):
    import datasets

    before = datasets.is_progress_bar_enabled()
    try:
        datasets.enable_progress_bars()
        run(monkeypatch, capsys, "--version")
        assert not datasets.is_progress_bar_enabled()
    finally:
        if before:
            datasets.enable_progress_bars()


def test_retries_of_a_hub_that_is_out_of_reach_are_not_shown(monkeypatch, capsys):
    import huggingface_hub.utils.logging as hub

    before = hub.get_verbosity()
    try:
        hub.set_verbosity_warning()  # in which it logs each of them
        run(monkeypatch, capsys, "--version")
        assert hub.get_verbosity() == hub.ERROR
    finally:
        hub.set_verbosity(before)
