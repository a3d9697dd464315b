"""The page and the figures: whole in themselves, and safe whatever a folder says."""

import base64
import dataclasses
import hashlib
import json
import multiprocessing
import re
import resource
import shutil
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from hasslefree.errors import MemoryShortError
from hasslefree.report.charts import comparisons, lines, run_charts, thinned, write_figures
from hasslefree.report.content import OUTSIDE, Content, read_content
from hasslefree.report.maps import MAPS, cells, figures, layer_map
from hasslefree.report.page import leading, render
from tests.report.folders import compressed, edit, evaluation
from tests.tiny_models import tensors_of

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' {{ 7*7 }} $x_{"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return compressed(folder / "one"), compressed(folder / "two", method="wanda", rank=None, rounds=None)


class Tags(HTMLParser):
    """Every tag with its attributes, and all text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [("", {})], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags[-1][0] not in ("script", "style"):
            self.text += data


def test_the_page_needs_nothing_but_itself(made):
    text = render(read_content(made))
    tags = Tags(text).tags
    assert len(text.encode()) < 1_100_000
    assert not [each for tag, each in tags if "src" in each or each.get("href", "").startswith(("http", "/"))]
    style, data = (
        re.search(f"<{tag}>(.*?)</", text, re.DOTALL)[1]
        for tag in ("style", 'script type="application/json" id="data"')
    )
    assert "@import" not in style
    assert "url(" not in style
    assert '"url"' not in data


def test_every_layer_of_every_run_is_a_choice_and_a_line_of_the_table(made):
    content = read_content(made)
    tags = Tags(render(content)).tags
    names = [layer.name for run in content.runs for layer in run.record.layers]
    assert [each["value"] for tag, each in tags if tag == "option"] == names
    assert [each["data-layer"] for tag, each in tags if tag == "tr" and "data-layer" in each] == names
    chosen = [each["value"] for tag, each in tags if tag == "option" and "selected" in each]
    worst = [max(run.record.layers, key=lambda layer: layer.relative_error) for run in content.runs]
    assert chosen == [layer.name for layer in worst]


def test_the_bits_of_entropy_coded_layers_are_those_that_are_stored(tmp_path):
    folder = compressed(tmp_path / "out", rank=None, method=None, size="5bits", rounds=1, effort="fast")
    run = read_content([folder]).runs[0]
    bits = run.record.layers[0].spec.grid.stored_bits
    assert bits % 1
    assert f"<td>{bits:g}</td>" in render(read_content([folder]))
    assert f"{run.record.outside[0].spec.grid.stored_bits:g} bits; " in render(read_content([folder]))


def test_the_page_says_what_was_trained_after_the_errors_were_measured(made, tmp_path):
    said = "The errors were measured before this training"
    assert said not in render(read_content(made))
    assert said in render(read_content([*made, compressed(tmp_path / "other", match_predictions=32)]))


def test_the_perplexities_come_first(made, tmp_path):
    folder = shutil.copytree(made[0], tmp_path / "out")
    tags = render(read_content([folder]))
    assert "not measured (the calibration tokens were given from Python)" in tags
    edit(folder, lambda content: content.update(held_out={"dense": 20.0, "compressed": 25.0, "segments": 8}))
    page = render(read_content([folder]))
    assert "KL" not in page[page.index("Summary") : page.index("Mean relative error")]
    assert "<dd>20.00 → 25.00 (+25.0 %)</dd>" in page
    assert "on 8 × 16 held-out tokens of the calibration text; text of other kinds may lose more" in page
    assert page.index("Perplexity") < page.index("Mean relative error")


@pytest.mark.parametrize(("window", "said"), [(2048, False), (512, True)])
def test_perplexities_in_other_windows_do_not_compare(window, said, made, tmp_path):
    for folder, tokens in ((made[0], 2048), (made[1], window)):
        row = {"held_out.txt": {"perplexity": 40.0, "window": tokens}}
        (tmp_path / f"{tokens}{folder.name}.json").write_text(json.dumps({"model": str(folder), "perplexity": row}))
    page = render(read_content([*made, *tmp_path.iterdir()]))
    note = "The perplexities on held_out.txt are not comparable: they were measured in windows of 512 and 2048 tokens."
    assert (note in page) == said


@pytest.mark.parametrize(
    ("scored", "said"),
    [
        ({"tokens": 8192, "first_tokens": [1]}, None),
        ({"tokens": 300}, "on 300 and 8192 tokens"),
        ({"first_tokens": []}, "with the first tokens none and 1"),
    ],
)
def test_perplexities_that_were_scored_in_other_ways_do_not_compare(scored, said, made, tmp_path):
    for folder, fields in ((made[0], {"tokens": 8192, "first_tokens": [1]}), (made[1], scored)):
        row = {"held_out.txt": {"perplexity": 40.0, "window": 2048} | fields}
        (tmp_path / f"{folder.name}.json").write_text(json.dumps({"model": str(folder), "perplexity": row}))
    page = render(read_content([*made, *tmp_path.iterdir()]))
    if said is None:
        assert "not comparable" not in page
    else:
        assert f"The perplexities on held_out.txt are not comparable: they were measured {said}." in page


def test_several_calibration_texts_are_listed(tmp_path):
    folder = compressed(tmp_path / "out")
    edit(folder, lambda content: content.update(own_segments=False))
    edit(folder, lambda content: content["recipe"].update(calibration=["c4:40%", "python:60%"]))
    assert "tokens of c4:40%, python:60%, in segments" in " ".join(render(read_content([folder])).split())


def test_only_a_model_with_all_tasks_has_a_mean(made, tmp_path):
    both = {"piqa": {"value": 0.5}, "rte": {"value": 0.25}}
    for folder, tasks in ((made[0], both), (made[1], {"piqa": {"value": 0.875}})):
        evaluation(tmp_path / f"{folder.name}.json", folder, 40.0, tasks=tasks)
    table = render(read_content([*made, *tmp_path.iterdir()])).partition("mean of tasks")[2].partition("</table>")[0]
    assert "<td>50 %</td><td>25 %</td><td>38 %</td>" in table.replace("\n", "")
    assert "<td>88 %</td><td></td><td></td>" in table.replace("\n", "")


def test_the_kl_is_beside_its_perplexity(made, tmp_path):
    folder = shutil.copytree(made[0], tmp_path / "out")
    kl = {"mean": 0.0123, "median": 0.004, "percentile_99": 0.2, "same_top_token": 0.9753}
    held_out = {"dense": 20.0, "compressed": 25.0, "segments": 8, "kl": kl | {"mean": 0.5}}
    edit(folder, lambda content: content.update(held_out=held_out))
    evaluation(folder / "evaluation.json", "m", 40.0, kl)
    page = render(read_content([folder, made[1]]))
    said = "KL from dense: mean {}, 99th percentile 0.2 nats; same top token 97.5 %"
    assert page.index(said.format("0.5")) < page.index(said.format("0.012"))
    assert '<th scope="col">mean KL, held_out.txt</th>' in page
    assert "<td>0.0123</td>" in page


def test_whatever_a_folder_says_is_text(made, tmp_path):
    folder = shutil.copytree(made[0], tmp_path / "<b>evil")

    def spoil(content):
        content["model"] = content["method"] = content["recipe"]["method"] = EVIL
        content["recipe"]["calibration"] = content["device"] = content["dtype"] = content["versions"]["torch"] = EVIL
        content["layers"][0] |= {"remarks": [EVIL], "pattern": EVIL, "name": EVIL}

    edit(folder, spoil)
    evaluation(folder / "evaluation.json", "m", 3.0, tasks={EVIL: {"value": 0.5}}, average=0.5)
    dense = evaluation(tmp_path / "dense.json", EVIL, 2.0)
    content = read_content([folder, dense])
    page = render(content)
    found = Tags(page)
    plain = Tags(render(read_content([made[0], dense])))
    assert sum(tag == "script" for tag, _ in found.tags) == 3
    assert not [each for tag, each in found.tags if tag in ("img", "b") and each]
    assert not [name for _, each in found.tags for name in each if name.startswith("on")]
    assert EVIL in found.text
    assert {name for _, each in found.tags for name in each} <= {name for _, each in plain.tags for name in each}
    assert len(write_figures(content, tmp_path / "figures")) == 14
    data = next(
        json.loads(text) for text in re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    )
    assert {row["layer"] for row in data["charts"]["relative-error-0"]["datasets"]["rows"]} >= {EVIL}


def test_the_browser_is_told_to_run_the_two_scripts_of_the_page_alone(made):
    """Oracle: SHA-256 of what stands between the tags."""
    text = render(read_content(made))
    policy = next(each["content"] for tag, each in Tags(text).tags if each.get("http-equiv"))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = [f"'sha256-{digest}'" for digest in digests]
    assert len(hashes) == 2
    assert policy.startswith("default-src 'none';")
    assert re.findall(r"'sha256-\S+'", policy) == hashes
    assert "unsafe" not in policy.partition("script-src")[2]


def test_curves_keep_their_ends():
    values = [float(value) for value in range(1, 101)]
    assert thinned(values, 200) == {"step": [*range(1, 101)], "value": values}
    thin = thinned(values, 8)
    assert (len(thin["value"]), thin["value"][0], thin["value"][-1]) == (8, 1.0, 100.0)
    assert thin["step"] == thin["value"], "value x is x"
    assert thinned([], 8) == {"step": [], "value": []}


def test_small_figures_by_hand():
    shown = [MAPS["kept"].text(share) for share in (0, 0.0032, 0.0123, 0.5, 0.996, 1)]
    assert shown == ["0 %", "0.32 %", "1.2 %", "50 %", "100 %", "100 %"]
    assert [MAPS[name].text(12345.678) for name in ("sensitivity", "bytes")] == ["12000", "12300"]
    assert [leading(values, 0.9) for values in ([3.0, 1.0], [2.0, 2.0], [], [0.0])] == [1, 2, 0, 0]


def test_figures_are_whole_and_the_same_twice(made, tmp_path):
    content = read_content(made)
    first, again = write_figures(content, tmp_path / "a"), write_figures(content, tmp_path / "b")
    names = {path.name for path in first}
    stems = {"relative-error-one", "bytes-one", "kept-one", "rank-one", "rounds-one", "spectra-one"}
    stems |= {"relative-error-two", "bytes-two", "kept-two", "comparison"}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        if one.suffix == ".svg":
            ET.parse(one)
        else:
            assert one.read_bytes().startswith(b"\x89PNG")


def test_allocation_and_perplexities_have_figures(made, tmp_path):
    names = [layer.name for layer in read_content(made).runs[0].record.layers]
    folder = shutil.copytree(made[0], tmp_path / "one")
    other = shutil.copytree(made[1], tmp_path / "two")
    edit(folder, lambda content: content.update(sensitivities=dict.fromkeys(names, 0.5)))
    files = [evaluation(tmp_path / "a.json", folder, 3.0), evaluation(tmp_path / "b.json", other, 4.0)]
    content = read_content([folder, other, *files])
    drawn = {path.name for path in write_figures(content, tmp_path / "figures")}
    assert {
        f"{stem}.{kind}" for stem in ("sensitivity-one", "perplexity-held_out.txt") for kind in ("png", "svg")
    } <= drawn
    sizes = [run.sizes.to_dict()["bytes"] for run in content.runs]
    points = comparisons(content)["perplexity-held_out.txt"].rows
    assert [(point["bytes"], point["perplexity"]) for point in points] == [*zip(sizes, (3.0, 4.0), strict=True)]


def test_experts_share_a_cell_by_hand():
    """A click leads to the largest. The drawing says which number is in which cell."""
    values = {f"m.layers.{b}.mlp.experts.{e}.w1": 0.01 * 2 ** (3 * b + e) for b in range(2) for e in range(3)}
    first, second = "m.layers.0.mlp.experts.2.w1", "m.layers.1.mlp.experts.2.w1"
    summed = [{"layer": first, "block": 0, "kind": "w1", "value": 0.07, "text": "0.07"}]
    summed += [{"layer": second, "block": 1, "kind": "w1", "value": 0.56, "text": "0.56"}]
    assert cells(values, MAPS["sensitivity"]) == layer_map("sensitivity", values).rows == summed
    means = cells(values, MAPS["relative-error"])
    assert [(row["value"], row["text"]) for row in means] == [(0.02333, "2.3 %"), (0.1867, "19 %")]
    assert f"layer: {first}; nats per token: 0.07" in layer_map("sensitivity", values).svg()


def test_maps_of_folders_with_experts_have_one_scale(made):
    """By hand: 14 experts share a cell. Each takes 1 kB in one folder and 3 kB in the other, all of them 14 and 42."""
    runs = []
    for run, stored in zip(read_content(made).runs, (1000, 3000), strict=True):
        layers = tuple(
            dataclasses.replace(layer, name=f"m.layers.0.mlp.experts.{i}.w1", bytes=stored)
            for i, layer in enumerate(run.record.layers)
        )
        runs.append(dataclasses.replace(run, record=dataclasses.replace(run.record, layers=layers), spectra={}))
    content = Content(tuple(runs), {})
    for run in runs:
        chart = run_charts(run, content, "0")["bytes-0"].chart
        assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == [14.0, 42.0]


def test_folders_whose_names_differ_in_a_slash_have_figures_of_their_own(made, tmp_path):
    run, _ = read_content(made).runs
    runs = tuple(dataclasses.replace(run, name=name, spectra={}) for name in ("a/b", "a-b"))
    files = write_figures(Content(runs, {}), tmp_path)
    assert len(set(files)) == len(files) == len([*tmp_path.iterdir()])


def test_a_curve_of_one_value_can_be_seen():
    """Oracle: the marks of the picture. A line from a point to itself is not drawn."""
    row = {"layer": "a", "kind": "q", "step": [1], "value": [0.5]}
    assert 'aria-roledescription="point"' in lines("L of rank 1", [row], "x", "y", is_share=True).svg()


@pytest.mark.parametrize("name", ["relative-error", "rank"])
def test_every_cell_can_be_read(name):
    """Oracle: WCAG 2.1, contrast of at least 4.5, from the colours in the picture."""
    svg = layer_map(name, {f"m.layers.{i}.q_proj": float(2**i) for i in range(9)}).svg()
    colours = re.findall(r'aria-roledescription="rect mark".*?fill="rgb\((\d+), (\d+), (\d+)\)"', svg)
    texts = re.findall(r'aria-roledescription="text mark".*?fill="(#000|#fff)"', svg)
    assert len(colours) == len(texts) == 9
    assert {*texts} == {"#000", "#fff"}
    for colour, text in zip(colours, texts, strict=True):
        parts = [int(part) / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05
        assert (1.05 / light if text == "#fff" else light / 0.05) >= 4.4


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """As with the default setting: embedding and head too, no zeros, no L, and other bits in each layer."""
    fields = {"bits": 4, "embedding_bits": 6, "scale_bits": 16, "rank": 0, "effort": "fast"}
    folder = compressed(tmp_path_factory.mktemp("bits") / "out", method=None, rounds=None, **fields)

    def share_out(content):
        for number, layer in enumerate(content["layers"]):
            if ".layers." in layer["name"]:
                layer["grid"]["bits"] = 3 + number % 3

    edit(folder, share_out)
    return folder


def test_the_page_of_a_quantised_model_shows_bits_and_bytes(quantised):
    """Oracles: compression.json, and the tensors in the folder. Embedding and head are among the layers."""
    content = read_content([quantised])
    (run,) = content.runs
    stored = json.loads((quantised / "compression.json").read_text())["layers"]
    bits = {layer["name"]: layer["grid"]["bits"] for layer in stored}
    shown = figures(run.record)
    assert shown["bits"] == bits
    assert (bits["model.embed_tokens"], bits["lm_head"], len(bits)) == (6, 6, 16)
    tensors = tensors_of(quantised)
    for name, kilobytes in shown["bytes"].items():
        held = (tensor.nbytes for full, tensor in tensors.items() if full.startswith(f"{name}."))
        assert 1000 * kilobytes == sum(held)
    outside = [row for row in layer_map("bits", bits).rows if row["block"] == OUTSIDE]
    assert [(row["kind"], row["text"]) for row in outside] == [("embed_tokens", "6"), ("lm_head", "6")]
    page = render(content)
    assert "<dt>embed_tokens</dt>" in page
    assert "<dt>lm_head</dt>" in page
    assert "16 matrices were rounded to 3–6 bits." in page
    assert '<th scope="col">bits of S</th><th scope="col">bytes</th>' in page
    assert shown["kept"] == shown["rank"] == {}, "all is kept, and every rank is 0"
    assert not re.search("pattern of S|non-zeros of S|rank of L|Parameters kept", page)


def test_a_layer_without_l_has_rank_zero_if_others_have_one(made):
    record = read_content(made).runs[0].record
    first, *others = record.layers
    first = dataclasses.replace(first, spec=dataclasses.replace(first.spec, rank=0))
    found = figures(dataclasses.replace(record, layers=(first, *others)))["rank"]
    assert found == {first.name: 0} | {layer.name: 2 for layer in others}


def test_the_page_of_a_pruned_model_says_what_it_is(made):
    page = render(read_content(made))
    assert "14 matrices were pruned (2:4), and corrected by a low-rank matrix of rank 2." in page
    assert "14 matrices were pruned (2:4)." in page
    assert '<th scope="col">pattern of S</th>' in page


def test_perplexities_on_the_same_held_out_text_are_compared(made, tmp_path):
    """Oracle: compression.json. A loss of 1 % looks small: the axis is as long as a loss of 20 %."""
    folders = [shutil.copytree(source, tmp_path / source.name) for source in made]
    for folder, value in zip(folders, (20.1, 20.2), strict=True):
        checked = {"dense": 20.0, "compressed": value, "segments": 8}
        edit(folder, lambda content, checked=checked: content.update(held_out=checked, held_out_code=checked))
    content = read_content(folders)
    drawing = comparisons(content)["perplexity-held-out text"]
    sizes = [run.sizes.bytes for run in content.runs]
    points = [(point["bytes"], point["perplexity"]) for point in drawing.rows]
    assert points == [(content.runs[0].sizes.dense_bytes, 20.0), *zip(sizes, (20.1, 20.2), strict=True)]
    assert drawing.on_page()["encoding"]["y"]["scale"]["domain"] == [20.0, 24.0]
    assert "<td>20.00 → 20.20 (+1.0 %)</td><td>20.00 → 20.20 (+1.0 %)</td>" in render(content)
    edit(folders[1], lambda content: content["held_out"].update(dense=21.0))
    assert not [name for name in comparisons(read_content(folders)) if "held-out" in name]


def test_the_sensitivity_of_a_quantised_model_is_to_rounding(quantised, made, tmp_path):
    pages = []
    for source in (quantised, made[0]):
        folder = shutil.copytree(source, tmp_path / source.name)
        names = [layer.name for layer in read_content([folder]).runs[0].record.layers]
        edit(folder, lambda content, names=names: content.update(sensitivities=dict.fromkeys(names, 0.5)))
        pages.append(Tags(render(read_content([folder]))).text)
    assert "when this layer alone is rounded to the fewest bits" in pages[0]
    assert "More bits, or a higher rank, went to" in pages[0]
    assert "when this layer alone is pruned" in pages[1]


def draw(error):
    return layer_map("relative-error", {"m.layers.0.q_proj": error}).svg()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_a_forked_process_draws_the_same():
    """A fork has no thread of the JavaScript engine that its parent started."""
    expected = draw(0.5)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(draw, (0.5,)).get(timeout=60) == expected


def draw_in_little(error):
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return draw(error)


def test_a_process_whose_address_space_is_limited_gets_a_sentence():
    """V8 would abort it. The engine of this process is a child, which may fail."""
    with (
        multiprocessing.get_context("fork").Pool(1) as pool,
        pytest.raises(MemoryShortError, match="charts could not be drawn: lift the limit on address space"),
    ):
        pool.apply_async(draw_in_little, (0.5,)).get(timeout=60)
