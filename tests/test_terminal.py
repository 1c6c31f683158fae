"""Names that others chose are shown as they stand: no markup, no emoji, nothing that steers the terminal."""

import numpy as np
import pytest

from largebatch import terminal
from largebatch.data.dataset import dataset_of_arrays
from largebatch.doctor import OK, Finding, show
from largebatch.predictions import tables
from largebatch.runs.display import Reporter
from largebatch.runs.summary import empty_summary
from largebatch.tasks.kinds import CLASSIFICATION
from largebatch.tasks.scores import Scores

NAME = "[/lr] [bold]x[/bold] :cat: [red \x1b[2J"
SHOWN = r"[/lr] [bold]x[/bold] :cat: [red \x1b[2J"


def test_a_run_shows_its_folder_and_headline(capsys):
    reporter = Reporter(enabled=True)
    with reporter:
        reporter.start(1, 0, f"classes {NAME}")
    summary = {**empty_summary(), "status": "done", "best_score": 0.5, "final_score": 0.5, "final_others": {}}
    summary |= {"steps": 1, "best_step": 1, "examples_seen": 1, "images_per_sec": 1.0, "seconds": {"train": 1.0}}
    summary |= {"devices": 1, "platform": "cpu", "target_score": None}
    reporter.results(summary, f"runs/{NAME}")
    shown = capsys.readouterr().out
    assert f"classes {SHOWN}" in shown
    assert f"runs/{SHOWN}" in shown


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([(1, 1.0), (100, 1.0), (10, 1.0)], "about 33 min of training, at 100 images/s"),  # the first step is slow
        ([(100, 10.0), (100, 1.0)], "about 5.6 h of training, at 10 images/s"),  # and so is the network
        ([(1, 1.0), (10_000, 1.0), (1, 1.0)], ""),
    ],
)
def test_a_long_run_says_once_how_long_it_takes(calls, said, capsys):
    reporter = Reporter(enabled=True)
    with reporter:
        reporter.start(100, 0, "")
        capsys.readouterr()
        for step, (images, seconds) in enumerate(calls, 1):
            reporter.at(step, images, seconds, 200_000)
    assert capsys.readouterr().out.strip() == said


def test_predictions_and_findings_show_classes_and_folders(capsys):
    dataset = dataset_of_arrays(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1]), [NAME, "b"], ["0", "1"])
    values = {"loss": 1.0, "accuracy": 0.5, "accuracy_top5": None, "examples": 2}
    scores = Scores(CLASSIFICATION, values)
    tables.print_results(dataset, np.array([1, 1]), scores, f"runs/{NAME}")
    tables.print_results(dataset, np.array([0, 1]), None, f"runs/{NAME}")
    show([Finding(OK, NAME, NAME, advice=NAME)], ending=f"see {NAME}")
    terminal.print_table([NAME], [[NAME]])
    lines = capsys.readouterr().out.splitlines()
    # Heading and class of the first table; heading, one image's line and the counts where there are no labels.
    assert sum(line.count(SHOWN) for line in lines) == 2 + 3 + 4 + 2
    assert not any("\x1b" in line for line in lines)
