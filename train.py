"""The story of a run: config -> data -> state -> outer loop.

python train.py                                                     synthetic images, no download
python train.py --config configs/eurosat.py --workdir runs/eurosat  the real job
python train.py --config configs/eurosat.py --config.optimizer.name sgd --config.batch.size 1024
"""

import logging
import secrets
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict

import augment
import model as models
from experiment import (
    Programs,
    Shared,
    make_plan,
    make_schedule,
    make_sync,
    micro_batch_size,
    optimizer_numbers,
    plan_length,
    possible_batch_sizes,
    tolerated_nonfinite,
)
from largebatch import cli
from largebatch.data import batching
from largebatch.data.cache import Cache
from largebatch.errors import UserError
from largebatch.hosts import collectives, preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim import noise_scale, schedules, traces
from largebatch.optim.batch_sizes import read_trace
from largebatch.optim.piecewise import PiecewiseConstant
from largebatch.runs import checkpoints
from largebatch.runs.display import Reporter
from largebatch.runs.progress import Diverged, Progress, open_run
from largebatch.runs.provenance import code_sha256, git_commit, versions
from largebatch.runs.summary import add_to_summary, empty_summary, timings
from largebatch.training.costs import bytes_sent, training_costs
from largebatch.training.evaluation import Scores, in_split_order, score
from largebatch.training.nonfinite import make_layer_outputs
from largebatch.training.state import TrainState, count_params, params_sha256
from largebatch.training.step import make_count_nonfinite
from largebatch.training.trainer import Loops, NonFinite, Trainer

log = logging.getLogger("largebatch")


class Job(NamedTuple):
    """What does not change while a run trains; `schedule` is as it starts, the trainer's may grow."""

    cache: Cache
    placed: augment.Placed
    schedule: schedules.Schedule
    micro_batch_size: int
    num_params: int
    flops_per_image: float
    programs: Programs


def prepare(config: config_dict.ConfigDict, clock: Clock, shared: Shared) -> tuple[Job, TrainState]:
    """Places the data, compiles the programs, makes the state; times both sections."""
    with clock.measure("data"):
        cache, placed = shared.data(config)
    schedule = make_schedule(config, cache.count("train"))
    with clock.measure("compile"):
        programs = shared.programs(config)
        numbers, kernel = optimizer_numbers(config), shared.whitening_kernel(config)
        state = replicas.replicate(programs.init(np.uint32(config.seed), numbers, kernel), shared.local_devices)
        replicas.check_replicas(state.params, "initial parameters")
    job = Job(
        cache=cache,
        placed=placed,
        schedule=schedule,
        micro_batch_size=micro_batch_size(config, cache.count("train"), placed.deal.num_devices),
        num_params=count_params(replicas.first_replica(state.params)),
        flops_per_image=training_costs(programs.network, cache.image_shape).flops,
        programs=programs,
    )
    return job, state


def make_trainer(job: Job, state: TrainState, config, clock: Clock, profile_dir: str | None) -> Trainer:
    """What runs the compiled inner loop; all hosts profile if host 0 does."""
    profiles = bool(collectives.from_primary(np.int32(bool(profile_dir))))
    programs, sync = job.programs, make_sync(config)
    start_step = np.inf if config.sync.mode == "every_step" else config.sync.start_step

    def local_loop(*arguments):
        return programs.local_loop(*arguments, sync)

    return Trainer(
        state,
        Loops(programs.inner_loop, local_loop if programs.local_loop else None, programs.average, start_step),
        programs.metric_names,
        job.placed.train,
        job.schedule,
        lambda schedule, first: make_plan(job.placed.deal, schedule, plan_length(config), first),
        clock,
        inner_steps=config.train.inner_steps,
        max_nonfinite=tolerated_nonfinite(config),
        profile_dir=(profile_dir or "profile") if profiles else None,
    )


def make_progress(job: Job, config, trainer: Trainer, run, clock: Clock, plain: dict) -> Progress:
    """What saves the run and takes it up again.

    Raises:
      UserError: hosts hold different traces.
    """
    data, trace = job.cache.identity() | {"order_version": batching.ORDER_VERSION}, config.batch.trace
    if isinstance(trace, str):
        data["trace"] = traces.digest(trace)
        if len(set(collectives.gather_text(data["trace"]))) > 1:
            raise UserError(f"batch.trace: {trace} is another file on some hosts")

    def reschedule(starts, values):
        trainer.schedule = make_schedule(config, job.cache.count("train"), PiecewiseConstant(starts, values))

    summary = describe(job) | {"target_accuracy": config.train.target_accuracy}
    return Progress(run, trainer, clock, summary, plain, data, reschedule)


