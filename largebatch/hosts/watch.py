"""What rows of metrics.jsonl tell of hosts, gathered from all of them once per outer loop.

Hosts that synchronise train at the same pace: the fast ones wait for the slow one in the all-reduce. Nobody outside
of the compiled step sees when a host gets there, and the sections of a `Clock` have this waiting in them. So each
host times a *probe*: a small program of its own, matrix products on all of its devices at once, that talks to no
other host and is no part of the step. All hosts run it at the same moment: between two calls of the compiled loop,
when they have just agreed on the next one.

This shows chips that are throttled or shared, and hosts whose cores are taken. It shows neither a slow network
nor a slow disk from which images are streamed.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.hosts import collectives, memory, replicas

PROBE_SECONDS = 1e-3  # of one probe, on host 0 at the start
PROBE_SHARE = 0.004  # of the time of training, that probes take
# Of probes in a row. A host that has just waited for others gets a core at once: a few milliseconds may not show
# that it shares it.
BURST_SECONDS = 0.05
FEWEST_PROBES = 200  # that a host is judged by, once it has done so many
CPU_SIDE, SIDE = 128, 1024  # of the matrices; an accelerator would do small ones in no time
MOST_PRODUCTS = 2**20


class HostWatch:
    """Looks at this host while it trains; made on every host together."""

    def __init__(self):
        self._probe = Probe() if jax.process_count() > 1 else None  # one host has none to be compared with
        self._seconds: list[float] = []  # of each of the last probes
        self._num_probes = 0  # in the running outer loop
        self._owed = 0.0  # seconds to be spent on probes

    def after_call(self, seconds: float) -> None:
        """Probes this host after a call of the compiled loop, if BURST_SECONDS are due by now.

        Hosts need not agree on it: calls take all of them the same time.

        Args:
          seconds: that the call took.
        """
        if self._probe is None:
            return
        self._owed += PROBE_SHARE * seconds
        if self._owed < BURST_SECONDS:
            return
        while self._owed > 0:
            taken = self._probe.run()
            self._owed -= taken
            self._seconds.append(taken)
            self._num_probes += 1

    def row_fields(self) -> dict:
        """The fields of a metrics row for the outer loop that has just ended; on every host together.

        The time of a host is the mean of its probes in the outer loop, or of its last FEWEST_PROBES. As a mean it
        has the time in it for which other work held the host up.
        """
        del self._seconds[: -max(self._num_probes, FEWEST_PROBES)]
        self._num_probes = 0
        mean = np.mean(self._seconds) if self._seconds else None
        peaks, seconds = _gather(memory.peak_bytes(), mean)
        is_known = len(seconds) > 1 and not np.isnan(seconds).any()
        return {
            "device_memory_peak_bytes": None if np.isnan(peaks).any() else int(peaks.max()),
            "slowest_host": int(seconds.argmax()) if is_known else None,
            "slowest_host_ratio": float(seconds.max() / np.median(seconds)) if is_known else None,
        }


class Probe:
    """Matrix products on the devices of this host: as many on every host, as take host 0 PROBE_SECONDS."""

    def __init__(self):
        side = CPU_SIDE if jax.default_backend() == "cpu" else SIDE
        # Their product is the second one again, however often.
        averages, ones = np.full((side, side), 1 / side, np.float32), np.ones((side, side), np.float32)
        self._matrices = replicas.replicate((averages, ones))  # on this host alone
        self.compiled = jax.jit(_multiply).lower(*self._matrices, np.int32(1)).compile()
        self._num_products = 1
        if collectives.is_primary():
            self._find_num_products()
        self._num_products = collectives.json_from_primary(self._num_products)

    def _find_num_products(self) -> None:
        self.run()  # the first run of a program takes longer
        while self.run() < PROBE_SECONDS and self._num_products < MOST_PRODUCTS:
            self._num_products *= 2

    def run(self) -> float:
        """Seconds until the last device of this host is done."""
        begin = time.perf_counter()
        jax.block_until_ready(self.compiled(*self._matrices, np.int32(self._num_products)))
        return time.perf_counter() - begin


def _multiply(left, right, num_products):
    """[devices, side, side] each; a device has its own, so nothing is exchanged."""
    return lax.fori_loop(0, num_products, lambda _, product: jnp.matmul(left, product), right)


def _gather(*values: float | None) -> np.ndarray:
    """Every host's values, NaN for None: float64 [values, hosts], the same on every host.

    Hosts come here together, from a validation; a meeting would cost more than this collective.
    """
    own = np.array([np.nan if value is None else value for value in values], np.float64)
    # As integers: JAX would round to float32, in which bytes are not exact.
    return collectives.gather(own.view(np.uint32)).view(np.float64).T
