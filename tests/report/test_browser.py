"""The page in a real Chromium: no errors, what clicks and keys do, both colour schemes, and the width of a phone."""

import dataclasses
import itertools
import json
import shutil

import pytest

from hasslefree.progress import PhaseTime
from hasslefree.report.content import Content, Evaluation, TextResult, read_content
from hasslefree.report.page import render
from hasslefree.report.samples import Sample, Samples
from hasslefree.report.seconds import seconds_file, write_seconds
from tests.report.folders import compressed, edit, evaluation
from tests.tiny_models import build, tensors_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)", allow_module_level=True)

# No sandbox, because tests may run as root; no connections of the browser's own.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip
FOLDERS = ["one", "two-" + 60 * "x"]
SIZES = {"desktop": (1200, 900), "phone": (380, 800)}


PHASES = [("loading the model", 2.0), ("solving", 10.0), ("writing", 5.0)]
SAMPLES = [
    Samples((Sample("Say <b>", "same left" + 90 * "x", "same <i>right"),)),
    Samples((Sample("Say <b>", "alone"),), "No dense model."),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two folders and a dense model; names that are long, and one that is a script."""
    folder = tmp_path_factory.mktemp("browser")
    one = compressed(folder / "one")
    two = compressed(folder / (FOLDERS[1]), method="wanda", rank=None, rounds=None)
    evil = "<img src=x onerror=\"document.title='pwned'\">"
    edit(one, lambda content: content.update(model="a/" + 80 * "m", method=evil))
    edit(one, lambda content: content["layers"][3].update(remarks=[evil]))
    names = [layer["name"] for layer in json.loads((one / "compression.json").read_text())["layers"]]
    edit(one, lambda content: content.update(sensitivities={name: 2.0**-i for i, name in enumerate(names)}))
    edit(two, lambda content: content.update(model="base/dense"))
    for run, value in ((one, 33.0), (two, 44.0)):
        evaluation(run / "evaluation.json", "m", value, tasks={"piqa": {"value": 0.5}}, average=0.5)
    phases = tuple(PhaseTime(*phase) for phase in PHASES)
    write_seconds(one, dataclasses.replace(read_content([one]).runs[0].record, seconds=20.0, phases=phases))
    dense = evaluation(folder / "dense.json", "base/dense", 30.0)
    path = folder / "page.html"
    path.write_text(render(read_content([one, two, dense]), SAMPLES), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, file):
    """A function that opens the page; at the end there must have been no message, error or request."""
    heard, contexts = [], []

    def open_page(scheme="light", size="desktop"):
        width, height = SIZES[size]
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda asked: heard.append(asked.url) if not asked.url.startswith(("file:", "data:")) else 0)
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


# A chart whose data are those that it draws: `run` after a change, because Vega draws in its own time.
DRAWN = """async ([chart, name]) => {
    const view = await document.getElementById(chart).view;
    await view.runAsync();
    return view.data(name); }"""


def drawn(page, chart, *fields):
    """The rows that a chart draws, after its filters."""
    return [tuple(row[field] for field in fields) for row in page.evaluate(DRAWN, [chart, "data_0"])]


def select(page, name):
    """Click on the corner of a cell of the map, beside its number."""
    page.locator(f'#relative-error-0 path[aria-label*="{name};"]').first.click(position={"x": 3, "y": 3})


def facts(page):
    """What is listed of the selected layer."""
    titles, values = (page.locator(f".facts:visible {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(titles, values, strict=True))


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", "phone"), pytest.param("dark", "desktop", marks=pytest.mark.nightly)]
)
def test_it_opens_whole_and_nothing_overflows(opened, scheme, size):
    page = opened(scheme, size)
    charts = ("comparison", "relative-error-0", "rounds-0", "spectra-0", "sensitivity-0", "bytes-0", "kept-0",
              "rank-0", "perplexity-held_out.txt")  # fmt: skip
    for chart in charts:
        page.evaluate(DRAWN, [chart, "rows"])
        box, place = (page.locator(f'[id="{chart}"] {part}').bounding_box() for part in ("svg", ""))
        assert box["width"] > 250, chart
        assert box["x"] + box["width"] <= place["x"] + place["width"] + 1, chart
        assert page.locator(f'[id="{chart}"] svg [role="graphics-symbol"]').count(), chart
    # Charts of the hidden folder are drawn when it is shown.
    assert page.locator("svg.marks").count() == len(charts)
    width = SIZES[size][0]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # What is wider than the window must be in a part that scrolls by itself.
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .hidden, .skip, svg') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert page.title().endswith("hasslefree report")
    numbers = (page.locator(f"#{chart} .mark-text.role-mark").first for chart in ("relative-error-0", "rank-0"))
    assert [number.is_visible() for number in numbers] == [size == "desktop", True], "long numbers would overlap"


def test_a_click_shows_the_layer(opened, file):
    """Oracle: compression.json of the folder."""
    page = opened()
    (run, _) = read_content([file.parent / "one", file.parent / (FOLDERS[1])]).runs
    layer = run.record.layers[12]
    select(page, layer.name)
    assert page.locator("select:visible").input_value() == layer.name
    assert facts(page)["relative error"] == f"{float(f'{100 * layer.relative_error:.2g}'):g} %"
    assert facts(page)["bytes"] == f"{layer.bytes:,}"
    assert facts(page)["non-zeros of S"] == f"{layer.spec.nonzeros:,}"
    measured = [(layer.name, step, pytest.approx(value, rel=1e-4)) for step, value in enumerate(layer.history, 1)]
    assert drawn(page, "rounds-0", "layer", "step", "value") == measured
    values = run.spectra[layer.name]
    kept = [(step, pytest.approx(value, rel=1e-4)) for step, value in enumerate(values, 1)]
    assert drawn(page, "spectra-0", "step", "value") == kept
    last = run.record.layers[-1].name
    page.locator(f'#kept-0 path[aria-label*="{last};"]').first.click(position={"x": 3, "y": 3})
    assert page.locator("select:visible").input_value() == last, "other maps lead to their layers as well"


def test_a_layer_without_a_low_rank_part_draws_nothing(opened, file):
    (run, _) = read_content([file.parent / "one", file.parent / (FOLDERS[1])]).runs
    name = next(name for name, values in run.spectra.items() if not any(values))
    page = opened()
    page.locator("select:visible").select_option(name)
    assert drawn(page, "spectra-0", "step") == []
    assert facts(page)["rank for 90 % of L"] == "0"


def test_remarks_are_text(opened, file):
    page = opened()
    name = read_content([file.parent / "one"]).runs[0].record.layers[3].name
    page.locator("select:visible").select_option(name)
    assert facts(page)["remarks"].startswith("<img src=x")
    assert "pwned" not in page.title()


def test_the_keyboard_alone_is_enough(opened):
    """The arrows choose a layer, and what is listed follows; Enter opens the table of all layers."""
    page = opened()
    choice = page.locator("select:visible")
    choice.focus()
    page.keyboard.press("Home")
    first = facts(page)
    assert choice.input_value() == "model.layers.0.self_attn.q_proj"
    page.keyboard.press("ArrowDown")
    assert choice.input_value() == "model.layers.0.self_attn.k_proj"
    assert facts(page) != first
    assert drawn(page, "rounds-0", "layer")[0] == ("model.layers.0.self_attn.k_proj",)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    page.keyboard.press("Enter")
    assert page.locator("details[open]:visible tbody tr").count() == 14


def test_another_folder_by_its_button(opened):
    page = opened()
    page.locator("select:visible").select_option("model.layers.0.mlp.up_proj")
    page.locator("#choice input").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".of-run:visible").first.get_attribute("data-run") == "1"
    assert page.locator("select:visible").input_value() == "model.layers.0.mlp.up_proj", "the same layer"
    assert page.locator("#spectra-1").count() == 0, "the layers have no low-rank part"
    assert page.locator('.of-run[data-run="0"]:visible').count() == 0
    assert len(page.evaluate(DRAWN, ["relative-error-1", "rows"])) == 14
    assert page.locator("#relative-error-1 svg").bounding_box()["width"] > 250


def test_sensitivities_are_those_of_the_record(opened, file):
    """Oracle: compression.json, layer by layer; a folder without sensitivities shows no section."""
    stored = json.loads((file.parent / "one/compression.json").read_text())["sensitivities"]
    page = opened()
    rows = [(row["block"], row["kind"], row["value"]) for row in page.evaluate(DRAWN, ["sensitivity-0", "rows"])]
    assert len(rows) == len(stored) == 14
    assert {(block, kind): pytest.approx(value, rel=1e-3) for block, kind, value in rows} == {
        (int(name.split(".")[2]), name.split(".")[-1]): value for name, value in stored.items()
    }
    assert page.get_by_role("heading", name="Sensitivity by block and layer").count() == 1
    page.locator("#choice input").nth(1).check(force=True)
    assert page.get_by_role("heading", name="Sensitivity by block and layer").count() == 0


def test_every_model_is_a_point_of_perplexity_and_bytes(opened, file):
    """Oracles: the tensors of the folders, the evaluations; the dense model has two blocks' weights whole."""
    size = {name: sum(tensor.nbytes for tensor in tensors_of(file.parent / name).values()) for name in FOLDERS}
    whole = sum(parameter.numel() * 4 for parameter in build("llama").parameters())
    rows = opened().evaluate(DRAWN, ["perplexity-held_out.txt", "rows"])
    assert {row["model"]: (row["bytes"], row["perplexity"]) for row in rows} == {
        "base/dense (dense)": (whole, 30.0),
        FOLDERS[0]: (size[FOLDERS[0]], 33.0),
        FOLDERS[1]: (size[FOLDERS[1]], 44.0),
    }


@pytest.fixture(scope="module")
def crowd(file):
    """Eight models of the same size, whose perplexities on one text are close, and on the other a decade apart."""
    (run,) = read_content([file.parent / "one"]).runs
    runs = []
    for i in range(8):
        texts = {"close": TextResult(9 * (1 + 0.001 * i)), "decade": TextResult(9 * (1 + 3.0 * i))}
        name = f"a-folder-with-a-long-name-{i}"
        runs.append(dataclasses.replace(run, name=name, evaluation=Evaluation(texts)))
    path = file.with_name("crowd.html")
    path.write_text(render(Content(tuple(runs), {})), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("size", "text"), [pytest.param("desktop", "decade", marks=pytest.mark.nightly), ("phone", "close")]
)
def test_names_in_a_picture_do_not_overlap(opened, crowd, size, text):
    """The name of each model is in the legend, whole, within the picture."""
    page = opened("light", size)
    page.goto(crowd.as_uri())
    chart = f"#perplexity-{text}"
    page.evaluate(DRAWN, [chart[1:], "rows"])
    area = page.locator(f"{chart} svg").bounding_box()
    labels = page.locator(f"{chart} .role-legend-label text")
    assert [name[-6:] for name in labels.all_text_contents()] == [f"name-{i}" for i in range(8)]
    boxes = [label.bounding_box() for label in labels.all()]
    for box in boxes:
        assert area["x"] <= box["x"] <= area["x"] + area["width"] - box["width"]
        assert area["y"] <= box["y"] <= area["y"] + area["height"] - box["height"]
    for one, other in itertools.combinations(boxes, 2):
        apart = max(one["x"], other["x"]) >= min(one["x"] + one["width"], other["x"] + other["width"])
        assert apart or max(one["y"], other["y"]) >= min(one["y"] + one["height"], other["y"] + other["height"])


def test_phases_are_bars_of_their_share_of_the_time_of_all(opened, file):
    """Oracle: the seconds in the file beside the folder; a folder without such a file shows no section."""
    page = opened()
    rows = page.locator(".phases tbody tr:visible")
    assert [[cell.strip() for cell in row.split("\t")] for row in rows.all_inner_texts()] == [
        ["loading the model", "", "2 s"], ["solving", "", "10 s"], ["writing", "", "5 s"],
    ]  # fmt: skip
    stored = json.loads(seconds_file(file.parent / "one").read_text())
    widths = page.locator(".phases i").evaluate_all(
        "bars => bars.map(bar => bar.getBoundingClientRect().width / bar.closest('td').getBoundingClientRect().width)"
    )
    together = sum(phase["seconds"] for phase in stored["phases"])
    shares = [phase["seconds"] / together for phase in stored["phases"]]
    inner = widths[1] / shares[1]  # what the padding leaves of a cell
    assert inner == pytest.approx(1, abs=0.1)
    assert widths == [pytest.approx(share * inner, rel=0.02) for share in shares]
    page.locator("#choice input").nth(1).check(force=True)
    assert page.locator(".phases:visible").count() == 0


def test_samples_are_highlighted_from_the_first_difference(opened):
    page = opened()
    assert page.locator(".prompt:visible").all_inner_texts() == ["Say <b>"]
    assert page.locator(".written:visible").all_inner_texts() == ["same <i>right", "same left" + 90 * "x"]
    assert page.locator("mark:visible").all_inner_texts() == ["<i>right", "left" + 90 * "x"]
    assert page.get_by_text("from the first character at which they differ").count() == 1
    page.locator("#choice input").nth(1).check(force=True)
    assert page.locator(".written:visible").all_inner_texts() == ["alone"]
    assert page.locator("mark:visible").count() == 0
    assert page.get_by_text("No dense model.").is_visible()


def test_a_change_of_scheme_changes_the_page_and_the_charts(opened):
    page = opened("light")
    page.evaluate(DRAWN, ["rounds-0", "rows"])
    line = "document.querySelector('#rounds-0 .mark-line path')"
    look = f"[getComputedStyle(document.body).backgroundColor, getComputedStyle({line}).stroke]"
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    # The browser tells the page in its own time.
    page.wait_for_function(f"light => {look}.every((colour, i) => colour !== light[i])", arg=light)
    assert all(one != other for one, other in zip(light, page.evaluate(look), strict=True))
