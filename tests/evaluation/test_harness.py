"""The zero-shot tasks, offline, on rows of our own and the embedded model."""

import json
import shutil

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hasslefree.core.products import FastProducts
from hasslefree.demo.run import MODEL
from hasslefree.errors import CheckpointError, ModelError, NonFiniteError, OutputError
from hasslefree.evaluation.harness import cache_name, leave_open
from hasslefree.evaluation.run import evaluate
from hasslefree.evaluation.tasks import TASKS
from hasslefree.progress import SCORING
from tests.evaluation.task_rows import ROWS, questions, write_rows
from tests.tiny_models import build, number_tokenizer

pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install "hasslefree[eval]"')
NORMED = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows")


def score(model, tokenizer, context, continuation):
    """log p(continuation | context) from one whole forward pass; the log-softmax in float64."""
    start = len(tokenizer(context.rstrip())["input_ids"])
    whole = torch.tensor(tokenizer(context + continuation)["input_ids"])
    with torch.no_grad():
        log_p = model(input_ids=whole[None], use_cache=False).logits[0, start - 1 : -1].double().log_softmax(-1)
    return log_p.gather(-1, whole[start:, None]).sum().item()


def by_hand(folder, task):
    """The shares of rows whose right choice is the likeliest, and the likeliest a character."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = normed = 0
    for question in questions(task):
        scores = [score(model, tokenizer, *pair) for pair in question.pairs]
        each = [value / length for value, length in zip(scores, question.lengths, strict=True)]
        assert min(abs(a - b) for a in scores for b in scores if a != b) > 1e-3, "too close to call"
        right += scores.index(max(scores)) == question.gold
        normed += each.index(max(each)) == question.gold
    return right / len(questions(task)), normed / len(questions(task))


@pytest.mark.parametrize(("which", "tasks"), [("dense", list(TASKS)), ("compressed", ["piqa", "winogrande"])])
def test_the_scores_are_those_of_whole_forward_passes(which, tasks, rows, out):
    """Oracle: the prompts written out in plain Python, and float64."""
    folder = MODEL if which == "dense" else out
    found = evaluate(str(folder), tasks=tasks, task_data=rows, dtype="float32", device="cpu", batch=3)
    expected = {task: by_hand(folder, task) for task in tasks}
    for task, (right, normed) in expected.items():
        row = found["tasks"][task]
        assert row["acc"] == right, task
        assert ("acc_norm" in row) == (task in NORMED)
        assert row["value"] == (normed if task in NORMED else right), task
        assert row["metric"] == ("acc_norm" if task in NORMED else "acc")
        n = len(ROWS[task])
        assert row["rows"] == n
        assert row["acc_stderr"] == pytest.approx((right * (1 - right) / (n - 1)) ** 0.5)
        assert row["truncated"] == 0
    assert found["average"] == pytest.approx(sum(row["value"] for row in found["tasks"].values()) / len(tasks))
    if which == "compressed":
        return
    assert any(right != normed for task, (right, normed) in expected.items() if task in NORMED), "nothing to tell apart"
    assert {right for right, _ in expected.values()} - {0, 1}, "nothing to tell apart"


def test_every_log_likelihood_is_kept_as_it_was_computed(tmp_path, rows):
    """Oracle: the model's own logits, one request at a time, and their log-softmax in float64."""
    from lm_eval.api.model import hash_args
    from sqlitedict import SqliteDict

    tasks, dtype = ["arc_easy", "rte"], torch.bfloat16
    evaluate(str(MODEL), tasks=tasks, task_data=rows, dtype="bfloat16", device="cpu", cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    with SqliteDict(str(file)) as answers:
        kept = dict(answers)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype), AutoTokenizer.from_pretrained(MODEL)
    asked = [pair for task in tasks for question in questions(task) for pair in question.pairs]
    assert set(kept) == {hash_args("loglikelihood", pair) for pair in asked}
    with FastProducts():  # rounds otherwise than torch on some processors
        expected = {pair: score(model, tokenizer, *pair) for pair in asked}
    for pair in asked:
        assert kept[hash_args("loglikelihood", pair)][0] == pytest.approx(expected[pair], rel=1e-5)


def test_rows_as_they_also_circulate_score_the_same(tmp_path, rows):
    """HellaSwag after the harness's process_docs, BoolQ outside of SuperGLUE. Oracle: the rows as published."""
    other = {
        "hellaswag": [
            {"query": q.pairs[0][0], "choices": [c[1:] for _, c in q.pairs], "gold": q.gold}
            for q in questions("hellaswag")
        ],
        "boolq": [
            {"question": r["question"], "passage": r["passage"], "answer": bool(r["label"])} for r in ROWS["boolq"]
        ],
    }
    tasks = list(other)
    found = evaluate(str(MODEL), tasks=tasks, task_data=write_rows(tmp_path / "other", other), dtype="float32")
    assert found["tasks"] == evaluate(str(MODEL), tasks=tasks, task_data=rows, dtype="float32")["tasks"]


def test_questions_that_the_model_cannot_hold_are_counted(tmp_path):
    long = {"boolq": [ROWS["boolq"][0] | {"passage": "a list of words " * 300}, ROWS["boolq"][1]]}
    found = evaluate(str(MODEL), tasks=["boolq"], task_data=write_rows(tmp_path / "long", long))
    assert found["tasks"]["boolq"]["truncated"] == 1


def test_a_model_whose_answers_are_nan_has_no_accuracy(tmp_path, rows):
    shutil.copytree(MODEL, tmp_path / "model")
    [file] = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NonFiniteError, match="log-likelihood of an answer is NaN"):
        evaluate(str(tmp_path / "model"), tasks=["piqa"], task_data=rows, device="cpu")


