"""Pages of report.py, and small studies to make them of."""

import html
import json
import re
from pathlib import Path

import numpy as np
from test_analysis import write_study

import report

EVIL = '</script><img src=x onerror="document.title=1">'


def make(*paths, out: Path, more=()) -> str:
    """The page of some folders."""
    assert report.main([*map(str, paths), "--out", str(out), *map(str, more)]) == 0
    return out.read_text()


def data_of(page: str) -> list[dict]:
    """What page.js draws from, by group."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1)
    return json.loads(data)["groups"]


def text_of(page: str) -> str:
    """What a reader sees, without the pictures."""
    body = re.sub(r"<script.*?</script>", "", page[page.index("<body>") :], flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)))


def chart_ids(page: str) -> list[str]:
    return [name.removeprefix("curve-") for name in data_of(page)[0]["charts"]]


def curve(k: int, rows: int = 6) -> tuple[float, ...]:
    return tuple(round(0.3 + 0.1 * k / 8 + 0.08 * row, 4) for row in range(rows))


def small_study(path: Path) -> Path:
    """Three optimizers, four rates, two seeds; one run diverged, one goes on, one failed before it began."""
    trials = [
        {"optimizer": name, "rate": rate, "seed": seed, "accuracies": curve(k)}
        for name in ("lamb", "adam", "sgd")
        for k, rate in enumerate((0.001, 0.01, 0.1, 1.0))
        for seed in (0, 1)
    ]
    trials[7] |= {"status": "diverged", "accuracies": (0.1, 0.1)}
    trials[12] |= {"status": "running"}
    trials[20] = {"optimizer": "sgd", "rate": 0.1, "error": "no space left on device"}
    return write_study(path, trials)


def write_predictions(run: Path, labels, predicted, ids, classes=3) -> None:
    logits = np.zeros((len(labels), classes), np.float32)
    logits[np.arange(len(labels)), predicted] = np.linspace(1, 3, len(labels))
    np.savez(run / "predictions.npz", labels=np.array(labels, np.int32), logits=logits, ids=np.array(ids))