def grow_batch(job: Job, config, trainer: Trainer) -> None:
    """Between two outer loops: doubles the batch, within its limits, while the noise scale is larger than that.

    Whatever was decided here before a restart is decided again, and the same.
    """
    count, starts, values = job.cache.count("train"), *trainer.schedule.batch_sizes
    before, now = starts < trainer.step, int(trainer.schedule.batch_sizes.at(np.int64(max(trainer.step - 1, 0))))
    noise = noise_scale.noise_scale(replicas.first_replica(trainer.state.noise)) or 0.0
    larger = [size for size in possible_batch_sizes(config, count) if now < size <= noise]
    if trainer.step and larger:
        grown = PiecewiseConstant(np.append(starts[before], trainer.step), np.append(values[before], larger[0]))
        trainer.schedule = make_schedule(config, count, grown)


class Validation(NamedTuple):
    """Scores and logits [N, num_classes] of all validation examples; accuracies otherwise computed, by name."""

    scores: Scores
    logits: np.ndarray
    others: dict[str, float]


def validate_model(job: Job, state: TrainState) -> Validation:
    """Validates the parameters, and beside them what the config asks for; on every host.

    Raises:
      RuntimeError: the replicas no longer hold the same parameters.
    """
    labels, programs = job.placed.val_labels, job.programs

    def logits_of(program, variables):
        return in_split_order(np.asarray(program(variables, job.placed.val_images)), len(labels))

    logits, others = logits_of(programs.predict, state.variables), {}
    if programs.predict_views:
        others["val_accuracy_views"] = programs.predict_views, state.variables
    if state.ema is not None:
        others["val_accuracy_ema"] = programs.predict, state.ema_variables
        if programs.predict_views:
            others["val_accuracy_ema_views"] = programs.predict_views, state.ema_variables
    found = {name: score(logits_of(*how), labels).accuracy for name, how in others.items()}
    replicas.check_replicas(state.variables, "parameters")
    return Validation(score(logits, labels), logits, found)


def where_nonfinite(job: Job, trainer: Trainer, place: tuple) -> str:
    """The first layer, from input to output, that is not finite in the update at `place`; in words."""
    manifest, programs = job.cache.manifest, job.programs
    layer_outputs = make_layer_outputs(programs.network, job.cache.image_shape, manifest["mean"], manifest["std"])
    count = make_count_nonfinite(
        layer_outputs, programs.loss_fn, programs.read, job.placed.deal, job.micro_batch_size
    )
    outputs, gradients = count(trainer.state, job.placed.train, *place)
    layers = [name.split(" ", 1)[1] for name in outputs]
    for layer, count in zip(layers, outputs.values(), strict=True):
        if count:
            return f"first in the output of layer {layer}"
    # Gradients run from output to input.
    names = [name for name, count in checkpoints.named_leaves(gradients).items() if count]
    if not names:
        return "no single layer's output or gradient is"
    last = max(names, key=lambda name: layers.index(name.rpartition(".")[0].replace(".", "/")))
    return f"first in the gradient of {last}"


