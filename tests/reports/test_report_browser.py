"""The page of report.py as a reader meets it, in headless Chromium: each panel of each kind of page is drawn."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from report_pages import (
    EVIL,
    curve,
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


# ---- every kind of page ------------------------------------------------------------------------------------

CURVES = {
    "Validation accuracy",
    "Validation loss",
    "Training loss",
    "Training accuracy",
    "Throughput",
    "Gradient norm",
}
SPENT = "Where the time went"
STEPS = "Steps to the target over batch size"
# What a reader sees in each picture; axes, grid and labels are no marks.
MARKS = ", ".join(f".mark-{kind}.role-mark > *" for kind in ("line", "rule", "symbol", "rect"))


def a_real_run(folder, config):
    """Also the differences to one that diverged."""
    train.train_and_evaluate(config, str(folder / "run"))
    diverged = write_run(folder / "diverged", (0.1,), status="diverged")
    return [folder / "run", diverged], {*CURVES, SPENT}, {"Runs", "Differences between configs"}


def branches_and_sweeps(folder, config):
    """Branches whose interval has no end, beside the sweeps that are drawn into their chart."""
    steep = [[1.0, 1.0, 1.0, 1.3], [1.0, 1.0, 1.0, 1.0]]
    write_branches(folder / "written", {100: steep, 200: [[0.5] * 4] * 2})
    studies = [folder / "written"]
    for name, optimizers in (("of-one", ["lamb"]), ("of-two", ["lamb", "sgd"])):
        trials = []
        for optimizer in optimizers:
            for batch, count in ((64, 17), (256, 8), (1024, 4)):
                for seed in range(2):
                    accuracies = (*[0.1] * (count + seed), 0.9)
                    trials.append({"optimizer": optimizer, "batch": batch, "seed": seed, "accuracies": accuracies})
        trials.append({"optimizer": "lamb", "batch": 4096, "accuracies": (0.1,)})
        trials = [trial | {"target": 0.8, "noise_scale": 400.0} for trial in trials]
        fields = ["optimizer.name", "batch.size"]
        groups = {"groups": fields} if len(optimizers) > 1 else {}
        studies.append(write_study(folder / name, trials, "steps_to_target", fields, **groups))
    panels = {"Critical batch over the run, by branches", STEPS, "Gradient noise scale", *CURVES, SPENT}
    return studies, panels, {"Leaderboard", "Steps to the target", "Runs"}


def a_grid_and_seeds(folder, config):
    trials = [{"rate": 0.01, "seed": seed, "accuracies": curve(seed)} for seed in range(4)]
    trials[3] |= {"status": "pruned", "accuracies": (0.1,)}
    rates = "Best validation accuracy over learning rate, by optimizer"
    studies = [small_study(folder / "grid"), write_study(folder / "seeds", trials)]
    return studies, {rates, *CURVES, SPENT}, {"Leaderboard", "Runs"}


def a_pod_with_lost_hosts(folder, config):
    """Two runs: one is done; the other lost hosts before its first validation, and was killed."""
    done, killed = write_run(folder / "done"), write_run(folder / "killed", (), status="running")
    write_lines(done / "events.jsonl", EVENTS)
    write_lines(killed / "events.jsonl", EVENTS[:-1])
    return [done, killed], {"Devices", *CURVES, SPENT}, {"Runs"}


def a_pod_that_never_validated(folder, config):
    run = write_run(folder / "run", (), status="running")
    write_lines(run / "events.jsonl", EVENTS[:-1])
    return [run], {"Devices"}, {"Runs"}


def odd_names(folder, config):
    """A run with columns of classes of one's own, and with one that is called as a panel is."""
    fields = {"val_iou_Sea/Lake 'ice' \"old\"": 0.5, "val_iou_]": 0.4, "time": 1.0}
    title = "Intersection over union of Sea/Lake 'ice' \"old\""
    return [write_run(folder / "run", **fields)], {title, *CURVES, SPENT}, {"Runs"}


KINDS = [
    a_real_run,
    a_grid_and_seeds,
    branches_and_sweeps,
    a_pod_with_lost_hosts,
    a_pod_that_never_validated,
    odd_names,
]


@pytest.mark.parametrize("make_folders", KINDS, ids=lambda make_folders: make_folders.__name__)
def test_every_panel_is_drawn(browser, make_folders, tmp_path, small_config):
    folders, panels, tables = make_folders(tmp_path, small_config)
    page = tmp_path / "page.html"
    data = data_of(make(*folders, out=page, is_opened=True))
    look(browser, page)  # which fails on any line in the console
    shown = browser.execute_script(
        "return [...document.querySelectorAll('figure.card .plot')].map(plot => [plot.closest('section').id,"
        " plot.dataset.chart, plot.closest('figure').querySelector('h3').textContent,"
        " plot.querySelectorAll(arguments[0]).length,"
        " plot.querySelector('svg').getBoundingClientRect().height,"
        " plot.querySelector('svg').getBoundingClientRect().width,"
        " plot.querySelectorAll('.mark-line.role-mark > path').length])",
        MARKS,
    )
    assert len(shown) == sum(len(group["charts"]) for group in data)
    assert {title for _, _, title, *_ in shown} >= panels
    for section, chart_id, title, marks, height, width, lines in shown:
        assert marks > 0, (section, title)
        assert height > (12 if title == SPENT else 100), (section, title)
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
    assert set(found) >= tables


def test_the_page_tells_of_an_error_in_one_picture_and_draws_the_others(browser, tmp_path):
    page = tmp_path / "page.html"
    html = make(write_run(tmp_path / "run"), out=page, is_opened=True)
    content = re.search(r'id="data">(.*?)</script>', html, re.S).group(1)
    data = json.loads(content)
    data["groups"][0]["charts"]["curve-val_loss"]["spec"] = {"mark": 3}
    page.write_text(html.replace(content, json.dumps(data)))
    browser.get(page.as_uri())
    charts = data_of(html)[0]["charts"]
    wait(browser, f"document.querySelectorAll('.plot svg').length == {len(charts) - 1}")
    wait(
        browser, "document.querySelector('[data-chart=curve-val_loss]').textContent.includes('could not be drawn')"
    )
    assert [line["level"] for line in browser.get_log("browser")] == ["SEVERE"]
