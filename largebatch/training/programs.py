"""The programs of a run: the loops that train, and the predictions that validate."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from flax import linen as nn

from largebatch.data.placement import DeviceData
from largebatch.data.sharded_split import Block
from largebatch.hosts import replicas
from largebatch.optim.schedules import StepInputs
from largebatch.tasks.task import Task
from largebatch.training.local_sgd import Sync
from largebatch.training.state import TrainState
from largebatch.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run, pmapped. They serve every seed, batch size, schedule and hyper-parameter.

    Attributes:
      step: the step of the loops.
      init: (seed, hyper-parameters, kernel of the frozen stem or None) -> one replica's first state.
      inner_loop: see `step.make_inner_loop`; None where all steps are local.
      local_loop: see `local_sgd.make_local_loop`; None where all steps are synchronous.
      average: states -> `LocalSGD.average` of each; None where all steps are synchronous.
      predict: (variables, block of a split) -> sums and logits, see `evaluation.make_predict`.
      predict_views: as `predict`, averaged over views and shifts of an image; None where not asked for.
      predict_images: (variables, integer images [M, H, W, C]) -> predictions of the task, on one device.
      prediction_micro_batch_size: images that one device predicts at once.
      metric_names: names of the metrics that the loops return beside the state.
      allreduce_bytes: bytes that a device puts into the all-reduce of a synchronous step.
      sync_bytes: bytes that a device puts into the all-reduce of an average after local steps.
    """

    network: nn.Module
    task: Task
    step: TrainStep
    init: Callable[..., TrainState]
    inner_loop: Callable | None
    local_loop: Callable | None
    average: Callable | None
    predict: Callable
    predict_views: Callable | None
    predict_images: Callable
    prediction_micro_batch_size: int
    metric_names: tuple[str, ...]
    allreduce_bytes: int
    sync_bytes: int

    def bytes_sent_per_step(self, num_devices: int, metrics: dict[str, np.ndarray]) -> float:
        """Return the bytes each device sends per step: by a ring, 2 (D - 1) / D of those it puts into all-reduces.

        Args:
          metrics: metrics of every step; "local" is 1 for local steps, "synced" where a synchronisation followed.
        """
        num_steps = len(metrics["loss"])
        num_local, num_syncs = (np.sum(metrics.get(name, 0)) for name in ("local", "synced"))
        put_in = self.allreduce_bytes * (num_steps - num_local) + self.sync_bytes * num_syncs
        return float(2 * (num_devices - 1) / num_devices * put_in / num_steps)

    def _calls(self, state: TrainState, train, block: Block, inputs: StepInputs, sync: Sync) -> dict[str, tuple]:
        """Return every program with its arguments, arrays or shapes, by name."""
        count, calls = np.int32(0), {}
        if self.inner_loop:
            calls["step"] = self.inner_loop, (state, train, inputs, count)
        if self.local_loop:
            calls["local step"] = self.local_loop, (state, train, inputs, count, sync)
            calls["average"] = self.average, (state,)
        calls["validation"] = self.predict, (state.variables, block)
        if self.predict_views:
            calls["validation of copies"] = self.predict_views, (state.variables, block)
        return calls

    def compile_here(self, state: TrainState, data: DeviceData, inputs: StepInputs, sync: Sync) -> None:
        """Compile all programs for this host's devices.

        Args:
          state: state of all replicas.
          inputs: inputs of any steps.
        """
        block = next(data.validation.blocks(self.prediction_micro_batch_size))
        calls = self._calls(state, data.train.arrays, block, inputs, sync)
        replicas.compile_side_by_side(list(calls.values()))

    def lower(
        self, shapes: tuple[TrainState, dict, Block], inputs: StepInputs, sync: Sync, num_devices: int
    ) -> dict[str, jax.stages.Lowered]:
        """Lower all programs for devices that need not be attached; return them by name.

        Args:
          shapes: one device's state, training data and block of the validation split.
          num_devices: number of devices that the programs were made for.
        """
        on_devices = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), shapes)
        calls = self._calls(*on_devices, *jax.eval_shape(lambda: (inputs, sync)))
        return {name: program.lower(*arguments) for name, (program, arguments) in calls.items()}