def describe(job: Job) -> dict:
    """What the summary says of a run before its first update."""
    return empty_summary() | {
        "devices": job.placed.deal.num_devices,
        "hosts": jax.process_count(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "params": job.num_params,
        "flops_per_image": job.flops_per_image,
        "global_batch_size": int(job.schedule.batch_sizes.at(np.int64(0))),
        "micro_batch_size": job.micro_batch_size,
        "versions": versions(),
        "git_commit": git_commit(),
        "code_sha256": code_sha256(),
    }


def headline(job: Job, config, clock: Clock) -> str:
    """Three lines that say what is about to run."""
    num_devices = job.placed.deal.num_devices
    sizes = job.schedule.batch_sizes.cut(job.schedule.num_updates).values
    shares = [-(-size // num_devices) for size in sizes]
    return (
        f"{job.num_params:,} parameters; {num_devices} {jax.default_backend()} devices on "
        f"{jax.process_count()} hosts; {job.cache.count('train'):,} training images as "
        f"{job.placed.deal.num_examples:,} views, {job.cache.count('val'):,} validation images\n"
        f"batch {_one_or_range(sizes)} = {_one_or_range(shares)} a device in micro-batches of up to "
        f"{job.micro_batch_size}{_says_how(config)}; data {clock.seconds['data']:.1f} s, "
        f"compiling {clock.seconds['compile']:.1f} s\n"
        f"{config.optimizer.name}, {job.schedule.text}"
    )


def _says_how(config) -> str:
    """How the batch changes and when devices synchronise, where either is not the plain way."""
    batch, sync, said = config.batch, config.sync, ""
    if batch.trace is not None:
        said += f", from {read_trace(batch).text}"
    if batch.auto:
        said += f", growing with the noise scale up to {batch.max_size}"
    if sync.mode != "every_step":
        begin = f" from update {sync.start_step}" if sync.start_step else ""
        said += f"; local steps{begin}, averaged every {sync.every} updates"
    return said


def _one_or_range(values) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def write_row(job: Job, config, trainer: Trainer, progress: Progress, run, report, clock) -> None:
    """Validates and records the outer loop that has just ended.

    Raises:
      NonFinite: the validation loss is not finite.
    """
    with clock.measure("evaluation"):
        validation = validate_model(job, trainer.mean_state())
    scores, schedule = validation.scores, trainer.schedule
    if not np.isfinite(scores.loss):
        raise trainer.nonfinite_validation(scores.loss)
    values = trainer.outer_values()
    applied = values["nonfinite"] == 0
    known = applied & np.isfinite(values["loss"])  # of local steps some may be without
    mean = {name: updates[known].mean() if known.any() else None for name, updates in values.items()}
    num_updates, outer = len(applied), -(-trainer.step // config.train.inner_steps)
    examples_seen, last_update = schedule.examples_before(trainer.step), np.int64(trainer.step - 1)
    rate = values["rate"][-1] if schedule.scale_invariant else float(schedule.rates(last_update))
    row = {
        "step": trainer.step,
        "outer": outer,
        "examples_seen": examples_seen,
        "epoch": examples_seen / job.placed.deal.num_examples,
        "global_batch_size": int(schedule.batch_sizes.at(last_update)),
        "learning_rate": rate * trainer.learning_rate_scale,
        "train_loss": mean["loss"],
        "train_accuracy": mean["accuracy"],
        "grad_norm": values["grad_norm"][-1],
        "skipped_updates": int((~applied).sum()),
        "noise_scale": measured_noise_scale(trainer, values),
        "bytes_sent": bytes_sent(job.placed.deal.num_devices, job.programs.bytes_put_in, values),
        "val_loss": scores.loss,
        "val_accuracy": scores.accuracy,
        "val_examples": scores.num_examples,
    } | validation.others
    if schedule.scale_invariant:
        row |= {"gain": mean["gain"], "scale_invariant_steps": trainer.position}
    if "drift" in values:
        row["replica_drift"] = values["drift"][values["synced"] > 0][-1] if values["synced"].any() else None
    examples = examples_seen - schedule.examples_before(trainer.step - num_updates)
    row |= timings(clock, progress.before, num_updates, examples)
    progress.before = dict(clock.seconds)
    improved = add_to_summary(progress.summary, row)

    def write():
        run.append_row(row)
        if improved:
            run.write_predictions(job.placed.val_labels, validation.logits, job.placed.val_ids)

    collectives.agreed(write, collectives.is_primary())  # a full disk ends all hosts
    last = trainer.done or progress.summary["steps_to_target"] is not None
    if row["skipped_updates"]:
        log.warning("outer loop %d: %d updates skipped, not finite", outer, row["skipped_updates"])
        event = {"step": trainer.step, "updates": row["skipped_updates"]}
        collectives.agreed(lambda: run.log_event("skipped", **event), collectives.is_primary())
    if improved or last or outer % config.checkpoint.every_outer == 0:
        progress.save(at_boundary=True)
    report.row(row, outer if trainer.done else -(-schedule.num_updates // config.train.inner_steps))


def measured_noise_scale(trainer: Trainer, values: dict[str, np.ndarray]) -> float | None:
    """The noise scale after an outer loop; local steps measure none."""
    if "local" in values and values["local"].any():
        return None
    return noise_scale.noise_scale(replicas.first_replica(trainer.state.noise))


def train_and_evaluate(
    config: config_dict.ConfigDict,
    workdir: str,
    profile: bool = False,
    shared: Shared | None = None,
    report: Reporter | None = None,
) -> dict:
    """Trains by `config` in the run folder `workdir`, goes on where a run there stopped, returns its summary.

    Args:
      shared: data and programs, where several runs of this process have them in common.
      report: what is told of the run as it goes; may end it by raising resume.Pruned from `row`.
    Raises:
      UserError: bad input. Where it is found before the first update, no run is written.
      Diverged: a loss is not finite; the summary says so.
      resume.Pruned: `report` ended the run.
      preemption.Stopped: a signal came; all is saved, and the same call goes on from there.
    """
    clock = Clock()
    plain = cli.start(config, models.OPTIONS)
    run, ended = open_run(plain, workdir)
    if ended and ended["status"] == "diverged":
        raise Diverged(f"{workdir} is a run of this config that diverged; change the config and give a new folder")
    if ended:  # done or pruned
        log.info("%s is a finished run of this config; nothing to do", workdir)
        return ended
    with run:
        with collectives.named_collective_errors():
            job, state = prepare(config, clock, shared or Shared())
            trainer = make_trainer(job, state, config, clock, str(run.path / "profile") if profile else None)
            progress = make_progress(job, config, trainer, run, clock, plain)
            summary = progress.summary
            del state  # donated at the first update
            progress.resume()
        report = report or Reporter(enabled=collectives.is_primary())
        report.start(job.schedule.num_updates, trainer.position, headline(job, config, clock))
        with progress.recorded_end(), report:
            run_outer_loops(job, config, trainer, progress, run, report, clock)
            summary["params_sha256"] = params_sha256(replicas.first_replica(trainer.mean_state().params))
        report.results(summary, str(workdir))
    return summary


def run_outer_loops(job, config, trainer, progress, run, report, clock) -> None:
    """Trains and validates until the last update or the target; the run is saved on the way.

    Raises:
      Diverged: a loss or gradient is not finite, and the config does not allow to go on.
      preemption.Stopped: a signal came.
    """
    while not trainer.done and progress.summary["steps_to_target"] is None:
        if config.batch.auto and trainer.at_boundary:
            grow_batch(job, config, trainer)
        examples_before = trainer.schedule.examples_before
        try:
            for updates, seconds in trainer.finish_outer_loop():
                examples = examples_before(trainer.step) - examples_before(trainer.step - updates)
                report.at(trainer.position, examples / seconds)
                if not trainer.at_boundary:
                    progress.save_if_due()
            write_row(job, config, trainer, progress, run, report, clock)
        except NonFinite as bad:
            trouble = f"{bad}; {where_nonfinite(job, trainer, bad.place)}"
            if config.train.on_nonfinite != "rollback":
                raise Diverged(f"diverged: {trouble}") from bad
            progress.roll_back(bad.step, trouble)
        if not trainer.done:
            trainer.stop_if_asked()


def new_workdir(config: config_dict.ConfigDict) -> str:
    """The run folder of a run that was given none: the same on all hosts, and by all chance no other run's."""
    cli.start(config, models.OPTIONS)
    apart = secrets.token_hex(4)  # runs that start in the same second
    return collectives.gather_text(f"runs/{config.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}-{apart}")[0]


def main(config: config_dict.ConfigDict) -> int:
    """Trains into --workdir; returns the exit code."""
    if flags.FLAGS.doctor:
        from largebatch.training import doctor  # which imports this script

        cli.start(config, models.OPTIONS)
        return doctor.main(config)
    preemption.answer_signals()
    workdir = flags.FLAGS.workdir or new_workdir(config)
    try:
        train_and_evaluate(config, workdir, flags.FLAGS.profile)
    except Diverged as error:
        log.error("%s", error)
        return cli.EXIT_DIVERGED
    except preemption.Stopped as stopped:
        log.info("%s; start again with --workdir %s to go on", stopped, workdir)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder; default runs/NAME-DATE-TIME-XXXXXXXX, X by chance.")
    flags.DEFINE_bool("doctor", False, "Check this config on this machine before a long run; trains nothing.")
    flags.DEFINE_bool("profile", False, "Write a jax.profiler trace of a few updates to WORKDIR/profile.")
    cli.run_script(main, models.OPTIONS)
