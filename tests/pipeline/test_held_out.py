"""Perplexity on text that was held out, before and after a compression."""

import dataclasses
import json
import math
import multiprocessing
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint.resume import Unfinished
from hasslefree.demo.run import MODEL
from hasslefree.errors import CheckpointError
from hasslefree.models.load import load_on_disk
from hasslefree.pipeline import held_out, training
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.text import Texts
from hasslefree.planning.schedule import HELD_OUT_SEGMENTS
from hasslefree.texts.segments import disjoint_segments, draw_segments
from hasslefree.texts.sources import calibration_documents
from tests.listeners import by_layer, free_port
from tests.tiny_models import build, number_tokenizer, tensors_of

SEQLEN = 16
# Embedding and head are compressed too.
ENDS = {"method": None, "pattern": "dense", "bits": 4, "rank": 0, "embedding_bits": 4, "effort": "fast"}


class Numbers:
    """A tokenizer of numbers."""

    chat_template = bos_token = None
    bos_token_id = 1

    def __call__(self, text, **options):
        return {"input_ids": numbers(text)}

    def save_pretrained(self, folder):
        pass


@pytest.fixture
def recipe(tmp_path):
    """For `fast`, on a text of 60 documents of random numbers."""
    documents = torch.randint(3, 64, (60, 3 * SEQLEN), generator=torch.Generator().manual_seed(1)).tolist()
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join(map(str, document))}) + "\n" for document in documents))
    return Recipe(rank=2, method="eora", calibration=str(file), samples=8, seqlen=SEQLEN)


def compress(out, recipe, model=None, **options):
    options = {"tokenizer": Numbers()} | options
    return hasslefree.compress(build("llama") if model is None else model, out, recipe, **options)


@pytest.fixture
def read(monkeypatch):
    """The segments that checks run."""
    found, make = [], held_out.Check.__init__
    monkeypatch.setattr(held_out.Check, "__init__", lambda self, *args: found.append(args[1]) or make(self, *args))
    return found


def transformers_perplexity(model, segments):
    """Oracle: the loss that transformers takes of the same tokens, the mean of all of them."""
    with torch.no_grad():
        losses = [model(input_ids=segment[None], labels=segment[None]).loss.item() for segment in segments]
    return math.exp(sum(losses) / len(losses))


def transformers_kl(dense, compressed, segments):
    """Oracle: the definition in float64, of all tokens but the last of each segment: mean, 99th percentile, and the
    share of equal top tokens."""
    with torch.no_grad():
        p, q = (each(input_ids=segments).logits[:, :-1].double().log_softmax(-1) for each in (dense, compressed))
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    return kl.mean().item(), np.percentile(kl.numpy(), 99), same.item()


@pytest.mark.parametrize("rows", [pytest.param(256, marks=pytest.mark.nightly), 5])
@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("llama", {"match_predictions": 256}), ("llama", ENDS), ("gemma4_text", {})],
)
def test_the_perplexities_are_those_of_transformers(family, fields, rows, recipe, read, tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "HELD_OUT_ROWS", rows)
    model = build(family)
    model.get_output_embeddings().weight.data *= 30  # else all predictions are nearly uniform
    model.save_pretrained(tmp_path / "dense")
    recipe = dataclasses.replace(recipe, **fields)
    report = compress(tmp_path / "out", recipe, tmp_path / "dense", device="cpu")
    found, trained = report.held_out, report.predictions
    assert "match_predictions" not in fields or trained["after"] < trained["before"]
    assert found["segments"] == len(read[0]) == HELD_OUT_SEGMENTS
    models = {}
    for name, folder in {"dense": "dense", "compressed": "out"}.items():
        models[name] = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert found[name] == pytest.approx(transformers_perplexity(models[name], read[0]), rel=1e-5), name
    mean, percentile, same = transformers_kl(models["dense"], models["compressed"], read[0])
    assert found["kl"]["mean"] == pytest.approx(mean, rel=1e-3)
    assert found["kl"]["percentile_99"] == pytest.approx(percentile, rel=1e-3)
    assert found["kl"]["same_top_token"] == pytest.approx(same)
    assert found["dense"] != pytest.approx(found["compressed"], rel=1e-4)
    assert json.loads((tmp_path / "out" / "compression.json").read_text())["held_out"] == found


