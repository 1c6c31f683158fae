"""What a row of metrics.jsonl says of the hardware, against hand calculations."""

import json
from types import SimpleNamespace

import jax
import pytest

import train
from largebatch.hardware import chips
from largebatch.hardware.chips import Chip, Hardware
from largebatch.hosts import memory
from largebatch.training.costs import flops_utilisation


def test_a_row_has_utilisation_and_memory_of_known_devices(small_config, tmp_path, capsys, monkeypatch):
    """A run of 3 steps of 100 images on 8 CPU devices."""
    small_config.batch.size, small_config.train.outer_steps = 100, 1
    assert flops_utilisation(1.0, 1.0, Hardware.here()) is None  # the peak of CPUs is not known
    monkeypatch.setitem(chips.CHIPS, "cpu", Chip(peak_flops=1e10, memory_bytes=2**30, bytes_per_second=1e9))
    monkeypatch.setattr(memory, "peak_bytes", lambda: 79_456_789_123)
    summary = train.train_and_evaluate(small_config, str(tmp_path))
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("outer")]
    assert row["mfu"] == pytest.approx(summary["flops_per_image"] * 300 / row["train_sec"] / 8e10)
    assert float(line.split("  mfu ")[1].split("%")[0]) == pytest.approx(100 * row["mfu"], abs=0.5)
    assert row["device_memory_peak_bytes"] == 79_456_789_123
    assert "  memory 79.5 GB" in line


@pytest.mark.parametrize(
    ("stats", "peak"),
    [
        ([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 9, "bytes_in_use": 1}, {"peak_bytes_in_use": 7}], 9),
        ([{"peak_bytes_in_use": 5}, {"bytes_in_use": 1}], None),
        ([None, None], None),
    ],
)
def test_the_peak_of_memory_is_that_of_the_fullest_device(monkeypatch, stats, peak):
    devices = [SimpleNamespace(memory_stats=lambda of_device=of_device: of_device) for of_device in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory.peak_bytes() == peak
