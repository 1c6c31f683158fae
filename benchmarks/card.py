"""bench.py card: all that is worth measuring on a card, in order of worth, within some minutes.

The file of --json is written anew after each row, so that a machine that goes away takes one row with it. What
measures is in processes of its own, which are killed when the time of a row is over; this one touches no device.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import card_recipes, card_steps
from benchmarks.card_sizes import SIZES
from benchmarks.card_workers import Workers
from largebatch import util
from largebatch.runs.folder import jsonable
from largebatch.util import printable

# Of the time that is left when a section begins, the part that it may take; what it leaves over is the next one's.
SHARES = {"ceilings": 0.1, "step": 0.4, "variants": 0.5, "start": 0.4, "recipes": 0.8, "profile": 1.0}
ROW_SHARE = 0.5  # of what is left of its section's time
LEFT_OVER = "needs about {needed:.0f} s, {left:.0f} s are left"
FIRST_ANSWER_SEC = 180  # of JAX, on a machine that nobody has used yet
MAX_ERROR = 400  # letters


@dataclass(frozen=True)
class Row:
    """Something to measure.

    Attributes:
      section: a key of SHARES.
      measure: (deadline by `time.monotonic`) -> figures, plain JSON; its errors are the row's.
      least_sec: without which it is not begun.
      skip: why it cannot be measured at all; None where it can.
    """

    section: str
    name: str
    measure: Callable[[float], dict] | None = None
    least_sec: float = 0.0
    skip: str | None = None


@dataclass
class Card:
    """The rows that have been measured so far, and the file that keeps them."""

    about: dict
    end: float  # by time.monotonic
    path: Path | None
    rows: dict[str, dict] = field(default_factory=dict)  # by name, in the order in which they were begun first

    def result(self) -> dict:
        """All of it, plain JSON."""
        return {"command": "card", **self.about, "rows": list(self.rows.values())}

    def write(self) -> None:
        """Writes what has been measured so far."""
        if self.path:
            with util.replacing(self.path) as temporary:
                temporary.write_text(json.dumps(jsonable(self.result()), indent=1, allow_nan=False))

    def keep(self, row: Row, found: dict) -> None:
        """Adds a row, writes the file and tells of it."""
        self.rows[row.name] = {"section": row.section, "name": row.name, **found}
        self.write()
        print(describe(self.rows[row.name]), flush=True)

    def measure(self, row: Row, section_end: float) -> None:
        """Measures a row, if what is left of its section's time allows it."""
        begin = time.monotonic()
        left = max(0.0, section_end - begin)
        if row.skip or left < row.least_sec:
            reason = row.skip or LEFT_OVER.format(needed=row.least_sec, left=left)
            self.keep(row, {"status": "skipped", "reason": reason})
            return
        deadline = begin + max(row.least_sec, ROW_SHARE * left)
        try:
            found = {"status": "measured", **row.measure(deadline)}
        except Exception as error:  # it is the row's, and the next rows are still worth their time
            found = {"status": "failed", "error": in_a_line(error)}
        self.keep(row, {**found, "took_sec": time.monotonic() - begin})


def bench_card(
    minutes: float, size: str | None, json_path: str | None, path: str | None, cifar10: str | None
) -> dict:
    """Measures for so many minutes.

    Args:
      size: a key of SIZES; None for that of the machine.
      json_path: of the file that is written after each row.
      path, cifar10: EuroSAT.zip and CIFAR-10-jpeg.zip, for the recipes.
    Raises:
      UserError: JAX finds no device.
      OSError: the file cannot be written.
    """
    begin = time.monotonic()
    card = Card({}, begin + 60 * minutes, as_path(json_path))
    card.write()
    with tempfile.TemporaryDirectory(prefix="largebatch-card-") as folder, Workers() as workers:
        machine = workers.machine(begin + FIRST_ANSWER_SEC)
        chosen = SIZES[size or ("cpu" if machine["platform"] == "cpu" else "card")]
        card.about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "minutes": minutes, **machine}
        rows = [
            *card_steps.rows(Row, workers, chosen, machine, folder),
            *card_recipes.rows(Row, chosen, {"eurosat": path, "cifar10": cifar10}, folder),
            *card_steps.profile_rows(Row, workers, chosen, machine),
        ]
        measure_all(card, rows)
    return card.result()


def as_path(path: str | None) -> Path | None:
    """The path, if one is given."""
    return Path(path) if path else None


def measure_all(card: Card, rows: list[Row]) -> None:
    """Measures section by section; then, while time is left, what had none."""
    for section, share in SHARES.items():
        now = time.monotonic()
        section_end = now + share * max(0.0, card.end - now)
        for row in rows:
            if row.section == section:
                card.measure(row, section_end)
    for row in rows:
        had_no_time = card.rows[row.name]["status"] == "skipped" and not row.skip
        if had_no_time and card.end - time.monotonic() >= row.least_sec:
            card.measure(row, card.end)


def in_a_line(error: Exception) -> str:
    """The text of an error in one line, cut where it is long."""
    text = printable(" ".join(f"{error}".split())) or type(error).__name__
    return text[:MAX_ERROR]


def describe(row: dict) -> str:
    """A row in a line."""
    title = f"{row['section']:9} {row['name']:58}"
    if row["status"] != "measured":
        return f"{title} {row['status']}: {row.get('reason') or row['error']}"
    parts = []
    if "rate" in row:
        parts.append(f"{row['rate']:,.1f} {row['unit']}")
    for who in ("ours", "pytorch"):
        if row.get(who):
            parts.append(f"{who} {row[who]['ms']['median']:,.2f} ms, {row[who]['images_per_sec']:,.0f} images/s")
    if row.get("ratio"):
        ratio = row["ratio"]
        spread = f" ({ratio['min']:.3f}-{ratio['max']:.3f})" if "min" in ratio else ""
        parts.append(f"ratio {ratio['median']:.3f}{spread}")
    parts += [
        f"{name} {row[name]:,.1f} s" for name in ("cold_sec", "warm_sec", "train_sec", "total_sec") if name in row
    ]
    if "final_score" in row:
        parts.append(f"score {row['final_score']:.4f}, {row['images_per_sec']:,.0f} images/s")
    if "ms_per_update" in row:
        parts.append(f"{row['ms_per_update']:,.2f} ms of kernels an update")
    if row.get("note"):
        parts.append(row["note"])
    return f"{title} {'; '.join(parts)}"


def print_card(result: dict) -> None:
    """Counts the rows; each was printed when it was measured."""
    by_status = dict.fromkeys(("measured", "skipped", "failed"), 0)
    for row in result["rows"]:
        by_status[row["status"]] += 1
    counts = ", ".join(f"{count} {status}" for status, count in by_status.items())
    print(f"{result['devices']} x {result['device_kind']}: {counts}")
