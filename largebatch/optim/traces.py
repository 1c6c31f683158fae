"""Batch sizes by step: in stages, from a list, or from a file.

A batch trace has the columns `step` and `batchsize`. An availability trace has a column of times or indices and one
that counts devices (GPUs, TPU_cores, ...), each of which takes a fixed number of examples; while there are no
devices there are no steps.
"""

import csv
import dataclasses
import datetime
import functools
import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from largebatch import untrusted
from largebatch.util import BadSetting, expanded

STEP_COLUMNS = ("step", "update", "iteration")
BATCH_COLUMNS = ("batchsize", "batch")
TIME_WORDS = ("time", "date", "second", "minute", "hour")  # a column's name starts with one
INDEX_WORDS = ("index", "unnamed", *STEP_COLUMNS)
# Steps, and the examples of a step, are counted in 32 bits on the devices; so 63 bits hold those of a run.
LARGEST = 2**31 - 1
DEVICE_WORDS = ("gpu", "tpu", "core", "device", "worker", "node", "instance", "machine")


@dataclass(frozen=True)
class PiecewiseConstant:
    """A value that holds from one step to another; the last one holds for ever."""

    starts: np.ndarray  # int64 [stages], the first step of each stage, ascending from 0
    values: np.ndarray  # [stages], int64 or float64

    @classmethod
    def constant(cls, value) -> Self:
        """Return a constant value."""
        return cls(np.zeros(1, np.int64), np.array([value]))

    def at(self, steps: np.ndarray | int) -> np.ndarray:
        """Return the values at `steps`."""
        return self.values[self._stage_of(steps)]

    def start_of(self, steps: np.ndarray) -> np.ndarray:
        """Return the first step of the stage that each of `steps` is in, int64."""
        return self.starts[self._stage_of(steps)]

    def total_before(self, steps: np.ndarray | int) -> np.ndarray:
        """Return the sum of the values of all steps before `steps`, int64, in closed form."""
        stage = self._stage_of(steps)
        return self._totals_at_starts()[stage] + (steps - self.starts[stage]) * self.values[stage]

    def steps_to(self, total: np.ndarray | int) -> np.ndarray:
        """Return how many steps it takes to reach the sum `total`, which is above 0; int64."""
        totals = self._totals_at_starts()
        stage = np.searchsorted(totals, total, side="left") - 1
        return (self.starts[stage] + -(-(total - totals[stage]) // self.values[stage])).astype(np.int64)

    def first(self, num_steps: int) -> Self:
        """Return the stages that begin within the first `num_steps` steps."""
        count = np.searchsorted(self.starts, num_steps)
        return dataclasses.replace(self, starts=self.starts[:count], values=self.values[:count])

    def changed_from(self, step: int, value) -> Self:
        """Return the same values up to `step`, and `value` from there on."""
        before = self.starts < step
        starts, values = np.append(self.starts[before], step), np.append(self.values[before], value)
        return dataclasses.replace(self, starts=starts, values=values)

    def _stage_of(self, steps: np.ndarray | int) -> np.ndarray:
        return np.searchsorted(self.starts, steps, side="right") - 1

    def _totals_at_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.diff(self.starts) * self.values[:-1])])


@dataclass(frozen=True)
class Trace:
    """Batch sizes that were given beforehand."""

    batch_sizes: PiecewiseConstant
    length: int  # steps that have a batch size
    text: str  # origin of the batch sizes, in words


def from_list(sizes, largest: int = LARGEST) -> Trace:
    """Make a trace of the batch sizes of single steps, each at most `largest`.

    Raises:
      BadSetting: the list is empty or holds anything but such integers; names the place.
    """
    for place, size in enumerate(sizes):
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= largest:
            raise BadSetting(f"batch.trace: {size!r} at place {place}; allowed: {_integers(1, largest)}")
    if not sizes:
        raise BadSetting("batch.trace: (); allowed: at least one batch size")
    return Trace(_stages(np.arange(len(sizes)), np.array(sizes)), len(sizes), f"{len(sizes):,} given")


def digest(path: str) -> str:
    """Return the SHA-256 of a trace file, which must not change while a run is resumed."""
    return hashlib.sha256(untrusted.read_text(path, "batch.trace").encode()).hexdigest()


def read(
    path: str,
    per_device_batch_size: int | None = None,
    time_per_update: float = 1.0,
    largest: int = LARGEST,
) -> Trace:
    """Read the trace in a CSV file with one line of column names, of batches of at most `largest` examples.

    In a trace of batch sizes a step of 0 after later ones restarts the count: its row is for the step after the row
    before it.

    Args:
      per_device_batch_size: examples that each available device takes; an availability trace needs it.
      time_per_update: time of a step of an availability trace, in the unit of its time column, or of its index
        where it has no times; seconds for timestamps. A step belongs to the latest row at its start. Time without
        devices is left out.
    Raises:
      BadSetting: names the file, the line and what is allowed.
    """
    largest = min(largest, LARGEST)
    table = _read_table(path, "batch.trace")
    names = table.names
    if any(name in names for name in BATCH_COLUMNS):
        if per_device_batch_size is not None:
            raise BadSetting(
                f"batch.per_device_batch_size: {per_device_batch_size}; allowed: None with {path}, which has batch "
                "sizes and counts no devices"
            )
        return _batch_trace(table, names, largest)
    return _availability_trace(table, per_device_batch_size, time_per_update, largest)


