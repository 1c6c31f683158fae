"""What hosts tell of themselves once per outer loop; `tests/pod/test_slow_host.py` slows one down."""

import re

import jax
import numpy as np
import pytest

from largebatch.hosts import collectives, memory, watch
from largebatch.hosts.watch import HostWatch, Probe


@pytest.fixture
def host_of_three(monkeypatch):
    """host_of_three(others) is the watch of host 1, whose probes take 2 ms; `others` are what 0 and 2 say."""

    def make(others: np.ndarray) -> HostWatch:
        class FakeProbe:
            def run(self) -> float:
                return 0.002

        def gather(own):
            rows = np.asarray(others, np.float64).view(np.uint32)
            return np.stack([rows[0], own, rows[1]])

        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(watch, "Probe", FakeProbe)
        monkeypatch.setattr(collectives, "gather", gather)
        monkeypatch.setattr(memory, "peak_bytes", lambda: 80_000_000_001)
        return HostWatch()

    return make


def test_the_slowest_host_is_named_by_its_time_over_the_median(host_of_three):
    """By hand: 0.001, 0.002 and 0.005 s, of which the middle one is this host's."""
    host = host_of_three([[80_000_000_002, 0.001], [80_000_000_000, 0.005]])
    host.after_call(20.0)
    assert host.row_fields() == {
        "device_memory_peak_bytes": 80_000_000_002,
        "slowest_host": 2,
        "slowest_host_ratio": pytest.approx(2.5),
    }


@pytest.mark.parametrize("other", [(np.nan, np.nan), (np.nan, 0.001)])
def test_what_one_host_does_not_know_is_null(host_of_three, other):
    host = host_of_three([other, (80_000_000_000, 0.001)])
    host.after_call(20.0)
    fields = host.row_fields()
    assert fields["device_memory_peak_bytes"] is None
    assert fields["slowest_host"] == (None if np.isnan(other[1]) else 1)


def test_probes_take_their_share_of_the_time_in_bursts(host_of_three, monkeypatch):
    host = host_of_three([[0, 0.001], [0, 0.001]])
    ran, run = [], host._probe.run
    monkeypatch.setattr(host._probe, "run", lambda: ran.append(run()) or ran[-1])
    host.after_call(2.0)
    assert not ran
    assert host.row_fields()["slowest_host"] is None
    bursts = []
    for _ in range(999):
        before = len(ran)
        host.after_call(2.0)
        bursts.append(len(ran) - before)
    assert 0.0039 * 2000 < sum(ran) < 0.0041 * 2000
    assert set(bursts) == {0, 28}  # every 7 calls 56 ms are due


def test_a_host_is_judged_by_its_last_200_probes_or_those_of_the_outer_loop(host_of_three, monkeypatch):
    told = []
    host = host_of_three([[0, 0.001], [0, 0.001]])
    gather = collectives.gather
    monkeypatch.setattr(collectives, "gather", lambda own: told.append(own.view(np.float64)[1]) or gather(own))

    def outer_loop(seconds_of_probes: list[float]) -> float:
        left = list(seconds_of_probes)
        monkeypatch.setattr(host._probe, "run", lambda: left.pop(0))
        host.after_call((sum(seconds_of_probes) - 1e-6) / watch.PROBE_SHARE)
        assert not left
        host.row_fields()
        return told[-1]

    assert outer_loop([0.001] * 100) == pytest.approx(0.001)
    assert outer_loop([0.003] * 100) == pytest.approx(0.002)
    assert outer_loop([0.005] * 20) == pytest.approx((80 * 0.001 + 100 * 0.003 + 20 * 0.005) / 200)
    assert outer_loop([0.002] * 300) == pytest.approx(0.002)
    assert outer_loop([0.004] * 300) == pytest.approx(0.004)


def test_one_host_is_compared_with_none():
    host = HostWatch()
    host.after_call(10.0)
    assert host.row_fields() == dict.fromkeys(("device_memory_peak_bytes", "slowest_host", "slowest_host_ratio"))


def test_a_probe_exchanges_nothing_and_works_on_all_devices():
    probe = Probe()
    text = probe.compiled.as_text()
    assert "dot(" in text or "custom-call" in text
    assert not re.search(r"all-reduce|all-gather|all-to-all|collective|send|recv", text)
    result = probe.compiled(*probe._matrices, np.int32(5))
    assert len(result.sharding.device_set) == jax.local_device_count() == 8
    np.testing.assert_allclose(result, np.ones((8, watch.CPU_SIDE, watch.CPU_SIDE)), rtol=1e-5)
    assert 0 < min(probe.run() for _ in range(5)) < 0.1
