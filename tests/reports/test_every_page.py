"""Every kind of page that report.py writes, opened in a browser: each panel has a place, and marks in it."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
from conftest import make_small_config, run_script
from report_pages import curve, data_of, make, small_study
from test_analysis import write_run, write_study
from test_critical_batch import write_branches
from test_devices_chart import EVENTS
from test_report_browser import look, opened_browser, wait

import model
import train
from configs import scenes_tiny
from largebatch.runs.lifecycle import Diverged

pytestmark = pytest.mark.full

CURVES = {
    "Validation accuracy",
    "Validation loss",
    "Training loss",
    "Training accuracy",
    "Throughput",
    "Gradient norm",
}
SPENT = "Where the time went"
# What a reader sees in each picture; axes, grid and labels are no marks.
MARKS = ", ".join(f".mark-{kind}.role-mark > *" for kind in ("line", "rule", "symbol", "rect"))


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as browser:
        yield browser


@dataclasses.dataclass(frozen=True)
class Case:
    """Folders to report on, the titles of panels that their data hold, and the tables, by their heading."""

    folders: list[Path]
    panels: set[str]
    tables: set[str]


# ---- folders that real runs leave --------------------------------------------------------------------


def run_config(cache_dir):
    config = make_small_config(cache_dir)
    config.batch.size, config.checkpoint.keep, config.optimizer.name = 32, 10, "adam"
    return config


@pytest.fixture(scope="module")
def trained(session_cache, tmp_path_factory) -> Path:
    """A run of train.py, with a checkpoint of each validation."""
    path = tmp_path_factory.mktemp("trained") / "run"
    train.train_and_evaluate(run_config(session_cache), str(path))
    return path


def a_run(folder, cache, trained):
    return Case([trained], {*CURVES, SPENT}, {"Runs"})


def a_diverged_run(folder, cache, trained):
    config = run_config(cache)
    config.optimizer.learning_rate, config.train.on_nonfinite = 1e30, "stop"
    with pytest.raises(Diverged):
        train.train_and_evaluate(config, str(folder / "run"))
    return Case([folder / "run", trained], {*CURVES, SPENT}, {"Runs", "Differences between configs"})


def masks_and_depths(folder, cache, trained):
    network = functools.partial(model.ResUNet, features=(8,), blocks=(1,))
    model.MODELS["resunet_pages"] = model.Architecture(network, frozenset({"norm"}), of_pixels=True)
    config = scenes_tiny.get_config()
    config.augment.cache_dir = str(cache)
    config.dataset.num_examples, config.dataset.image_size = 100, 16
    config.model.name, config.model.dtype = "resunet_pages", "float32"
    config.batch.size, config.batch.ghost_size = 40, 16
    config.schedule.warmup_steps, config.train.inner_steps, config.train.outer_steps = 1, 2, 2
    try:
        train.train_and_evaluate(config, str(folder / "run"))
    finally:
        del model.MODELS["resunet_pages"]
    titles = {"Mean intersection over union", "Error of depths", "Relative error of depths", "Training loss"}
    classes = {f"Intersection over union of {name}" for name in ("background", "object")}
    return Case([folder / "run"], titles | classes | {SPENT}, {"Runs"})


def branches(folder, cache, trained):
    """Branches of a real run; written ones, whose interval has no end; and beside them a swept study."""
    command = ["sweep.py", "--branch", trained, "--study", folder / "branches", "--branch_images", 256]
    done = run_script(*command, "--branch_steps", 6)
    assert done.returncode == 0, done.stderr
    steep = [[1.0, 1.0, 1.0, 1.3], [1.0, 1.0, 1.0, 1.0]]
    write_branches(folder / "written", {100: steep, 200: [[0.5] * 4] * 2})
    steps_to_a_target(folder, cache, trained)
    return Case(
        [folder / "branches", folder / "written", folder / "of-one"],
        {"Critical batch over the run, by branches", "Steps to the target over batch size", *CURVES, SPENT},
        {"Leaderboard", "Steps to the target", "Runs", "Differences between configs"},
    )


# ---- folders that are written ------------------------------------------------------------------------


def a_grid(folder, cache, trained):
    rates = "Best validation accuracy over learning rate, by optimizer"
    return Case([small_study(folder / "grid")], {rates, *CURVES, SPENT}, {"Leaderboard", "Runs"})


def seeds(folder, cache, trained):
    trials = [{"rate": 0.01, "seed": seed, "accuracies": curve(seed)} for seed in range(4)]
    trials[3] |= {"status": "pruned", "accuracies": (0.1,)}
    return Case([write_study(folder / "seeds", trials)], {*CURVES, SPENT}, {"Leaderboard", "Runs"})


def steps_to_a_target(folder, cache, trained):
    """A study of one optimizer, and one of two that were tuned apart; nowhere did the largest batch get there."""
    studies = []
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
    panels = {"Steps to the target over batch size", "Gradient noise scale", *CURVES, SPENT}
    return Case(studies, panels, {"Leaderboard", "Steps to the target", "Runs"})


def write_events(run: Path, events) -> Path:
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def a_pod_with_lost_hosts(folder, cache, trained):
    """Two runs: one is done; the other lost hosts before its first validation, and was killed."""
    done = write_events(write_run(folder / "done"), EVENTS)
    killed = write_events(write_run(folder / "killed", (), status="running"), EVENTS[:-1])
    return Case([done, killed], {"Devices", *CURVES, SPENT}, {"Runs"})


def a_pod_that_never_validated(folder, cache, trained):
    run = write_events(write_run(folder / "run", (), status="running"), EVENTS[:-1])
    return Case([run], {"Devices"}, {"Runs"})


def odd_names(folder, cache, trained):
    """A run with columns of classes of one's own, and with one that is called as a panel is."""
    fields = {"val_iou_Sea/Lake 'ice' \"old\"": 0.5, "val_iou_]": 0.4, "time": 1.0}
    title = "Intersection over union of Sea/Lake 'ice' \"old\""
    return Case([write_run(folder / "run", **fields)], {title, *CURVES, SPENT}, {"Runs"})


