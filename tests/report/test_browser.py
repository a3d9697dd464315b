"""The page in a real Chromium: no errors, what clicks and keys do, both colour schemes, and the width of a phone."""

import dataclasses
import itertools
import json
import shutil

import pytest

from hasslefree.phases import PhaseTime
from hasslefree.report.content import Content, Evaluation, read_content, seconds_file, write_seconds
from hasslefree.report.page import render
from hasslefree.report.samples import Sample, Samples, Text
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


PHASES = [("loading the model", 0.5), ("solving", 10.0), ("writing", 5.0)]
SAMPLES = [
    Samples((Sample("Say <b>", Text("same ", "left" + 90 * "x"), Text("same ", "<i>right"), 1),)),
    Samples((Sample("Say <b>", Text("alone", "")),), "No dense model."),
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
    phases = tuple(PhaseTime(*each) for each in PHASES)
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


def inked(page, canvas):
    """How many pixels of a canvas are not empty."""
    return page.evaluate(
        """id => {
            const canvas = document.getElementById(id), context = canvas.getContext('2d');
            const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
            return data.filter((value, index) => index % 4 === 3 && value > 0).length; }""",
        canvas,
    )


def curve(page, canvas):
    """The points that a chart was given, as Chart.js has them."""
    return curves(page, canvas)[0][1]


def curves(page, canvas):
    """All lines of a chart: their names and points."""
    return page.evaluate(
        "id => Chart.getChart(id).data.datasets.map(line => [line.label, line.data.map(point => [point.x, point.y])])",
        canvas,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_opens_whole_and_nothing_overflows(opened, scheme, size):
    page = opened(scheme, size)
    width = SIZES[size][0]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # What is wider than the window must be in a part that scrolls by itself.
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .hidden, .skip') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    for canvas in ("blocks", "history", "spectrum", "parameters", "sensitivity-0", "frontier-0"):
        assert inked(page, canvas) > 500, canvas
    assert page.title().endswith("hasslefree report")


def test_a_click_shows_the_layer(opened, file):
    """Oracle: compression.json of the folder."""
    page = opened()
    (run, _) = read_content([file.parent / "one", file.parent / (FOLDERS[1])]).runs
    layer = run.record.layers[10]
    page.locator(f'.map button[data-layer="{layer.name}"]:visible').click()
    assert page.locator("#layer-name").inner_text() == layer.name
    assert page.locator(':visible[aria-pressed="true"]').get_attribute("data-layer") == layer.name
    measured = [[index, pytest.approx(value, rel=1e-4)] for index, value in enumerate(layer.history, 1)]
    assert curve(page, "history") == measured
    kept = [[index, pytest.approx(value, rel=1e-3)] for index, value in enumerate(run.spectra[layer.name], 1)]
    assert curve(page, "spectrum") == kept


def test_a_thinned_curve_is_where_it_was(opened, file, monkeypatch):
    """Oracle: value x of the history is x, so that every point lies on the diagonal."""
    folder = file.parent / "one"
    before = (folder / "compression.json").read_text()
    edit(folder, lambda content: [layer.update(history=[*map(float, range(1, 51))]) for layer in content["layers"]])
    monkeypatch.setattr("hasslefree.report.page.POINTS", 0)
    page = opened()
    file.with_name("thin.html").write_text(render(read_content([folder])), encoding="utf-8")
    page.goto(file.with_name("thin.html").as_uri())
    (folder / "compression.json").write_text(before)
    points = curve(page, "history")
    assert len(points) == 12
    assert [x for x, _ in points] == [y for _, y in points]
    assert (points[0], points[-1]) == ([1, 1], [50, 50])


def test_remarks_are_text(opened, file):
    page = opened()
    name = read_content([file.parent / "one"]).runs[0].record.layers[3].name
    page.locator(f'.map button[data-layer="{name}"]:visible').click()
    assert page.locator("#layer-remarks li").inner_text().startswith("<img src=x")
    assert "pwned" not in page.title()


def test_the_keyboard_alone_is_enough(opened):
    """Tab reaches the map once, arrows walk in it, and the layer below follows."""
    page = opened()
    page.locator(':visible[aria-pressed="true"]').focus()
    page.keyboard.press("Home")
    walk = {"ArrowRight": "0.self_attn.k_proj", "ArrowDown": "1.self_attn.k_proj", "ArrowLeft": "1.self_attn.q_proj",
            "End": "1.mlp.down_proj", "ArrowUp": "0.mlp.down_proj"}  # fmt: skip
    for key, name in walk.items():
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.layer") == f"model.layers.{name}"
        assert page.locator("#layer-name").inner_text() == f"model.layers.{name}"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.map')") is None
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    page.keyboard.press("Enter")
    assert page.locator("details[open]:visible tbody tr").count() == 14


def test_another_folder_by_its_button(opened):
    page = opened()
    layer = page.locator("#layer-name").inner_text()
    page.locator("#choice input").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".of-run:visible").first.get_attribute("data-run") == "1"
    assert page.locator("#layer-name").inner_text() == layer, "the same layer of the other model"
    assert "rank 0" in page.locator("#spectrum-note").inner_text()
    assert page.locator('.of-run[data-run="0"]:visible').count() == 0


def test_sensitivities_are_those_of_the_record(opened, file):
    """Oracle: compression.json, layer by layer; a folder without sensitivities shows no section."""
    stored = json.loads((file.parent / "one/compression.json").read_text())["sensitivities"]
    page = opened()
    drawn = {
        (block, kind): pytest.approx(value, rel=1e-3)
        for kind, points in curves(page, "sensitivity-0")
        for block, value in points
    }
    assert len(drawn) == len(stored) == 14
    assert drawn == {(int(name.split(".")[2]), name.split(".")[-1]): value for name, value in stored.items()}
    assert page.get_by_role("heading", name="Sensitivity by block and layer").count() == 1
    page.locator("#choice input").nth(1).check(force=True)
    assert page.get_by_role("heading", name="Sensitivity by block and layer").count() == 0


def test_every_model_is_a_point_of_perplexity_and_bytes(opened, file):
    """Oracles: the tensors of the folders, the evaluations; the dense model has two blocks' weights whole."""
    size = {name: sum(tensor.nbytes for tensor in tensors_of(file.parent / name).values()) for name in FOLDERS}
    whole = sum(parameter.numel() * 4 for parameter in build("llama").parameters())
    (unit,) = {1000} if whole < 2e6 else {1e6}
    found = {name: points for name, points in curves(opened(), "frontier-0")}
    assert found == {
        "dense (dense)": [[pytest.approx(whole / unit), 30.0]],
        FOLDERS[0]: [[pytest.approx(size[FOLDERS[0]] / unit), 33.0]],
        FOLDERS[1]: [[pytest.approx(size[FOLDERS[1]] / unit), 44.0]],
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.001, 3.0], ids=["close", "a decade"])
def test_names_in_a_picture_do_not_overlap(opened, file, size, spread):
    """Eight models of the same size: every name is drawn, within the chart, beside all others and all points."""
    (run,) = read_content([file.parent / "one"]).runs
    runs = tuple(
        dataclasses.replace(
            run, name=f"a-folder-with-a-long-name-{i}", evaluation=Evaluation({"t": 9 * (1 + spread * i)})
        )
        for i in range(8)
    )
    path = file.with_name("crowd.html")
    path.write_text(render(Content(runs, {})), encoding="utf-8")
    page = opened("light", size)
    page.goto(path.as_uri())
    chart = page.evaluate("(({names, chartArea}) => ({names, area: chartArea}))(Chart.getChart('frontier-0'))")
    names, area = chart["names"], chart["area"]
    assert [each["text"][-6:] for each in names] == [f"name-{i}" for i in range(8)]
    for each in names:
        assert area["left"] <= each["x"] <= area["right"] - each["w"]
        assert area["top"] <= each["y"] <= area["bottom"] - each["h"]
    for one, other in itertools.combinations(names, 2):
        apart = max(one["x"], other["x"]) >= min(one["x"] + one["w"], other["x"] + other["w"])
        assert apart or max(one["y"], other["y"]) >= min(one["y"] + one["h"], other["y"] + other["h"])


