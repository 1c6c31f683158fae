"""What `bench.py card` measures in a process of its own: our step, the ceilings, a start, a profile.

It imports JAX, NumPy, optax, flax and our step, and nothing that reads data or configs.
"""

import dataclasses
import tempfile
from collections.abc import Callable

import jax

from benchmarks import ceilings, kernels
from benchmarks.ours import OurStep, StepOptions
from benchmarks.peers import serve
from benchmarks.timing import Contender, about_machine
from largebatch.hardware.chips import auto_dtype
from largebatch.hosts.start import start_jax
from largebatch.runs.summary import code_sha256
from largebatch.training.costs import training_costs


class CardStep(OurStep):
    """Our step; its facts take no second compilation."""

    def facts(self) -> dict:
        """The options that were resolved, FLOPs of an image, and the most bytes in use so far on a device."""
        memory = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
        return {
            "options": dataclasses.asdict(self.options),
            "flops_per_image": training_costs(self.network, serve.IMAGE_SHAPE).flops,
            "peak_bytes": memory.get("peak_bytes_in_use"),
        }


class ProfiledStep(OurStep):
    """Our step; its facts are the kernels of some updates."""

    def __init__(self, options: StepOptions, updates: int):
        super().__init__(options)
        self._updates_to_profile = updates

    def facts(self) -> dict:
        """Kernels by the milliseconds that they take an update, longest first; after a warm-up."""
        self.run(1)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run(self._updates_to_profile)
            table = kernels.read_trace(folder, self._updates_to_profile)
        return {"options": dataclasses.asdict(self.options), **table}


class Machine(serve.Step):
    """No work; its facts are what the figures depend on."""

    def run(self, updates: int) -> None:
        """Does nothing."""

    def updates(self) -> int:
        """See `serve.Step`."""
        return 0

    def params(self) -> list:
        """See `serve.Step`."""
        return []

    def facts(self) -> dict:
        """Devices, versions, code, and the dtype that train.py takes here."""
        return {
            **about_machine(),
            "devices": jax.device_count(),
            "dtype": auto_dtype(),
            "code_sha256": code_sha256(),
        }


class CeilingStep:
    """A ceiling; see `timing.Work`."""

    def __init__(self, contender: Contender):
        self._contender = contender
        self.run, self.progress = contender.work.run, contender.work.progress

    def facts(self) -> dict:
        """FLOPs and bytes of a round."""
        return {"flops": self._contender.flops, "bytes": self._contender.bytes}


KINDS: dict[str, Callable[..., object]] = {
    "machine": lambda: Machine(),
    "step": lambda **options: CardStep(StepOptions(**options)),
    "profile": lambda updates, **options: ProfiledStep(StepOptions(**options), updates),
    "matmul": lambda dtype: CeilingStep(ceilings.matmul_ceiling(dtype)),
    "copy": lambda: CeilingStep(ceilings.copy_ceiling()),
}


def build(options: dict):
    """Build what options["kind"] names, a key of KINDS, from the other options."""
    options = dict(options)
    make = KINDS[options.pop("kind")]
    start_jax()
    return make(**options)


if __name__ == "__main__":
    serve.serve(build)