@dataclass(frozen=True)
class AvailableDevices:
    """The number of available devices over time."""

    path: str
    counted: str  # name of the column that counts the devices
    times: np.ndarray  # float64 [rows], ascending; the times from which the counts hold
    counts: np.ndarray  # int64 [rows]


def read_availability(path: str, setting: str) -> AvailableDevices:
    """Read the availability trace in a CSV file.

    Args:
      setting: the config field or flag that names the file, for errors.
    Raises:
      BadSetting: names the file, the line and what is allowed.
    """
    return _available_devices(_read_table(path, setting))


def read_once(path: str, *arguments) -> Trace:
    """Read a trace as `read` does, but parse the file again only if it has changed."""
    try:
        stat = Path(expanded(path)).stat()
        version = stat.st_mtime_ns, stat.st_size, stat.st_ino
    except (OSError, ValueError, BadSetting):
        version = None  # `read` says what is wrong
    return _read_version(version, path, *arguments)


@functools.lru_cache(maxsize=8)
def _read_version(version, path: str, *arguments) -> Trace:
    return read(path, *arguments)


def _read_table(path: str, setting: str) -> "_Table":
    lines = [(number, line) for number, line in enumerate(_rows(path, setting), 1) if any(map(str.strip, line))]
    if not lines:
        raise BadSetting(f"{setting}: {path} is empty; allowed: a line of column names, and rows")
    if len(lines) == 1:
        raise BadSetting(f"{setting}: {path} has no rows below its column names")
    return _Table(setting, path, lines[0][1], lines[1:])


def _integers(low: int, high: int) -> str:
    return f"an integer from {low} to {high}"


