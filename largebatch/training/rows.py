"""The rows of metrics.jsonl: what training, validation and the clock have measured."""

import numpy as np

from largebatch.hardware.chips import Hardware
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.hosts.watch import HostWatch
from largebatch.optim import noise_scale
from largebatch.runs.summary import timings
from largebatch.training.costs import bytes_sent_per_update, flops_utilisation
from largebatch.training.trainer import Trainer

OF_CLASSIFICATION = ("train_accuracy", "val_accuracy", "val_accuracy_top5")  # None where another task is trained


def metrics_row(
    experiment, trainer: Trainer, validation, watch: HostWatch, clock: Clock, seconds_before: dict[str, float]
) -> dict:
    """The row of metrics.jsonl for the outer loop that has just ended; on every host together.

    Args:
      experiment: an experiment.Experiment.
      validation: its experiment.Validation of this moment.
      seconds_before: `clock.seconds` when that outer loop began.
    """
    schedule, programs, metrics = trainer.schedule, experiment.programs, trainer.metrics_of_outer_loop()
    is_applied = metrics["nonfinite"] == 0
    # With local steps the device that reports may have had no example of an update, and then has no loss of it.
    is_known = is_applied & np.isfinite(metrics["loss"])

    def mean(name: str) -> float | None:
        return metrics[name][is_known].mean() if is_known.any() else None

    last_update = trainer.step - 1
    learning_rate = metrics["rate"][-1] if schedule.scale_invariant else schedule.learning_rate_at(last_update)
    examples_seen = schedule.examples_before(trainer.step)
    examples_before = schedule.examples_before(trainer.step - trainer.updates_in_outer)
    times = timings(clock, seconds_before, trainer.updates_in_outer, examples_seen - examples_before)
    hardware = Hardware.here(experiment.setup.num_devices)
    row = {
        "step": trainer.step,
        "outer": -(-trainer.step // experiment.setup.config.train.inner_steps),
        "examples_seen": examples_seen,
        "epoch": examples_seen / experiment.setup.num_examples,
        "global_batch_size": schedule.batch_size_at(last_update),
        "learning_rate": learning_rate * trainer.learning_rate_scale,
        "train_loss": mean("loss"),
        **{f"train_{name}": mean(name) for name in experiment.setup.program.task.metric_names},
        "grad_norm": metrics["grad_norm"][-1],
        "skipped_updates": int((~is_applied).sum()),
        "noise_scale": measured_noise_scale(trainer, metrics),
        "bytes_sent": bytes_sent_per_update(
            experiment.setup.num_devices, programs.allreduce_bytes, programs.sync_bytes, metrics
        ),
        "val_score": validation.scores.score,
        **validation.scores.row_fields(),
        **validation.other_scores,
        **times,
        "mfu": flops_utilisation(experiment.flops_per_image, times["images_per_sec"], hardware),
        **watch.row_fields(),
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
    """The noise scale after an outer loop; local steps measure none."""
    if "local" in metrics and metrics["local"].any():
        return None
    return noise_scale.noise_scale(replicas.first_replica(trainer.state.noise))
