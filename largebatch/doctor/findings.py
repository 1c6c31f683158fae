"""Findings of the doctor, and those about the cache and memory of a data set."""

import dataclasses

import numpy as np
from rich import box, table, text

from largebatch.data.cache_images import BuildEstimate
from largebatch.hosts import collectives, memory
from largebatch.terminal import Console
from largebatch.util import UserError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Line of the doctor's report."""

    status: str  # OK | WARN | FAIL
    name: str  # subject of the check
    text: str  # observation
    advice: str = ""  # recommended change


def show(findings: list[Finding], ending: str = "") -> None:
    """Print findings and a last line on the primary host.

    Raises:
      UserError: one of the findings is a fail.
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
    """Format seconds in a suitable unit."""
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (np.inf, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    raise ValueError(seconds)


def check_build(estimate: BuildEstimate) -> Finding:
    """Check the disk space and time that building the cache takes."""
    layout = estimate.plan.layout
    height, width, channels = layout.image_shape
    text = (
        f"{layout.num_rows:,} images of {height}x{width}x{channels} {layout.dtype}: "
        f"{estimate.disk_bytes / 1e9:,.2f} GB on disk, about {duration(estimate.seconds)} to build, at "
        f"{estimate.images_per_sec:,.0f} images/s on this host ({estimate.sampled:,} were decoded for this)"
    )
    text += f"; {estimate.free_disk_bytes / 1e9:,.2f} GB free"
    if estimate.disk_bytes > estimate.free_disk_bytes:
        return Finding(
            FAIL, "cache", text, "give an augment.cache_dir with more room, or a smaller dataset.image_size"
        )
    return Finding(OK, "cache", text)


def check_memory(storage: str, needed: dict[str, int]) -> Finding:
    """Report the storage of the training images and the bytes on a device; a set that does not fit was refused.

    Args:
      needed: bytes on a device, by part.
    """
    parts = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in needed.items())
    text = f"augment.storage {storage}: {sum(needed.values()) / 1e6:,.0f} MB a device ({parts})"
    free = memory.available_bytes()
    if free is None:
        return Finding(WARN, "memory", text, "this platform does not tell how much memory there is")
    return Finding(OK, "memory", f"{text}; {free / 1e6:,.0f} MB free now")