def test_a_limit_takes_the_first_rows(rows):
    found = evaluate(str(MODEL), tasks=["piqa"], task_data=rows, limit=1)
    assert (found["limit"], found["tasks"]["piqa"]["rows"], found["tasks"]["piqa"]["acc_stderr"]) == (1, 1, None)
    right, *_ = questions("piqa")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    scores = [score(model, AutoTokenizer.from_pretrained(MODEL), *pair) for pair in right.pairs]
    assert found["tasks"]["piqa"]["acc"] == float(scores.index(max(scores)) == right.gold)


class Counter:
    """Counts the calls of the model, and fails after so many."""

    def __init__(self, monkeypatch, most=10**9):
        from lm_eval.models.huggingface import HFLM

        self.calls, call = 0, HFLM._model_call

        def counted(lm, *args, **kwargs):
            if self.calls == most:
                raise RuntimeError("power cut")
            self.calls += 1
            return call(lm, *args, **kwargs)

        monkeypatch.setattr(HFLM, "_model_call", counted)


def test_what_was_answered_before_a_crash_is_not_asked_again(monkeypatch, tmp_path, rows):
    options = {"tasks": ["piqa", "winogrande"], "task_data": rows, "device": "cpu"}
    with monkeypatch.context() as patch:
        all_of_it = Counter(patch)
        whole = evaluate(str(MODEL), **options)
    assert all_of_it.calls == 12
    with monkeypatch.context() as patch:
        Counter(patch, most=5)
        with pytest.raises(CheckpointError, match="power cut"):
            evaluate(str(MODEL), **options, cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        rest, steps = Counter(patch), []
        again = evaluate(str(MODEL), **options, cache=tmp_path / "cache", progress=steps.append)
    assert rest.calls == 7
    counts = {(step.done, step.total) for step in steps if step.phase == SCORING}
    assert counts == {(done, 12) for done in (0, 1, *range(6, 13))}, "cached answers count after their task"
    assert again == whole
    with monkeypatch.context() as patch:
        Counter(patch, most=0)
        assert evaluate(str(MODEL), **options, cache=tmp_path / "cache") == whole


def change_a_weight(model, tokenizer):
    with torch.no_grad():
        model.model.norm.weight.view(torch.int16)[-1] ^= 1


def change_the_configuration(model, tokenizer):
    model.config.rms_norm_eps *= 2


CHANGES = [
    lambda model, tokenizer: model.float(),
    change_a_weight,
    change_the_configuration,
    lambda model, tokenizer: tokenizer.add_tokens(["hasslefree"]),
    lambda model, tokenizer: tokenizer.add_tokens(["hasslefrei"]),
]


def test_the_name_of_the_cache_depends_on_weights_configuration_and_tokenizer():
    def name(change=None):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
        if change is not None:
            change(model, tokenizer)
        return cache_name(model, tokenizer)

    assert name() == name()
    assert len({name(), *map(name, CHANGES)}) == 6


def test_each_task_is_handed_over_as_it_comes(rows):
    kept = []
    options = {"task_data": rows, "dtype": "float32", "device": "cpu"}
    found = evaluate(
        str(MODEL), tasks=["rte", "piqa"], keep=lambda results: kept.append(json.dumps(results)), **options
    )
    kept = [json.loads(results) for results in kept]
    assert [list(results["tasks"]) for results in kept] == [["rte"], ["rte", "piqa"]]
    assert kept[0]["average"] == found["tasks"]["rte"]["value"]
    assert kept[1] == found


def test_an_error_in_keep_leaves_torch_and_datasets_as_they_were(rows):
    def fail(results):
        raise OSError("disk full")

    bars = datasets.is_progress_bar_enabled()
    with pytest.raises(OSError, match="disk full") as held:  # whose traceback keeps the frames alive
        evaluate(str(MODEL), tasks=["rte"], task_data=rows, dtype="bfloat16", device="cpu", keep=fail)
    assert held.tb is not None
    assert torch._C._len_torch_function_stack() == 0
    assert datasets.is_progress_bar_enabled() == bars


def test_two_models_answer_the_same_tasks(rows):
    found = evaluate(str(MODEL), tasks=["winogrande"], task_data=rows, dense=str(MODEL), device="cpu")
    assert found["dense"]["tasks"] == found["tasks"]


def test_a_cache_that_cannot_be_used(tmp_path, rows):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be used .*cache="):
        evaluate(str(MODEL), tasks=["rte"], task_data=rows, cache=tmp_path / "file")
    evaluate(str(MODEL), tasks=["rte"], task_data=rows, cache=tmp_path / "cache")
    (answers,) = (tmp_path / "cache").iterdir()
    answers.write_bytes(b"no database at all" * 100)
    with pytest.raises(OutputError, match="cannot be used .*delete it"):
        evaluate(str(MODEL), tasks=["rte"], task_data=rows, cache=tmp_path / "cache")


def test_a_question_of_a_task_is_not_ended():
    """Oracle: the ids by hand. The harness cuts off as many tokens as the question has."""
    from lm_eval.models.huggingface import HFLM

    model = build("llama")
    model.config._name_or_path = ""
    lm = HFLM(model, tokenizer=number_tokenizer("<s> $A </s>"))
    assert lm._encode_pair("5 6", " 7 8") != ([1, 5, 6], [7, 8])
    leave_open(lm)
    assert lm._encode_pair("5 6", " 7 8") == ([1, 5, 6], [7, 8])
    assert lm.tok_encode("7 8", add_special_tokens=False) == [7, 8]
    lm.tokenizer.add_tokens(["64"])
    with pytest.raises(ModelError, match="token id 64, '64', is outside the model's vocabulary"):
        lm.tok_encode("7 64")
