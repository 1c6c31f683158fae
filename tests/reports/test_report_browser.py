"""The page of report.py as a reader meets it, in headless Chromium: each panel of each kind of page is drawn."""

import re
import shutil
import time
from pathlib import Path

import pytest
from report_pages import (
    EVIL,
    data_of,
    make,
    small_study,
    write_lines,
    write_predictions,
    write_run,
    write_study,
)
from test_charts import EVENTS
from test_critical_batch import write_branches

import train

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A study with a run whose matrix of confusions is wider than a telephone."""
    study = small_study(tmp_path_factory.mktemp("studies") / "optimizers")
    names = [f"AClassWithALongName{k}" for k in range(12)]
    ids = [f"{name}/{k}.png" for k, name in enumerate(names)]
    write_predictions(study / "trials" / "0007", range(12), range(12), ids, classes=12)
    return study


@pytest.fixture(scope="module")
def page(study) -> Path:
    path = study.parent / "page.html"
    make(study, out=path, is_opened=True)
    return path


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, told by its driver; the test is skipped where they are not on PATH."""
    chromium, driver = (shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver"))
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on PATH: the page was not opened in a browser")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = ("quic", "background-networking", "component-update", "sync")  # no network is wanted
    arguments = ["headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run"]
    for argument in [*arguments, *(f"disable-{part}" for part in quiet)]:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as running:
        yield running


def look(browser, path: Path, width=1200, scheme="light") -> None:
    """Open the page at a width and in a colour scheme, and wait until its pictures are drawn."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    wait(browser, DRAWN)
    assert browser.get_log("browser") == []


def wait(browser, condition: str) -> None:
    """Wait until a JavaScript expression holds."""
    deadline = time.monotonic() + 10
    while not browser.execute_script(f"return {condition}"):
        assert time.monotonic() < deadline, (condition, browser.get_log("browser"))
        time.sleep(0.05)


DRAWN = (
    "document.querySelector('.plot') && [...document.querySelectorAll('.plot')].every(p => p.querySelector('svg'))"
)
COLUMN = "[...document.querySelectorAll('#group-0-table tbody tr')].map(row => row.cells[arguments[0]].dataset.v)"
ACCURACY = "[data-chart=curve-val_accuracy]"
PATHS = f"document.querySelectorAll('{ACCURACY} .mark-line path').length"


def test_headers_sort_legends_hide_and_the_axis_changes(browser, page):
    look(browser, page)
    click = "document.querySelectorAll('#group-0-table th button')[arguments[0]].click()"
    rates = sorted(float(v) for v in browser.execute_script(f"return {COLUMN}", 2))
    browser.execute_script(click, 2)
    assert [float(v) for v in browser.execute_script(f"return {COLUMN}", 2)] == rates
    browser.execute_script(click, 2)
    assert [float(v) for v in browser.execute_script(f"return {COLUMN}", 2)] == rates[::-1]
    before = browser.execute_script(f"return {PATHS}")
    browser.execute_script("document.querySelector('.controls .legend button').click()")
    wait(browser, f"{PATHS} < {before}")
    label = f"[...document.querySelectorAll('{ACCURACY} .role-axis-label text')].map(t => t.textContent)"
    assert "60" in browser.execute_script(f"return {label}")  # steps
    browser.execute_script("document.querySelector('.axis button[data-value=seconds]').click()")
    wait(browser, f"!{label}.includes('60')")
    pressed = "document.querySelector('.axis [aria-pressed=true]').textContent"
    assert browser.execute_script(f"return {pressed}") == "seconds"
    assert browser.get_log("browser") == []


def test_pointing_at_a_curve_says_its_values_and_lights_its_run_up(browser, page):
    look(browser, page)
    box = browser.execute_script(
        f"const svg = document.querySelector('{ACCURACY} svg'); svg.scrollIntoView({{block: 'center'}});"
        "const box = svg.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]"
    )
    move = {"type": "mouseMoved", "x": box[0], "y": box[1]}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", move)
    wait(browser, "document.querySelector('#vg-tooltip-element.visible')")
    tip = browser.execute_script("return document.getElementById('vg-tooltip-element').textContent")
    assert re.fullmatch(r"run\w+ · lr .* · seed \d \(\w+\)at\d+accuracy0\.\d+", tip), tip
    wait(browser, "document.querySelectorAll('tr.hot').length == 1")
    faint = "[...document.querySelectorAll('[data-chart=curve-val_loss] .mark-line path')]"
    wait(browser, f"{faint}.filter(path => path.getAttribute('opacity') === '0.12').length > 10")
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", move | {"x": 5})
    wait(browser, "document.querySelectorAll('tr.hot').length == 0")


def test_dark_scheme_and_toggle(browser, page):
    background = "return getComputedStyle(document.body).backgroundColor"
    look(browser, page, scheme="light")
    light = browser.execute_script(background)
    look(browser, page, scheme="dark")
    dark = browser.execute_script(background)
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (light, dark)]
    assert brightness[0] > 600
    assert brightness[1] < 150
    browser.execute_script("document.querySelector('#theme [data-value=light]').click()")
    assert browser.execute_script(background) == light


def test_a_phone_scrolls_no_page_sideways(browser, study, page, tmp_path):
    make(study / "trials" / "0007", out=tmp_path / "page.html", is_opened=True)
    for path in (page, tmp_path / "page.html"):
        look(browser, path, width=360)
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360
        assert browser.execute_script(
            "return [...document.querySelectorAll('svg, .card')].every(e => e.getBoundingClientRect().right <= 361)"
        )


def test_an_evil_file_runs_no_script(browser, tmp_path):
    trials = [{"optimizer": EVIL, "rate": 0.1 * k} for k in range(1, 4)]
    page = tmp_path / "page.html"
    make(write_study(tmp_path / "study", trials), out=page, is_opened=True)
    look(browser, page)
    assert "study" in browser.title
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0


# ---- every panel -------------------------------------------------------------------------------------------

CURVES = {
    "Validation accuracy",
    "Validation loss",
    "Training loss",
    "Training accuracy",
    "Throughput",
    "Gradient norm",
}
STEPS = "Steps to the target over batch size"
RATES = "Best validation accuracy over learning rate, by optimizer"
BRANCHES = "Critical batch over the run, by branches"
ICE = "Intersection over union of Sea/Lake 'ice' \"old\""
# What a reader sees in each picture; axes, grid and labels are no marks.
MARKS = ", ".join(f".mark-{kind}.role-mark > *" for kind in ("line", "rule", "symbol", "rect"))


def target_study(path: Path, **further) -> Path:
    """A study in which the largest batch misses the target."""
    trials = [
        {"optimizer": optimizer, "batch": batch, "seed": seed, "accuracies": (*[0.1] * (count + seed), 0.9)}
        for optimizer in ("lamb", "sgd")
        for batch, count in ((64, 17), (256, 8), (1024, 4))
        for seed in range(2)
    ]
    trials.append({"optimizer": "lamb", "batch": 4096, "accuracies": (0.1,)})
    trials = [trial | {"target": 0.8, "noise_scale": 400.0} for trial in trials]
    return write_study(path, trials, "steps_to_target", ["optimizer.name", "batch.size"], **further)


def all_kinds(folder: Path, config) -> dict[Path, set[str]]:
    """Studies, and runs that are one more group, each with titles of its panels."""
    steep = [[1.0, 1.0, 1.0, 1.3], [1.0, 1.0, 1.0, 1.0]]
    write_branches(folder / "branches", {100: steep, 200: [[0.5] * 4] * 2})  # its interval has no end
    train.train_and_evaluate(config, str(folder / "real"))
    write_run(folder / "diverged", (0.1,), status="diverged")
    # Columns of classes of one's own, and one that is called as a panel is.
    write_run(folder / "odd", **{"val_iou_Sea/Lake 'ice' \"old\"": 0.5, "val_iou_]": 0.4, "time": 1.0})
    # It lost hosts before its first validation, and was killed.
    write_lines(write_run(folder / "killed", (), status="running") / "events.jsonl", EVENTS[:-1])
    return {
        folder / "branches": {BRANCHES},
        target_study(folder / "of-one"): {STEPS, "Gradient noise scale"},
        target_study(folder / "of-two", groups=["optimizer.name", "batch.size"]): {STEPS},
        small_study(folder / "grid"): {RATES},
        folder / "real": {"Where the time went"},
        folder / "diverged": CURVES,
        folder / "odd": {ICE},
        folder / "killed": {"Devices"},
    }


def test_every_panel_of_every_kind_is_drawn(browser, tmp_path, small_config):
    kinds, page = all_kinds(tmp_path, small_config), tmp_path / "page.html"
    data = data_of(make(*kinds, out=page, is_opened=True))
    look(browser, page)  # which fails on any line in the console
    shown = browser.execute_script(
        "return [...document.querySelectorAll('figure.card .plot')].map(plot => {"
        " const box = plot.querySelector('svg').getBoundingClientRect();"
        " const title = plot.closest('figure').querySelector('h3').textContent;"
        " return [plot.closest('section').id, plot.dataset.chart, title,"
        " plot.querySelectorAll(arguments[0]).length, box.height, box.width,"
        " plot.querySelectorAll('.mark-line.role-mark > path').length]; })",
        MARKS,
    )
    assert len(shown) == sum(len(group["charts"]) for group in data)
    assert {title for _, _, title, *_ in shown} >= set.union(*kinds.values())
    for section, chart_id, title, marks, height, width, lines in shown:
        assert marks > 0, (section, title)
        assert height > (12 if chart_id == "time" else 100), (section, title)
        assert width > 100, (section, title)
        chart = data[int(section.removeprefix("group-"))]["charts"][chart_id]
        if chart["kind"] == "curves":  # a line for each run that has values
            assert lines == sum(any(y is not None for y in row["y"]) for row in chart["rows"])
    found = browser.execute_script(
        "return [...document.querySelectorAll('section h2')].filter(h => {"
        " let e = h.nextElementSibling, rows = 0;"
        " for (; e && e.tagName != 'H2'; e = e.nextElementSibling) rows += e.querySelectorAll('tbody tr').length;"
        " return rows; }).map(h => h.textContent)"
    )
    assert set(found) >= {"Leaderboard", "Steps to the target", "Runs", "Differences between configs"}


def test_an_error_in_one_picture_is_told_and_the_others_are_drawn(browser, tmp_path):
    page = tmp_path / "page.html"
    html = make(write_run(tmp_path / "run"), out=page, is_opened=True)
    count = len(data_of(html)[0]["charts"])
    start = '"curve-val_loss":{"kind":"curves","spec":'
    assert start in html
    page.write_text(html.replace(start, f'{start}{{"mark":3}},"was":'))
    browser.get(page.as_uri())
    wait(browser, f"document.querySelectorAll('.plot svg').length == {count - 1}")
    wait(
        browser, "document.querySelector('[data-chart=curve-val_loss]').textContent.includes('could not be drawn')"
    )
    assert [line["level"] for line in browser.get_log("browser")] == ["SEVERE"]


def test_a_run_that_never_validated_has_a_page_without_curves(browser, tmp_path):
    run = write_run(tmp_path / "run", (), status="running")
    write_lines(run / "events.jsonl", EVENTS[:-1])
    make(run, out=tmp_path / "page.html", is_opened=True)
    look(browser, tmp_path / "page.html")
    assert browser.execute_script("return document.querySelectorAll('.plot').length") == 1
