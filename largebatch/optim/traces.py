"""Traces: batch sizes by step, from a list or a CSV file.

A batch trace has the columns `step` and `batchsize`. An availability trace has a column of times or indices and one
that counts devices (GPUs, TPU_cores, ...), each of which takes a fixed number of examples; while there are no
devices there are no steps.
"""

import csv
import datetime
import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from largebatch.config.fields import BatchConfig
from largebatch.util import BadSetting, read_text

# Steps, and the examples of a step, are counted in 32 bits on the devices; so 63 bits hold those of a run.
LARGEST = 2**31 - 1
# Names of columns, in lower case without blanks and signs; those of times, indices and counts begin with a word or
# contain it.
STEP_COLUMNS = ("step", "update", "iteration")
BATCH_COLUMNS = ("batchsize", "batch")
TIME_WORDS = ("time", "date", "second", "minute", "hour")
INDEX_WORDS = ("index", "unnamed", *STEP_COLUMNS)
TIMES = "a finite number or a timestamp as 2021-05-01 12:30:00"
DEVICE_WORDS = ("gpu", "tpu", "core", "device", "worker", "node", "instance", "machine")


@dataclass(frozen=True)
class Trace:
    """Batch sizes that were given beforehand."""

    starts: np.ndarray  # int64 [stages], the steps at which the batch size changes, ascending from 0
    sizes: np.ndarray  # int64 [stages]
    length: int  # steps that have a batch size
    text: str  # origin of the batch sizes, in words


@dataclass(frozen=True)
class AvailableDevices:
    """The number of available devices over time."""

    counted: str  # name of the column that counts the devices
    times: np.ndarray  # float64 [rows], ascending; the times from which the counts hold
    counts: np.ndarray  # int64 [rows]


def read_trace(batch: BatchConfig, largest: int = LARGEST) -> Trace:
    """Read the trace that a config names, of batches of at most `largest` examples.

    In a file of batch sizes a step of 0 after later ones restarts the count: its row is for the step after the row
    before it. A step of an availability trace takes `batch.time_per_step`, in the unit of the time column, of the
    index where there are no times, or in seconds for timestamps; it belongs to the latest row at its start. Time
    without devices is left out.

    Raises:
      BadSetting: names the file and line, or the place in the list, and what is allowed.
    """
    if isinstance(batch.trace, str):
        table = _read_table(batch.trace, "batch.trace")
        read_rows = _batch_rows if set(table.names) & set(BATCH_COLUMNS) else _availability_rows
        starts, sizes, length, text = read_rows(table, batch, min(largest, LARGEST))
    else:
        for place, size in enumerate(batch.trace):
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= largest:
                raise BadSetting(f"batch.trace: {size!r} at place {place}; allowed: an integer from 1 to {largest}")
        if not batch.trace:
            raise BadSetting("batch.trace: (); allowed: at least one batch size")
        length, sizes = len(batch.trace), np.array(batch.trace)
        starts, text = np.arange(length), f"{length:,} given"
    changes = np.append(True, sizes[1:] != sizes[:-1])
    return Trace(starts[changes], sizes[changes], int(length), text)


def read_availability(path: str, field: str) -> AvailableDevices:
    """Read the availability trace in a CSV file.

    Args:
      field: the config field or flag that names the file, for errors.
    Raises:
      BadSetting: names the file, the line and what is allowed.
    """
    return _available_devices(_read_table(path, field))


def digest(path: str) -> str:
    """Return the SHA-256 of a trace file, which must not change while a run is resumed."""
    return hashlib.sha256(read_text(path, "batch.trace").encode()).hexdigest()


class _Table(NamedTuple):
    """The cells of a CSV file below its line of column names."""

    source: str  # the config field or flag that names the file, and its path
    header: list[str]
    names: list[str]  # those of the header, in lower case, without blanks and signs
    rows: list[tuple[str, list[str]]]  # each with its source and line, for errors


