"""What the doctor finds, as lines."""

import dataclasses

import numpy as np
from rich import box, table, text

from largebatch.errors import UserError
from largebatch.hosts import collectives
from largebatch.terminal import Console

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of what the doctor says."""

    status: str  # OK | WARN | FAIL
    name: str  # of what was looked at
    text: str  # what was seen
    advice: str = ""  # what to change


def show(findings: list[Finding], ending: str = "") -> None:
    """Prints findings on the primary host, and a last line.

    Raises:
      UserError: one of them is a fail.
    """
    if collectives.is_primary():
        out = Console()
        rows = table.Table(box=box.SIMPLE, show_header=False)
        colours = {OK: "green", WARN: "yellow", FAIL: "red"}
        for finding in findings:
            seen = finding.text + (f"\n-> {finding.advice}" if finding.advice else "")
            rows.add_row(text.Text(finding.status, style=colours[finding.status]), finding.name, seen)
        out.print(rows)
        if ending:
            out.print(ending)
    if any(finding.status == FAIL for finding in findings):
        raise UserError("the doctor found what would fail; see above")


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (np.inf, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    raise ValueError(seconds)
