"""The model card of a compressed folder: the licence, the figure and the command."""

import re

import pytest
import yaml
from markdown_it import MarkdownIt

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint.card import FIGURE, base_licence, model_card
from hasslefree.checkpoint.record import LayerRecord, Record
from hasslefree.core.grids import Grid
from hasslefree.packed.spec import LayerSpec
from tests.tiny_models import build, segments

LICENCES = {
    "license: apache-2.0": {"license": "apache-2.0"},
    "license: other\nlicense_name: mine\nlicense_link: https://x.example/l": {
        "license": "other", "license_name": "mine", "license_link": "https://x.example/l",
    },
    "license: [a, b]\nbase_model: x": {},
    "license: {": {},
    "- a list": {},
}  # fmt: skip


@pytest.mark.parametrize(("front", "expected"), LICENCES.items())
def test_the_licence_is_what_the_card_of_the_base_model_says(tmp_path, front, expected):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n\n# A model\n\nlicense: none of this\n")
    assert base_licence(str(tmp_path)) == expected


@pytest.mark.parametrize("odd", ["tags: 5", "1: x", "self: 3", "eval_results: 3"])
def test_what_else_a_card_says_does_not_matter(tmp_path, odd):
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{odd}\n---\n")
    assert base_licence(str(tmp_path)) == {"license": "mit"}


def test_no_card_no_licence(tmp_path):
    assert base_licence(str(tmp_path)) == {}
    (tmp_path / "README.md").write_text("license: in no front matter\n---\nlicense: mit\n---\n")
    assert base_licence(str(tmp_path)) == {}


def front_of(card):
    return yaml.safe_load(card.split("---\n")[1])


@pytest.mark.parametrize(
    ("layers", "said", "tags"),
    [
        ([("m.0.q", "dense", 3, 0), ("m.1.q", "dense", 5, 0)],
         "2 matrices were rounded to 3–5 bits, all of them in the blocks", ["quantized"]),
        ([("m.embed", "dense", 6, 0), ("m.1.q", "dense", 4, 8)],
         "rounded to 4–6 bits, and corrected by a low-rank matrix of rank 0–8, `m.embed` among them",
         ["quantized", "low-rank"]),
        ([("m.0.q", "2:4", None, 4), ("m.0.k", "2:4", None, 4)],
         "2 matrices were pruned (2:4), and corrected by a low-rank matrix of rank 4, all of them in the blocks",
         ["sparse", "low-rank"]),
        ([("m.0.q", "2:4", 4, 0)], "pruned (2:4) and rounded to 4 bits, all", ["sparse", "quantized"]),
    ],
)  # fmt: skip
def test_the_card_says_what_became_of_the_matrices(layers, said, tags):
    records = []
    for name, pattern, bits, rank in layers:
        grid = Grid(bits, 32, offset=True) if bits else None
        records.append(LayerRecord(name, LayerSpec(pattern, (32, 32), rank, 512, grid), 0.1, 0.1, 0.0))
    card = model_card(Record("m", {}, "", {}, "cpu", "float32", 8, 8, 3.0, tuple(records)), {})
    assert said in card.replace("\n", " ")
    assert front_of(card)["tags"] == ["hasslefree", *tags]


def test_globs_in_a_card_keep_their_asterisks():
    """Oracle: a parser of Markdown."""
    layer = LayerRecord("m.0.q", LayerSpec("dense", (32, 32), 0, 1024, Grid(4, 32, offset=True)), 0.1, 0.1, 0.0)
    recipe = {"leave_dense": ["*.experts.*", "m.*.k"]}
    routers = tuple(f"m.{i}.{name}" for i in range(2) for name in ("gate.w", "shared_gate.w"))
    card = model_card(Record("m", recipe, "", {}, "cpu", "float32", 8, 8, 3.0, (layer,), dense=routers), {})
    page = MarkdownIt("commonmark").render(card.split("---\n", 2)[2])
    assert "Left unchanged: *.experts.*, m.*.k." in page
    assert "stayed dense: m.*.gate.w (2), m.*.shared_gate.w (2)." in page


def test_the_card_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build("llama").save_pretrained("base")
    (tmp_path / "base/README.md").write_text("---\nlicense: other\nlicense_name: 'a: |b'\n---\n")
    hasslefree.compress("base", "out", Recipe(method="wanda"), segments=segments(), tokenizer=Nothing(), device="cpu")
    card = (tmp_path / "out/README.md").read_text()
    assert front_of(card)["license_name"] == "a: |b"
    assert r"that of the base model, `base`: a: \|b." in card
    assert re.findall(r"!\[.*\]\((.*)\)", card) == [FIGURE]
    assert (tmp_path / "out" / FIGURE).read_bytes().startswith(b"\x89PNG")
    assert "given from Python" in card


def test_the_card_says_what_was_trained_afterwards(tmp_path):
    for name, fields in {"fitted": {}, "trained": {"match_predictions": 32}}.items():
        recipe = Recipe(rank=2, method="eora", **fields)
        report = hasslefree.compress(build("llama"), tmp_path / name, recipe, segments=segments())
        card = (tmp_path / name / "README.md").read_text()
        assert ("The errors were measured before this training" in card) == bool(fields)
    found = report.predictions
    assert "the predictions of the dense model on 32 tokens." in card
    assert all(f"{found[name]:.4f}" in card.partition("divergence")[2] for name in ("before", "after"))


def test_a_model_without_a_card_says_so(tmp_path):
    hasslefree.compress(build("llama"), tmp_path / "out", Recipe(method="wanda"), segments=segments())
    card = (tmp_path / "out/README.md").read_text()
    assert "license" not in front_of(card)
    assert "look it up before you pass this model on" in card


class Nothing:
    """A tokenizer that writes nothing."""

    def save_pretrained(self, folder):
        pass


@pytest.mark.parametrize(
    ("grid", "row"),
    [(Grid(bits=4, group=8), "| stored | 24 bytes for 32 weights: 6.00 bits per weight |"),
     (None, "| parameters kept | 16 of 32 (50.0%) |")],
)  # fmt: skip
def test_a_quantised_model_is_measured_in_bytes_and_bits(grid, row):
    """By hand: 24 bytes are 192 bits. A count of parameters says nothing about codes."""
    spec = LayerSpec("2:4", (4, 8), 0, 16, grid)
    layer = LayerRecord("a.q", spec, 0.1, 0.09, 1.0, bytes=24, dense_bytes=64)
    record = Record("m", {"pattern": "2:4", "method": "gptq"}, "", {}, "cpu", "float32", 8, 8, 3.0, (layer,))
    card = model_card(record, {})
    assert row in card
    assert ("parameters kept" in card) == (grid is None)
    assert "Without `import hasslefree`, transformers fills the compressed layers with random numbers." in card
