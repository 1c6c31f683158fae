"""The validation of a run, its predictions for the run folder, and the row of metrics.jsonl."""

import dataclasses
import functools

import numpy as np

from largebatch.data.placement import DeviceData
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim import noise_scale
from largebatch.predictions.cases import Cases, CasesToWrite
from largebatch.predictions.files import Outcome, Predictions
from largebatch.runs.summary import timings
from largebatch.tasks.planes import split_planes
from largebatch.tasks.scores import Scores
from largebatch.training.costs import flops_utilisation
from largebatch.training.evaluation import SplitPredictions, predict_split
from largebatch.training.programs import Programs
from largebatch.training.state import TrainState
from largebatch.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation, over all validation examples.

    Attributes:
      predictions: scores and kept outputs with the plain parameters.
      variables: variables of the network, on every device.
      other_scores: scores with views and shifts, with the moving average and with both, by metric.
    """

    predictions: SplitPredictions
    variables: dict
    other_scores: dict[str, float]

    @property
    def scores(self) -> Scores:
        """The scores with the plain parameters."""
        return self.predictions.scores


def validate(programs: Programs, data: DeviceData, state: TrainState) -> Validation:
    """Validate the parameters, and the averages that the config asks for. Collective.

    Raises:
      RuntimeError: the replicas no longer hold the same parameters.
      UserError: validation images that do not stay on the devices cannot be read.
    """

    def predict(program, variables) -> SplitPredictions:
        size = programs.prediction_micro_batch_size
        return predict_split(program, variables, data.validation, size, programs.task)

    others, averages = {}, {"": state.variables}
    if state.ema is not None:
        averages["_ema"] = {"params": state.ema["params"], **state.ema["model_state"]}
    for average, variables in averages.items():
        for copies, program in (("", programs.predict), ("_views", programs.predict_views)):
            if program and average + copies:
                score = predict(program, variables).scores.score
                others[f"{programs.task.kind.score_column}{average}{copies}"] = score
    # The plain parameters come last, since their outputs are kept: no others are on the devices beside them.
    plain = predict(programs.predict, state.variables)
    replicas.check_replicas(state.variables, "parameters")
    return Validation(plain, state.variables, others)


def outcome_of(validation: Validation, programs: Programs, data: DeviceData) -> Outcome:
    """Return the predictions that the run folder keeps of a validation, if it is the best."""
    if programs.task.kind.of_pixels:
        return CasesToWrite(validation.predictions, functools.partial(_cases, programs, data, validation.variables))
    dataset = data.validation.dataset
    return Predictions(dataset.labels, validation.predictions, dataset.ids)


def _cases(programs: Programs, data: DeviceData, variables: dict, numbers: np.ndarray, scores: np.ndarray) -> Cases:
    """Predict these validation examples once more, on one device."""
    task, cache = programs.task, data.cache
    stored = data.validation.dataset.images(numbers)
    images, truth = split_planes(stored, task.target_planes)
    return Cases(
        ids=data.validation.dataset.ids[numbers],
        scores=scores,
        columns=np.array(task.kind.kept_names),
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

    noise, has_local_steps = replicas.first_replica(trainer.state.noise), bool(np.any(metrics.get("local", 0)))
    last_step, num_steps = trainer.step - 1, len(metrics["loss"])
    learning_rate = metrics["rate"][-1] if schedule.scale_invariant else schedule.learning_rate_at(last_step)
    examples_seen = schedule.examples_before(trainer.step)
    examples_before = schedule.examples_before(trainer.step - num_steps)
    times = timings(clock, seconds_before, num_steps, examples_seen - examples_before)
    hardware = Hardware.here()
    row = {
        "step": trainer.step,
        "outer": -(-trainer.step // trainer.inner_steps),
        "examples_seen": examples_seen,
        "epoch": examples_seen / schedule.examples_per_epoch,
        "global_batch_size": schedule.batch_size_at(last_step),
        "learning_rate": learning_rate * trainer.learning_rate_scale,
        "train_loss": mean("loss"),
        **{f"train_{name}": mean(name) for name in programs.task.kind.metric_names},
        "grad_norm": metrics["grad_norm"][-1],
        "skipped_steps": int((~is_applied).sum()),
        "noise_scale": None if has_local_steps else noise_scale.noise_scale(noise),  # local steps measure none
        "bytes_sent": programs.bytes_sent_per_step(hardware.num_devices, metrics),
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
