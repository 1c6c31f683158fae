"""What a row of metrics.jsonl says of the hardware, against hand calculations."""

import json

import jax
import pytest

import train
from largebatch.hardware import chips
from largebatch.hardware.chips import Chip, Hardware
from largebatch.hosts import memory
from largebatch.training.costs import flops_utilisation


@pytest.fixture
def run_row(small_config, tmp_path, capsys):
    """run_row() trains 3 updates of 100 images on 8 CPU devices: (row, summary, the line on the terminal)."""

    def run():
        small_config.batch.size = 100
        small_config.train.outer_steps = 1
        summary = train.train_and_evaluate(small_config, str(tmp_path / "run"))
        (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("outer")]
        return row, summary, line

    return run


def test_utilisation_of_4_tpus_by_hand():
    """5 GFLOPs x 88,000 images/s of 4 x 275 TFLOP/s."""
    assert flops_utilisation(5e9, 88_000, Hardware("tpu", "TPU v4", 4)) == pytest.approx(0.4)
    assert flops_utilisation(5e9, 88_000, Hardware("cpu", "cpu", 4)) is None


def test_a_row_has_the_utilisation_of_known_devices(run_row, monkeypatch):
    monkeypatch.setitem(chips.CHIPS, "cpu", Chip(peak_flops=1e10, memory_bytes=2**30, bytes_per_second=1e9))
    row, summary, line = run_row()
    assert row["mfu"] == pytest.approx(summary["flops_per_image"] * 300 / row["train_sec"] / 8e10)
    percent = float(line.split("  mfu ")[1].split("%")[0])
    assert percent == pytest.approx(100 * row["mfu"], abs=0.5)


def test_a_row_on_cpus_has_no_utilisation(run_row):
    row, _, line = run_row()
    assert row["mfu"] is None
    assert "mfu" not in line


class FakeDevice:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


@pytest.mark.parametrize(
    ("stats", "peak"),
    [
        ([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 9, "bytes_in_use": 1}, {"peak_bytes_in_use": 7}], 9),
        ([{"peak_bytes_in_use": 5}, {"bytes_in_use": 1}], None),
        ([None, None], None),
    ],
)
def test_the_peak_of_memory_is_that_of_the_fullest_device(monkeypatch, stats, peak):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice(of_device) for of_device in stats])
    assert memory.peak_bytes() == peak


@pytest.mark.parametrize(("peak", "shown"), [(79_456_789_123, "  memory 79.5 GB"), (None, None)])
def test_a_row_has_the_peak_of_memory_to_the_byte(run_row, monkeypatch, peak, shown):
    monkeypatch.setattr(memory, "peak_bytes", lambda: peak)
    row, _, line = run_row()
    assert row["device_memory_peak_bytes"] == peak
    assert shown in line if shown else "memory" not in line
