"""The validation of a run, its predictions for the run folder, and the row of metrics.jsonl."""

import dataclasses
import functools

import numpy as np

from largebatch.data.placement import DeviceData, split_planes
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim import noise_scale
from largebatch.predictions.cases import Cases, CasesToWrite
from largebatch.predictions.files import Outcome, Predictions
from largebatch.runs.summary import timings
from largebatch.tasks.task import Scores
from largebatch.training.costs import bytes_sent_per_update, flops_utilisation
from largebatch.training.evaluation import SplitPredictions, SplitRows, predict_split
from largebatch.training.programs import Programs
from largebatch.training.state import TrainState
from largebatch.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation, over all validation examples.

    Attributes:
      kept: per-example outputs with the plain parameters, still on the devices; see `Task.kept`.
      variables: variables of the network, on every device.
      other_scores: scores with views and shifts, with the moving average and with both, by metric.
    """

    scores: Scores
    kept: SplitRows
    variables: dict
    other_scores: dict[str, float]


def validate(programs: Programs, data: DeviceData, state: TrainState) -> Validation:
    """Validate the parameters, and the averages that the config asks for. Collective.

    Raises:
      RuntimeError: the replicas no longer hold the same parameters.
      UserError: validation images that do not stay on the devices cannot be read.
    """
    name, others = programs.task.kind.score_column, {}
    if programs.predict_views:
        others[f"{name}_views"] = _predict(programs, programs.predict_views, data, state.variables).scores.score
    if state.ema is not None:
        others[f"{name}_ema"] = _predict(programs, programs.predict, data, state.ema_variables).scores.score
    if state.ema is not None and programs.predict_views:
        averaged = _predict(programs, programs.predict_views, data, state.ema_variables)
        others[f"{name}_ema_views"] = averaged.scores.score
    # The plain parameters come last, since their rows are kept: no others are on the devices beside them.
    plain = _predict(programs, programs.predict, data, state.variables)
    replicas.check_replicas(state.variables, "parameters")
    return Validation(plain.scores, plain.rows, state.variables, others)


def _predict(programs: Programs, predict, data: DeviceData, variables) -> SplitPredictions:
    return predict_split(predict, variables, data.validation, programs.prediction_micro_batch_size, programs.task)


def outcome_of(validation: Validation, programs: Programs, data: DeviceData) -> Outcome:
    """Return the predictions that the run folder keeps of a validation, if it is the best."""
    if programs.task.kind.of_pixels:
        return CasesToWrite(validation.kept, functools.partial(_cases, programs, data, validation.variables))
    return Predictions(data.validation.labels, validation.kept, data.val_ids)


def _cases(programs: Programs, data: DeviceData, variables: dict, numbers: np.ndarray, scores: np.ndarray) -> Cases:
    """Predict these validation examples once more, on one device."""
    task, cache = programs.task, data.cache
    stored = data.validation.images_of(numbers).reshape(-1, *cache.image_shape)
    images, truth = split_planes(stored, task.target_planes)
    return Cases(
        ids=data.val_ids[numbers],
        scores=scores,
        columns=np.array(task.kept_names),
        classes=np.array(cache.targets.classes, str),
        images=images,
        truth=truth,
        predicted=np.asarray(programs.predict_images(replicas.first_replica(variables), images)),
    )


OF_CLASSIFICATION = ("train_accuracy", "val_accuracy", "val_accuracy_top5")  # None where another task is trained


def metrics_row(
    trainer: Trainer, validation: Validation, flops_per_image: float, clock: Clock, seconds_before: dict[str, float]
) -> dict:
    """Return the row of metrics.jsonl for the outer loop that has just ended. Collective.

    Args:
      validation: validation after the last step.
      flops_per_image: FLOPs per training image, forward and backward.
      seconds_before: `clock.seconds` when that outer loop began.
    """
    schedule, programs, metrics = trainer.schedule, trainer.programs, trainer.metrics_of_outer_loop()
    is_applied = metrics["nonfinite"] == 0
    # With local steps the device that reports may have no example in a step, and then no loss of it.
    is_known = is_applied & np.isfinite(metrics["loss"])

    def mean(name: str) -> float | None:
        return metrics[name][is_known].mean() if is_known.any() else None

    last_update = trainer.step - 1
    learning_rate = metrics["rate"][-1] if schedule.scale_invariant else schedule.learning_rate_at(last_update)
    examples_seen = schedule.examples_before(trainer.step)
    examples_before = schedule.examples_before(trainer.step - trainer.updates_in_outer)
    times = timings(clock, seconds_before, trainer.updates_in_outer, examples_seen - examples_before)
    hardware = Hardware.here()
    row = {
        "step": trainer.step,
        "outer": -(-trainer.step // trainer.inner_steps),
        "examples_seen": examples_seen,
        "epoch": examples_seen / schedule.examples_per_epoch,
        "global_batch_size": schedule.batch_size_at(last_update),
        "learning_rate": learning_rate * trainer.learning_rate_scale,
        "train_loss": mean("loss"),
        **{f"train_{name}": mean(name) for name in programs.task.metric_names},
        "grad_norm": metrics["grad_norm"][-1],
        "skipped_updates": int((~is_applied).sum()),
        "noise_scale": measured_noise_scale(trainer, metrics),
        "bytes_sent": bytes_sent_per_update(
            hardware.num_devices, programs.allreduce_bytes, programs.sync_bytes, metrics
        ),
        "val_score": validation.scores.score,
        **validation.scores.row_fields(),
        **validation.other_scores,
        **times,
        "mfu": flops_utilisation(flops_per_image, times["images_per_sec"], hardware),
        "device_memory_peak_bytes": memory.largest_peak_bytes(),
    }
    for name in OF_CLASSIFICATION:
        row.setdefault(name, None)
    if schedule.scale_invariant:
        row["gain"] = mean("gain")
        row["scale_invariant_steps"] = trainer.schedule_step
    if "drift" in metrics:
        is_synced = metrics["synced"] > 0
        row["replica_drift"] = metrics["drift"][is_synced][-1] if is_synced.any() else None
    return row


def measured_noise_scale(trainer: Trainer, metrics: dict[str, np.ndarray]) -> float | None:
    """Return the noise scale after an outer loop; None where steps were local, which measure none."""
    if "local" in metrics and metrics["local"].any():
        return None
    return noise_scale.noise_scale(replicas.first_replica(trainer.state.noise))