def _rows(path: str, setting: str) -> list[list[str]]:
    try:
        return list(csv.reader(untrusted.read_text(path, setting).splitlines(), skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise BadSetting(f"{setting}: {path} is no CSV file ({error})") from error


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class _Table:
    """The rows of a CSV file."""

    setting: str  # the config field or flag that names the file
    path: str
    header: list[str]
    lines: list[tuple[int, list[str]]]  # each line with its number in the file, without the header

    @property
    def names(self) -> list[str]:
        """The column names, without case, blanks and signs."""
        return [_plain(name) for name in self.header]

    def column(self, index: int, low: int, high: int = LARGEST) -> np.ndarray:
        """Return a column of integers from `low` to `high`, int64."""
        return np.array([self._integer(number, line, index, low, high) for number, line in self.lines], np.int64)

    def times(self, index: int) -> np.ndarray:
        """Return a column of numbers or timestamps, float64."""
        return np.array([self._time(number, line, index) for number, line in self.lines])

    def ascending(self, values: np.ndarray, index: int) -> np.ndarray:
        """Return `values` of column `index`, or raise BadSetting if one is not above the value before it."""
        wrong = np.flatnonzero(values[1:] <= values[:-1])
        if len(wrong):
            number, line = self.lines[wrong[0] + 1]
            before = self.lines[wrong[0]][1][index].strip()
            word = "again" if values[wrong[0]] == values[wrong[0] + 1] else f"after {before}"
            raise self.error(number, f"{self.header[index].strip()} {line[index].strip()} {word}", "ascending rows")
        return values

    def error(self, number: int, problem: str, allowed: str) -> BadSetting:
        """Return the error for a line of the file."""
        return BadSetting(f"{self.setting}: {self.path}, line {number}: {problem}; allowed: {allowed}")

    def _cell(self, number: int, line: list[str], index: int) -> str:
        if len(line) != len(self.header):
            raise self.error(number, f"{len(line)} values", f"{len(self.header)}, as in the line of column names")
        return line[index].strip()

    def _integer(self, number: int, line: list[str], index: int, low: int, high: int) -> int:
        cell = self._cell(number, line, index)
        if not re.fullmatch(r"\+?[0-9]{1,18}", cell) or not low <= int(cell) <= high:
            raise self.error(number, f"{self.header[index].strip()} {cell!r}", _integers(low, high))
        return int(cell)

    def _time(self, number: int, line: list[str], index: int) -> float:
        cell = self._cell(number, line, index)
        try:
            value = float(cell)
        except ValueError:
            try:
                stamp = datetime.datetime.fromisoformat(cell)
            except ValueError as error:
                allowed = "a number or a timestamp as 2021-05-01 12:30:00"
                raise self.error(number, f"{self.header[index].strip()} {cell!r}", allowed) from error
            value = stamp.replace(tzinfo=stamp.tzinfo or datetime.UTC).timestamp()
        if not np.isfinite(value):
            raise self.error(number, f"{self.header[index].strip()} {cell!r}", "a finite number")
        return value


def _batch_trace(table: _Table, names: list[str], largest: int) -> Trace:
    steps = [index for index, name in enumerate(names) if name in STEP_COLUMNS]
    if not steps:
        given = ", ".join(name.strip() for name in table.header)
        raise BadSetting(f"batch.trace: {table.path} has the columns {given}; allowed: step and batchsize")
    sizes = next(index for index, name in enumerate(names) if name in BATCH_COLUMNS)
    counted = table.column(steps[0], 0)
    if counted[0] != 0:
        raise table.error(table.lines[0][0], f"the first step is {counted[0]}", "0, where training starts")
    begins_anew = np.append(False, (counted[1:] == 0) & (counted[:-1] > 0))
    goes_on_with = np.append(0, counted[:-1] + 1) * begins_anew
    starts = table.ascending(counted + np.cumsum(goes_on_with), steps[0])
    _refuse_late_updates(table, starts)
    stages = _stages(starts, table.column(sizes, 1, largest))
    text = f"{table.path}, {len(starts):,} rows"
    if begins_anew.any():
        line = table.lines[int(np.argmax(begins_anew))][0]
        times = f"{begins_anew.sum():,} times, first" if begins_anew.sum() > 1 else "once,"
        text += f", steps begin again at 0 {times} in line {line}: updates go on"
    return Trace(stages, int(starts[-1]) + 1, text)


def _refuse_late_updates(table: _Table, starts: np.ndarray) -> None:
    """Refuse steps that no run comes to, and whose examples 64 bits would not count."""
    late = np.flatnonzero(~(starts <= LARGEST))  # nan too
    if len(late):
        update = f"{starts[late[0]]:.0f}"
        raise table.error(table.lines[late[0]][0], f"begins with update {update}", f"up to {LARGEST}")


def _available_devices(table: _Table) -> AvailableDevices:
    names = table.names
    times = [i for i, name in enumerate(names) if name.startswith(TIME_WORDS)]
    indices = [i for i, name in enumerate(names) if not name or name.startswith(INDEX_WORDS)]
    counts = [
        i
        for i, name in enumerate(names)
        if i not in (*times, *indices)
        and any(word in name for word in DEVICE_WORDS)
        and not name.endswith(("id", "name", "type"))
    ]
    if not (times or indices) or len(counts) != 1:
        given = ", ".join(name.strip() for name in table.header)
        other_kinds = "step and batchsize, or " if table.setting == "batch.trace" else ""
        raise BadSetting(
            f"{table.setting}: {table.path} has the columns {given}; allowed: {other_kinds}a time or index "
            "and one that counts devices, such as GPUs or TPU_cores"
        )
    column = [*times, *indices][0]
    when, available = table.ascending(table.times(column), column), table.column(counts[0], 0)
    counted = table.header[counts[0]].strip()
    if not available.any():
        raise BadSetting(f"{table.setting}: {table.path} has no row with any {counted}")
    return AvailableDevices(table.path, counted, when, available)


def _availability_trace(
    table: _Table, per_device_batch_size: int | None, time_per_update: float, largest: int
) -> Trace:
    devices = _available_devices(table)
    counted, when, available = devices.counted, devices.times, devices.counts
    if per_device_batch_size is None:
        raise BadSetting(
            f"batch.trace: {table.path} counts {counted}; allowed: with batch.per_device_batch_size, the examples "
            "that each takes"
        )
    if int(available.max()) * per_device_batch_size > largest:
        row = int(np.argmax(available > largest // per_device_batch_size))
        batch_size = int(available[row]) * per_device_batch_size
        problem = f"{counted} {available[row]} x {per_device_batch_size} is a batch of {batch_size}"
        raise table.error(table.lines[row][0], problem, f"up to {largest}")
    there = available > 0
    # The first step that starts once the time with devices before the row is over.
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        elapsed = np.concatenate([[0.0], np.cumsum(np.diff(when) * there[:-1])])
    with np.errstate(over="ignore", invalid="ignore"):
        starts = np.ceil(elapsed / time_per_update - 1e-9)
    _refuse_late_updates(table, starts)
    starts = starts.astype(np.int64)
    last = np.append(starts[there][1:] != starts[there][:-1], True)  # the last of the rows of one step
    starts, sizes = starts[there][last], available[there][last] * per_device_batch_size
    text = f"{table.path}, {len(available):,} rows, {per_device_batch_size:,} for each of {counted}"
    length = int(starts[-1]) + 1
    if not there[-1]:  # the last devices left at the time of the last row
        length = max(length, math.ceil(elapsed[-1] / time_per_update - 1e-9))
    return Trace(_stages(starts, sizes), length, text)


def _stages(starts: np.ndarray, values: np.ndarray) -> PiecewiseConstant:
    """Return the stages without those that change nothing."""
    changes = np.append(True, values[1:] != values[:-1])
    return PiecewiseConstant(starts[changes].astype(np.int64), values[changes].astype(np.int64))
