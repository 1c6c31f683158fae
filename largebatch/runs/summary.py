"""The rows of metrics.jsonl, and summary.json, which is filled row by row."""

import numpy as np

from largebatch.hosts.clock import Clock
from largebatch.tasks.kinds import TaskKind

# What may stand behind the name of the score, in a row where a run was asked for it.
OTHER_SCORES = ("_views", "_ema", "_ema_views")


def empty_summary() -> dict:
    """summary.json before the first validation; `add_to_summary` fills it row by row."""
    return {
        "status": "failed",
        "best_score": None,
        "best_val_accuracy": None,
        "best_step": None,
        "final_score": None,
        "final_val_accuracy": None,
        "final_others": {},
        "score": None,
        "target_accuracy": None,
        "target_score": None,
        "steps_to_target": None,
        "examples_to_target": None,
        "sec_to_target": None,
        "steps": 0,
        "examples_seen": 0,
        "images_per_sec": None,
        "images_per_sec_by_outer": [],
        "train_sec": 0.0,
        "rollbacks": [],
        "params_sha256": None,
    }


def timings(clock: Clock, before: dict, updates: int, examples: int) -> dict:
    """The time fields of a metrics row; `before` is clock.seconds as it was when the outer loop began.

    `updates` and `examples` are those of the outer loop.
    """
    train_sec = clock.seconds["train"] - before.get("train", 0.0)
    eval_sec = clock.seconds["evaluation"] - before.get("evaluation", 0.0)
    return {
        "images_per_sec": examples / train_sec,
        "step_time_ms": 1e3 * train_sec / updates,
        "train_sec": train_sec,
        "eval_sec": eval_sec,
        "compile_sec": clock.seconds["compile"] - before.get("compile", 0.0),
        "wall_sec": clock.total(),
    }


def add_to_summary(summary: dict, row: dict, kind: TaskKind) -> bool:
    """Brings the summary up to a new row; returns whether its score is the best so far."""
    score, accuracy = row["val_score"], row.get("val_accuracy")
    summary["steps"], summary["examples_seen"] = row["step"], row["examples_seen"]
    summary["final_score"], summary["final_val_accuracy"] = score, accuracy
    others = [f"{kind.score_column}{ending}" for ending in OTHER_SCORES]
    summary["final_others"] = {name: row[name] for name in others if name in row}
    summary["images_per_sec_by_outer"].append(row["images_per_sec"])
    summary["images_per_sec"] = float(np.median(summary["images_per_sec_by_outer"]))
    summary["train_sec"] += row["train_sec"]

    is_best = summary["best_step"] is None or kind.is_better(score, summary["best_score"])
    if is_best:
        summary["best_score"], summary["best_val_accuracy"], summary["best_step"] = score, accuracy, row["step"]

    target = summary["target_score"]
    if target is not None and kind.reaches(score, target) and summary["steps_to_target"] is None:
        summary["steps_to_target"], summary["examples_to_target"] = row["step"], row["examples_seen"]
        summary["sec_to_target"] = summary["train_sec"]
    return is_best


def summary_of_older_code(summary: dict) -> dict:
    """A summary that was begun where every score was an accuracy, as it would be now."""
    if "best_score" in summary:
        return summary
    return {
        **summary,
        "best_score": summary.get("best_val_accuracy"),
        "final_score": summary.get("final_val_accuracy"),
        "target_score": summary.get("target_accuracy"),
    }