@pytest.mark.parametrize("fields", [{}, {"match_predictions": 64}])
def test_the_weights_are_the_same_without_it(fields, recipe, tmp_path):
    recipe = dataclasses.replace(recipe, **fields)
    compress(tmp_path / "with", recipe)
    assert compress(tmp_path / "without", dataclasses.replace(recipe, check=False)).held_out is None
    one, other = tensors_of(tmp_path / "with"), tensors_of(tmp_path / "without")
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 6), st.integers(2, 12), st.integers(0, 9))
def test_held_out_windows_repeat_nothing(lengths, samples, seqlen, seed):
    """Oracle: every token is another one, so its number says where it is from."""
    documents = [list(range(1000 * i, 1000 * i + length)) for i, length in enumerate(lengths)]
    text = [" ".join(map(str, document)) for document in documents]
    if sum(length for length in lengths if length >= seqlen) < samples * seqlen:
        return
    used = draw_segments(text, numbers, samples, seqlen, seed)
    windows = disjoint_segments(text, numbers, 1000, seqlen, seed, used)
    run, seen = max(seqlen // 2, 1), {*used.flatten().tolist()}
    for window in windows.tolist():
        assert window == list(range(window[0], window[0] + seqlen))
        repeated = [token in seen for token in window]
        assert not any(all(repeated[i : i + run]) for i in range(seqlen - run + 1))
    assert len({*windows.flatten().tolist()}) == windows.numel()
    left = [part for document in documents for part in unused(document, seen | {*windows.flatten().tolist()})]
    assert all(len(part) < seqlen * (2 if int(part[0]) % 1000 == 0 else 1) for part in left if part), "all that is free"


def test_no_text_that_was_used_is_held_out(recipe, read, tmp_path):
    """Oracle: the segments themselves, drawn again from a text that has few more."""
    recipe = dataclasses.replace(recipe, calibration=f"{recipe.calibration}[:12]", match_predictions=64)
    compress(tmp_path / "out", recipe)
    documents = calibration_documents(recipe.calibration)
    drawn = draw_segments(documents, numbers, recipe.samples, SEQLEN, recipe.seed)
    used = {run for segment in [*drawn, *disjoint_segments(documents, numbers, 5, SEQLEN, 0)] for run in runs(segment)}
    assert 0 < len(read[0]) < HELD_OUT_SEGMENTS
    assert not used & {run for segment in read[0] for run in runs(segment)}


def numbers(text):
    return [int(word) for word in text.split()]


def runs(segment, length=SEQLEN // 2):
    return [tuple(segment[i : i + length].tolist()) for i in range(len(segment) - length + 1)]


def test_no_more_than_one_block_is_in_memory(recipe, tmp_path, monkeypatch):
    build("llama", num_hidden_layers=3).save_pretrained(tmp_path / "dense")
    models, seen, load, run = [], [], load_on_disk, held_out.run_block
    monkeypatch.setattr(
        "hasslefree.pipeline.opening.load_on_disk", lambda *args: models.append(load(*args)) or models[0]
    )

    def look(*args):
        present = [name for name, parameter in models[0].named_parameters() if not parameter.is_meta]
        seen.append({name.split(".")[2] for name in present})
        run(*args)

    monkeypatch.setattr(held_out, "run_block", look)
    compress(tmp_path / "out", recipe, tmp_path / "dense", device="cpu")
    assert seen == [{"0"}, {"0"}, {"1"}, {"1"}, {"2"}, {"2"}]


def unused(document, seen):
    """The stretches of a document between tokens that were seen."""
    text = " ".join("|" if token in seen else str(token) for token in document)
    return [part.split() for part in text.split("|")]


@pytest.mark.parametrize(
    ("fields", "after"),
    [
        ({}, None),
        ({"match_predictions": 64}, 8),
        pytest.param({}, 8, marks=pytest.mark.nightly),
        pytest.param({"match_predictions": 64}, None, marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_measures_the_same(fields, after, recipe, tmp_path, monkeypatch):
    """Oracle: the folder of an uninterrupted run. None: the run stops once all blocks are written, or trained."""
    recipe = dataclasses.replace(recipe, **fields)
    compress(tmp_path / "whole", recipe)

    def stop(*args):
        if after is None or args[1] == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if after is None:
            patched.setattr(Unfinished, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path / "out", recipe, progress=by_layer(stop) if after else None)
    compress(tmp_path / "out", recipe, resume=True)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def process(rank, port, out, recipe):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    report = compress(out, recipe)
    stored = json.loads((out / "compression.json").read_text())["held_out"] if rank == 0 else report.held_out
    assert report.held_out == stored is not None


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("fields", [pytest.param({}, marks=pytest.mark.nightly), {"match_predictions": 64}])
def test_several_processes_measure_what_one_does(fields, recipe, tmp_path):
    """Oracle: one process. Sums are rounded in another order, and so are the weights."""
    recipe = dataclasses.replace(recipe, **fields)
    context, port = multiprocessing.get_context("fork"), free_port()
    started = [context.Process(target=process, args=(rank, port, tmp_path / "many", recipe)) for rank in range(2)]
    for each in started:
        each.start()
    for each in started:
        each.join(120)
    assert [each.exitcode for each in started] == [0, 0]
    one = compress(tmp_path / "one", recipe).held_out
    many = json.loads((tmp_path / "many" / "compression.json").read_text())["held_out"]
    assert many["dense"] == pytest.approx(one["dense"], rel=1e-6)
    assert many["compressed"] == pytest.approx(one["compressed"], rel=1e-2)


def test_text_that_the_model_writes_is_held_out_too(recipe, read, tmp_path):
    report = hasslefree.compress(
        MODEL, tmp_path / "out", dataclasses.replace(recipe, calibration="self", method="wanda", rank=0), device="cpu"
    )
    assert 1 < report.held_out["dense"] < report.held_out["compressed"]
    assert "held-out tokens that the model wrote itself" in report.summary()
    assert len(read[0]) == 2 * HELD_OUT_SEGMENTS
    code = AutoTokenizer.from_pretrained(MODEL).decode(read[0][HELD_OUT_SEGMENTS:].flatten())
    assert "self." in code
    assert report.held_out_code["segments"] == HELD_OUT_SEGMENTS
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = transformers_perplexity(model, read[0][HELD_OUT_SEGMENTS:])
    assert report.held_out_code["dense"] == pytest.approx(expected, rel=1e-3)  # the run's model is in bfloat16


def test_code_that_was_read_is_not_held_out(monkeypatch):
    """Oracle: every eight tokens of a text that holds the first of two modules of the library."""
    modules = [" ".join(map(str, range(start, start + 200))) for start in (0, 1000)]
    monkeypatch.setattr(held_out, "library_documents", lambda held_out: modules)
    recipe = Recipe(rank=2, method="eora", seqlen=SEQLEN, first_token=False)
    texts = Texts(build("llama"), Numbers(), recipe, torch.device("cpu"), {"a.jsonl": 1.0}, {}, {})
    used = torch.arange(200)[None, 4:].unfold(1, SEQLEN, SEQLEN)[0]
    found = held_out.code_segments(texts, 10, used)
    assert len(found) == 10
    assert (found >= 1000).all()


PLAIN = Recipe(
    rank=0, method="wanda", calibration=str(MODEL.parent / "calibration.jsonl"), samples=4, seqlen=32,
    leave_dense=("*.0.*", "*.1.*", "*.2.*"),
)  # fmt: skip


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """The report of a compression without training, and the tensors that it wrote."""
    out = tmp_path_factory.mktemp("untrained") / "out"
    return hasslefree.compress(MODEL, out, PLAIN, device="cpu"), tensors_of(out)


@pytest.mark.parametrize(("after", "undone"), [(0.99, True), (1e-9, False)])
def test_training_that_makes_code_worse_than_it_makes_its_own_kind_better_is_undone(
    after, undone, untrained, tmp_path, monkeypatch, caplog
):
    """Oracle: the weights without training, and its perplexities."""

    def spoil(job, _reference):
        training.bring_back(job)
        for block in job.walk.blocks.modules:
            block.input_layernorm.weight.data *= 1.5
        return {"before": 1.0, "after": after, "history": [after], "learning_rate": 1e-4, "tokens": 64}

    monkeypatch.setattr(training, "train_whole", spoil)
    trained = dataclasses.replace(PLAIN, match_predictions=64)
    report = hasslefree.compress(MODEL, tmp_path / "out", trained, device="cpu")
    (before, one), other = untrained, tensors_of(tmp_path / "out")
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items()) == undone
    assert ("fine-tuning is undone" in caplog.text and "or the effort 'fast'" in caplog.text) == undone
    assert report.predictions["after"] == (1.0 if undone else after)
    assert (report.held_out_code["compressed"] == before.held_out_code["compressed"]) == undone


def test_training_that_does_not_help_is_not_measured(untrained, tmp_path, monkeypatch):
    """Oracle: the perplexities without training."""

    def restored(job, _reference):
        training.bring_back(job)
        return {"before": 1.0, "after": 1.0, "history": [1.5], "learning_rate": 1e-4, "tokens": 64}

    monkeypatch.setattr(training, "train_whole", restored)
    monkeypatch.setattr(Check, "run_again", lambda _: pytest.fail("the same model is run again"))
    trained = dataclasses.replace(PLAIN, match_predictions=64)
    report = hasslefree.compress(MODEL, tmp_path / "out", trained, device="cpu")
    assert report.held_out["compressed"] == untrained[0].held_out["compressed"]


def test_a_file_that_cannot_be_read_is_no_head_that_is_missing(recipe, tmp_path, monkeypatch):
    def damaged(*_):
        raise CheckpointError("model.safetensors is truncated")

    monkeypatch.setattr(Check, "logits", damaged)
    with pytest.raises(CheckpointError, match="is truncated"):
        compress(tmp_path / "out", recipe)


def too_short(recipe):
    return dataclasses.replace(recipe, calibration=f"{recipe.calibration}[:1]", samples=1, seqlen=48), {}


def no_check(recipe):
    return dataclasses.replace(recipe, check=False), {}


def given_tokens(recipe):
    return recipe, {"segments": torch.arange(3, 35).view(2, 16)}


def no_head(recipe):
    return recipe, {"model": build("llama").model}


def nothing_finite(recipe):
    model = build("llama")
    model.lm_head.weight.data *= 1e38
    return recipe, {"model": model}


@pytest.mark.parametrize(
    ("case", "said"),
    [(too_short, "not measured (too little text, or no output head)"), (no_check, "not measured (switched off)"),
     (given_tokens, "not measured (the calibration tokens were given from Python)"),
     (no_head, "not measured (too little text, or no output head)"), (nothing_finite, "not finite → not finite")],
)  # fmt: skip
def test_a_summary_says_why_there_is_none(case, said, recipe, tmp_path):
    recipe, options = case(recipe)
    report = compress(tmp_path / "out", recipe, **options)
    assert said in report.summary()


def test_a_text_that_repeats_itself_is_not_called_too_short(tmp_path, caplog):
    (tmp_path / "text.txt").write_text(" ".join(100 * [str(number) for number in range(3, 23)]))
    recipe = Recipe(rank=2, method="eora", calibration=str(tmp_path / "text.txt"), samples=40, seqlen=16)
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, tokenizer=number_tokenizer())
    assert "the calibration text is too short, or repeats itself too much, to hold some of it out" in caplog.text