def test_phases_are_bars_of_their_share_of_the_whole_time(opened, file):
    """Oracle: the seconds in the file beside the folder; a folder without such a file shows no section."""
    page = opened()
    rows = page.locator(".phases tbody tr:visible")
    assert [[cell.strip() for cell in row.split("\t")] for row in rows.all_inner_texts()] == [
        ["loading the model", "", "0.5 s", ""], ["solving", "", "10 s", "12 s"], ["writing", "", "5.0 s", ""],
    ]  # fmt: skip
    stored = json.loads(seconds_file(file.parent / "one").read_text())
    widths = page.locator(".phases i").evaluate_all(
        "bars => bars.map(bar => bar.getBoundingClientRect().width / bar.closest('td').getBoundingClientRect().width)"
    )
    shares = [phase["seconds"] / stored["seconds"] for phase in stored["phases"]]
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
    assert page.get_by_text("The first token is the same.").count() == 1
    page.locator("#choice input").nth(1).check(force=True)
    assert page.locator(".written:visible").all_inner_texts() == ["alone"]
    assert page.locator("mark:visible").count() == 0
    assert page.get_by_text("No dense model.").is_visible()


def test_a_change_of_scheme_changes_the_page_and_the_charts(opened):
    page = opened("light")
    look = "[getComputedStyle(document.body).backgroundColor, Chart.getChart('history').data.datasets[0].borderColor]"
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    # The browser tells the page in its own time.
    page.wait_for_function(f"light => {look}.every((colour, i) => colour !== light[i])", arg=light)
    assert all(one != other for one, other in zip(light, page.evaluate(look), strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_cell_can_be_read(opened, scheme):
    """Oracle: WCAG 2.1, contrast of at least 4.5, from the colours as they are painted."""
    page = opened(scheme)
    contrasts = page.evaluate(
        """() => {
            const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
            const context = canvas.getContext('2d', {willReadFrequently: true});
            const light = colour => {
                context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)
                    .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05; };
            return [...document.querySelectorAll('.map button')].map(button => {
                const style = getComputedStyle(button), a = light(style.color), b = light(style.backgroundColor);
                return Math.max(a, b) / Math.min(a, b); }); }"""
    )
    assert min(contrasts) >= 4.5
