"""The page of report.py as a reader meets it: in headless Chromium."""

import contextlib
import re
import shutil
import time
from pathlib import Path

import pytest
from report_pages import EVIL, make, small_study, write_predictions
from test_analysis import write_study

pytestmark = pytest.mark.full


@pytest.fixture
def study(tmp_path) -> Path:
    return small_study(tmp_path / "optimizers")


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as browser:
        yield browser


@contextlib.contextmanager
def opened_browser():
    """Yield headless Chromium, told by its driver; skip the test where they are not on PATH."""
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


def test_headers_sort_legends_hide_and_the_axis_changes(browser, study, tmp_path):
    page = tmp_path / "page.html"
    make(study, out=page)
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


def test_pointing_at_a_curve_says_its_values_and_lights_its_run_up(browser, study, tmp_path):
    page = tmp_path / "page.html"
    make(study, out=page)
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


def test_dark_scheme_and_toggle(browser, study, tmp_path):
    page = tmp_path / "page.html"
    make(study, out=page)
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


def test_a_phone_scrolls_no_page_sideways(browser, study, tmp_path):
    names = [f"AClassWithALongName{k}" for k in range(12)]  # a matrix wider than the screen
    ids = [f"{name}/{k}.png" for k, name in enumerate(names)]
    write_predictions(study / "trials" / "0007", range(12), range(12), ids, classes=12)
    for index, path in enumerate((study, study / "trials" / "0007")):
        page = tmp_path / f"page{index}.html"
        make(path, out=page)
        look(browser, page, width=360)
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360
        assert browser.execute_script(
            "return [...document.querySelectorAll('svg, .card')].every(e => e.getBoundingClientRect().right <= 361)"
        )


def test_an_evil_file_runs_no_script(browser, tmp_path):
    trials = [{"optimizer": EVIL, "rate": 0.1 * k} for k in range(1, 4)]
    page = tmp_path / "page.html"
    make(write_study(tmp_path / "study", trials), out=page)
    look(browser, page)
    assert "study" in browser.title
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
