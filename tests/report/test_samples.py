"""Samples of text of a compressed model and the dense one."""

import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hasslefree.cli.common import app
from hasslefree.demo.run import MODEL
from hasslefree.errors import PromptError
from hasslefree.report.content import read_content
from hasslefree.report.page import render
from hasslefree.report.samples import Sample, sample_folders


@pytest.mark.parametrize(
    ("compressed", "dense", "same"),
    [("a cat", "a dog", 2), ("same", "same", 4), ("one", "one more", 3), ("x", "", 0), ("alone", None, 5)],
)
def test_the_texts_part_at_the_first_different_character(compressed, dense, same):
    assert Sample("p", compressed, dense).same == same


def test_both_models_continue_each_prompt(out):
    """Oracle: `generate` of transformers on the same token ids."""
    (found,) = sample_folders([out], ["The list", "A dictionary"], max_new_tokens=6, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for name, text_of in ((out, lambda each: each.compressed), (MODEL, lambda each: each.dense)):
        model = AutoModelForCausalLM.from_pretrained(name)
        for each in found.samples:
            given = tokenizer(each.prompt, return_tensors="pt")
            whole = model.generate(**given, max_new_tokens=6, do_sample=False)[0, given["input_ids"].shape[1] :]
            assert text_of(each) == tokenizer.decode(whole, skip_special_tokens=True)
    assert found.remark is None
    assert [each.prompt for each in found.samples] == ["The list", "A dictionary"]


def test_without_the_dense_model_the_page_says_why(out, monkeypatch):
    monkeypatch.setattr("hasslefree.evaluation.continuation.find_local_model", lambda name: None)
    found = sample_folders([out], ["ab"], max_new_tokens=2, device="cpu")
    assert found == sample_folders([out], ["ab"], "original", 2, device="cpu")
    assert found[0].samples[0].dense is None
    page = render(read_content([out]), found)
    assert f"the dense model {MODEL} was not found from this folder or in the cache of the hub; name it with" in page
    assert sample_folders([out], ["ab"], "none", 2, device="cpu")[0].remark is None


def test_the_command_shows_both_texts(out, tmp_path):
    page = tmp_path / "page.html"
    words = ["report", str(out), "--output", str(page), "--device", "cpu", "--max-new-tokens", "3", "--prompt"]
    assert CliRunner().invoke(app, [*words, "The list"]).exit_code == 0
    assert re.findall(r'<h3 class="prompt">(.*)</h3>', page.read_text()) == ["The list"]
    assert re.findall("<h4>(.*?)</h4>", page.read_text()) == ["Dense", "Compressed"]
    refused = CliRunner().invoke(app, [*words, ""])
    assert isinstance(refused.exception, PromptError)
