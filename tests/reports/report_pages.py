"""Written runs and studies of any size and state, and the pages that report.py makes of them."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

import report
from largebatch.reports import page as report_page
from largebatch.runs import reader

EVIL = '</script><img src=x onerror="document.title=1">'
START = {"time": "2026-01-01T00:00:00+00:00", "event": "start", "devices": 1, "start_sec": 1.0, "counted_sec": 0.0}


# ---- folders ---------------------------------------------------------------------------------------------


def write_run(
    path: Path,
    accuracies=(0.5, 0.7, 0.9),
    *,
    status="done",
    optimizer="lamb",
    rate=0.01,
    batch=512,
    seed=0,
    target=None,
    **more,
) -> Path:
    """A run folder as train.py leaves it, without arrays; `more` goes into every row."""
    config = {
        "batch": {"size": batch},
        "dataset": {"name": "synthetic", "path": None},
        "model": {"dtype": "float32"},
        "optimizer": {"name": optimizer, "learning_rate": rate},
        "seed": seed,
        "train": {"outer_steps": len(accuracies), "target_accuracy": target},
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "run.json").write_text(json.dumps({"format_version": reader.FORMAT_VERSION, "id": "0" * 16}))
    rows = [
        {"step": 10 * k, "outer": k, "examples_seen": 10 * k * batch, "epoch": k / 2, "global_batch_size": batch}
        | {"learning_rate": rate, "train_loss": 2.0 / k, "train_accuracy": accuracy, "grad_norm": 0.5 / k}
        | {"skipped_steps": 0, "noise_scale": None, "val_loss": 2.2 / k}
        | {"val_score": accuracy, "val_accuracy": accuracy}
        | {"val_examples": 96, "images_per_sec": 1000.0 + k, "step_time_ms": 1.5, "train_sec": 2.0}
        | {"eval_sec": 0.1, "compile_sec": 3.0 if k == 1 else 0.0, "wall_sec": 5.0 + 2 * k}
        | more
        for k, accuracy in enumerate(accuracies, 1)
    ]
    write_lines(path / "metrics.jsonl", rows)
    write_lines(path / "events.jsonl", [START])
    if status != "running":
        reached = next((row for row in rows if target and row["val_accuracy"] >= target), None)
        summary = {
            "status": status,
            "best_score": max(accuracies, default=None),
            "steps": 10 * len(rows),
            "steps_to_target": reached and reached["step"],
            "examples_to_target": reached and reached["examples_seen"],
            "sec_to_target": reached and 2.0 * reached["outer"],
            "global_batch_size": batch,
            "images_per_sec": 1001.0,
            "platform": "cpu",
            "seconds": {"data": 0.5, "compile": 3.0, "train": 6.0, "evaluation": 0.3, "total": 11.0},
        }
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def write_lines(path: Path, objects: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in objects))


def change_config(run: Path, section: str, **fields) -> None:
    config = json.loads((run / "config.json").read_text())
    config[section] |= fields
    (run / "config.json").write_text(json.dumps(config))


def write_study(path: Path, trials: list[dict], objective="best_val_accuracy", fields=None, **further) -> Path:
    """A study folder; each of `trials` is the arguments of a `write_run`, or {"error": ...}."""
    fields = fields or ["optimizer.name", "optimizer.learning_rate"]
    names = {"optimizer.name": "optimizer", "optimizer.learning_rate": "rate", "batch.size": "batch"}
    defaults = {"optimizer": "lamb", "rate": 0.01, "batch": 512}
    path.mkdir(parents=True)
    description = {"config": {}, "fields": fields, "sampler": "grid", "objective": objective, "seeds": 1}
    (path / "study.json").write_text(json.dumps(description | further))
    for index, trial in enumerate(trials):
        folder = path / "trials" / f"{index:04d}"
        setting = {field: trial.get(names[field], defaults[names[field]]) for field in fields}
        error = trial.get("error")
        if error:
            folder.mkdir(parents=True)
        else:
            write_run(folder, **trial)
        line = {"index": index, "setting": setting, "seed": trial.get("seed", 0), "error": error}
        (folder / "trial.json").write_text(json.dumps(line))
    return path


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


# ---- pages -----------------------------------------------------------------------------------------------


def make(*paths, out: Path, more=(), is_opened=False) -> str:
    """The page of some folders; without Vega, which takes seconds, unless a browser opens it."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_opened:
            patch.setattr(report_page, "vega_bundle", str)
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