def _read_table(path: str, field: str) -> _Table:
    text, source = read_text(path, field), f"{field}: {path}"
    try:
        lines = list(csv.reader(text.splitlines(), skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise BadSetting(f"{source} is no CSV file ({error})") from error
    cells = [(f"{source}, line {number}", [*map(str.strip, line)]) for number, line in enumerate(lines, 1)]
    cells = [(place, row) for place, row in cells if any(row)]
    if len(cells) < 2:
        raise BadSetting(f"{source} has no rows; allowed: a line of column names, and rows")
    (_, header), *rows = cells
    for place, row in rows:
        if len(row) != len(header):
            raise BadSetting(f"{place}: {len(row)} values; allowed: {len(header)}, as in the line of column names")
    return _Table(source, header, [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header], rows)


def _column(table: _Table, index: int, low: float, high: float, parse: Callable = int) -> np.ndarray:
    """Return the values of a column from `low` to `high`: integers, or what `parse` makes of a cell."""
    allowed, values = f"an integer from {low} to {high}" if parse is int else TIMES, []
    for place, row in table.rows:
        try:
            value = parse(row[index])
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise BadSetting(f"{place}: {table.header[index]} {row[index]!r}; allowed: {allowed}")
        values.append(value)
    return np.array(values)


def _check_ascending(table: _Table, values: np.ndarray, index: int) -> None:
    """Raise BadSetting if a value, of column `index`, is not above the one before it."""
    if (wrong := np.flatnonzero(values[1:] <= values[:-1])).size:
        (_, before), (place, row) = table.rows[wrong[0] : wrong[0] + 2]
        found = f"{table.header[index]} {row[index]} after {before[index]}"
        raise BadSetting(f"{place}: {found}; allowed: ascending rows")


def _check_late(table: _Table, starts: np.ndarray) -> None:
    """Raise BadSetting for a row whose first step no run comes to."""
    if (late := np.flatnonzero(~(starts <= LARGEST))).size:  # NaN, too
        place, start = table.rows[late[0]][0], float(starts[late[0]])
        raise BadSetting(f"{place}: begins with step {start:.0f}; allowed: up to {LARGEST}")


def _batch_rows(table: _Table, batch: BatchConfig, largest: int) -> tuple[np.ndarray, np.ndarray, int, str]:
    """Return first steps and batch sizes of the rows, the length of the trace, and its origin."""
    if batch.per_device_batch_size is not None:
        found = f"batch.per_device_batch_size: {batch.per_device_batch_size}"
        raise BadSetting(f"{found}; allowed: None with {batch.trace}, which has batch sizes and counts no devices")
    steps, sizes = ([i for i, name in enumerate(table.names) if name in of] for of in (STEP_COLUMNS, BATCH_COLUMNS))
    if not steps:
        raise BadSetting(f"{table.source} has the columns {', '.join(table.header)}; allowed: step and batchsize")
    counted = _column(table, steps[0], 0, LARGEST)
    if counted[0] != 0:
        raise BadSetting(f"{table.rows[0][0]}: the first step is {counted[0]}; allowed: 0, where training starts")
    restarts = np.append(False, (counted[1:] == 0) & (counted[:-1] > 0))
    starts = counted + np.cumsum(np.append(0, counted[:-1] + 1) * restarts)
    _check_ascending(table, starts, steps[0])
    _check_late(table, starts)
    text = f"{batch.trace}, {len(starts):,} rows"
    if restarts.any():
        line = table.rows[int(np.argmax(restarts))][0].rpartition("line ")[2]
        text += f", steps begin again at 0 in line {line}: they are counted on"
    return starts, _column(table, sizes[0], 1, largest), starts[-1] + 1, text


def _available_devices(table: _Table, other_kinds: str = "") -> AvailableDevices:
    names = list(enumerate(table.names))
    times = [i for i, name in names if name.startswith(TIME_WORDS)]
    times += [i for i, name in names if not name or name.startswith(INDEX_WORDS)]
    others = [(i, name) for i, name in names if i not in times and not name.endswith(("id", "name", "type"))]
    counts = [i for i, name in others if any(word in name for word in DEVICE_WORDS)]
    if not times or len(counts) != 1:
        raise BadSetting(
            f"{table.source} has the columns {', '.join(table.header)}; allowed: {other_kinds}a time or index and "
            "one that counts devices, such as GPUs or TPU_cores"
        )
    finite = float(np.finfo(np.float64).max)
    when, available = _column(table, times[0], -finite, finite, _parse_time), _column(table, counts[0], 0, LARGEST)
    _check_ascending(table, when, times[0])
    counted = table.header[counts[0]]
    if not available.any():
        raise BadSetting(f"{table.source} has no row with any {counted}")
    return AvailableDevices(counted, when, available)


def _parse_time(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        stamp = datetime.datetime.fromisoformat(cell)
        return stamp.replace(tzinfo=stamp.tzinfo or datetime.UTC).timestamp()


def _availability_rows(table: _Table, batch: BatchConfig, largest: int) -> tuple[np.ndarray, np.ndarray, int, str]:
    """Return what `_batch_rows` does, where rows count devices."""
    devices = _available_devices(table, other_kinds="step and batchsize, or ")
    counted, counts, per_device = devices.counted, devices.counts, batch.per_device_batch_size
    if per_device is None:
        needed = "with batch.per_device_batch_size, the examples that each takes"
        raise BadSetting(f"{table.source} counts {counted}; allowed: {needed}")
    row = int(np.argmax(counts))
    if (batch_size := int(counts[row]) * per_device) > largest:
        problem = f"{counted} {counts[row]} x {per_device} is a batch of {batch_size}"
        raise BadSetting(f"{table.rows[row][0]}: {problem}; allowed: up to {largest}")
    has_devices = counts > 0
    # A row's first step is the first that starts once the time with devices before the row is over.
    with np.errstate(over="ignore", invalid="ignore"):  # times at the ends of float64, which are refused
        elapsed = np.concatenate([[0.0], np.cumsum(np.diff(devices.times) * has_devices[:-1])])
        starts = np.ceil(elapsed / batch.time_per_step - 1e-9)
    _check_late(table, starts)
    starts = starts.astype(np.int64)
    length = starts[has_devices][-1] + 1
    if not has_devices[-1]:  # the last devices left at the time of the last row
        length = max(length, starts[-1])
    starts, sizes = starts[has_devices], counts[has_devices] * per_device
    is_last = np.append(starts[1:] != starts[:-1], True)  # of the rows of one step the last one counts
    text = f"{batch.trace}, {len(counts):,} rows, {per_device:,} for each of {counted}"
    return starts[is_last], sizes[is_last], length, text
