"""Figures of the fault tests: a line each in faults.jsonl, which `make faults` prints."""

import json
import os
from pathlib import Path


def record(test: str, figures: dict) -> None:
    """Add a line; a single write, since tests run side by side."""
    path = os.environ.get("FAULT_FIGURES")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": test} | figures) + "\n")