CASES = [
    a_run,
    a_diverged_run,
    masks_and_depths,
    a_grid,
    seeds,
    branches,
    steps_to_a_target,
    a_pod_with_lost_hosts,
    a_pod_that_never_validated,
    odd_names,
]


# ---- the pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_case", CASES, ids=lambda make_case: make_case.__name__)
def test_every_panel_is_drawn(browser, make_case, tmp_path, session_cache, trained):
    case = make_case(tmp_path, session_cache, trained)
    page = tmp_path / "page.html"
    data = data_of(make(*case.folders, out=page, more=["--png", tmp_path / "png"]))
    look(browser, page)  # which fails on any line in the console
    shown = browser.execute_script(
        "return [...document.querySelectorAll('figure.card .plot')].map(plot => [plot.closest('section').id,"
        " plot.closest('figure').querySelector('h3').textContent, plot.querySelectorAll(arguments[0]).length,"
        " plot.querySelector('svg').getBoundingClientRect().height,"
        " plot.querySelector('svg').getBoundingClientRect().width,"
        " plot.querySelectorAll('.mark-line.role-mark > path').length])",
        MARKS,
    )
    held = [(f"group-{k}", chart) for k, group in enumerate(data) for chart in group["charts"]]
    assert len(shown) == len(held)
    assert {title for _, title, *_ in shown} >= case.panels
    for section, title, marks, height, width, _ in shown:
        assert marks > 0, (section, title)
        assert height > (12 if title == SPENT else 100), (section, title)
        assert width > 100, (section, title)
    for k, group in enumerate(data):  # a line for each run that has values
        lines = {title: count for section, title, *_, count in shown if section == f"group-{k}"}
        for chart in (chart for chart in group["charts"].values() if chart["kind"] == "curves"):
            assert lines[chart["title"]] == sum(any(y is not None for y in row["y"]) for row in chart["rows"])

    tables = browser.execute_script(
        "return [...document.querySelectorAll('section h2')].filter(h => {"
        " let e = h.nextElementSibling, rows = 0;"
        " for (; e && e.tagName != 'H2'; e = e.nextElementSibling) rows += e.querySelectorAll('tbody tr').length;"
        " return rows; }).map(h => h.textContent)"
    )
    assert set(tables) >= case.tables
    assert len(list((tmp_path / "png").iterdir())) >= len(held)


def test_the_page_tells_of_an_error_in_one_picture_and_draws_the_others(browser, tmp_path):
    page = tmp_path / "page.html"
    html = make(write_run(tmp_path / "run"), out=page)
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
