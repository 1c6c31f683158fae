"""The story of a run: config -> experiment -> update, validate, record, checkpoint.

python train.py                                                     synthetic images, no download
python train.py --config configs/eurosat.py --workdir runs/eurosat  the real job
python train.py --config configs/eurosat.py --config.optimizer.name sgd --config.batch.size 1024
"""

import logging
import secrets
import time

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict

import model as models
from experiment import Experiment, ProgramCache, Validation, prepare
from largebatch import cli
from largebatch.cache.cache import Cache
from largebatch.config.fields import target_of
from largebatch.data import batching
from largebatch.errors import UserError, printable
from largebatch.hosts import collectives, preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.hosts.watch import HostWatch
from largebatch.optim import noise_scale, schedule_text, traces
from largebatch.optim.batch_sizes import follows_devices, read_trace
from largebatch.runs.display import Reporter
from largebatch.runs.ending import Diverged, recorded_end, roll_back
from largebatch.runs.folder import RunFolder
from largebatch.runs.opening import open_run
from largebatch.runs.progress import RunDescription, RunProgress
from largebatch.runs.provenance import code_sha256, git_commit, versions
from largebatch.runs.summary import empty_summary
from largebatch.tasks.kinds import KINDS
from largebatch.training.rows import metrics_row
from largebatch.training.setup import Setup
from largebatch.training.state import TrainState, params_sha256
from largebatch.training.trainer import NonFinite, Trainer, TrainerOptions

log = logging.getLogger("largebatch")

SHOWN_CLASSES = 10  # in the lines before the first update


def train_and_evaluate(
    config: config_dict.ConfigDict,
    workdir: str,
    *,
    profile: bool = False,
    shared: ProgramCache | None = None,
    report: Reporter | None = None,
) -> dict:
    """Trains by `config` in the run folder `workdir`, goes on where a run there stopped, returns its summary.

    Args:
      profile: write a jax.profiler trace of a few updates to the run folder.
      shared: data and compiled programs, where several runs of this process share them.
      report: what is told of the run as it goes; may end it by raising ending.Pruned from `row`.
    Raises:
      UserError: bad input. Where it is found before the first update, no run is written.
      Diverged: a loss is not finite; the summary says so.
      ending.Pruned: `report` ended the run.
      preemption.Stopped: a signal came; all is saved, and the same call goes on from there.
    """
    clock = Clock()
    config, plain_config = cli.start(config, models.MODELS, lambda: RunFolder(workdir).read("config.json"))
    run, ended = open_run(plain_config, workdir)
    if ended and ended["status"] == "diverged":
        raise Diverged(f"{workdir} is a run of this config that diverged; change the config and give a new folder")
    if ended:  # done or pruned
        log.info("%s is a finished run of this config; nothing to do", workdir)
        return ended
    with run:
        with collectives.named_collective_errors():
            experiment, state = prepare(config, clock, shared or ProgramCache())
            trainer = make_trainer(experiment, state, clock, str(run.path / "profile") if profile else None)
            del state  # donated at the first update
            progress = RunProgress(run, trainer, clock, describe_run(experiment, plain_config))
            preemption.training_begins()
            progress.resume()
            take_up_batch_sizes(experiment.setup, trainer, progress)
        report = report or Reporter(KINDS[config.task.name], enabled=collectives.is_primary())
        num_updates = experiment.setup.schedule.num_updates
        report.start(num_updates, trainer.schedule_step, headline(experiment, clock))
        with recorded_end(progress), report:
            run_outer_loops(experiment, trainer, progress, report, clock)
            params = replicas.first_replica(trainer.mean_state().params)
            progress.summary["params_sha256"] = params_sha256(params)
        report.results(progress.summary, str(workdir))
    return progress.summary


def run_outer_loops(
    experiment: Experiment, trainer: Trainer, progress: RunProgress, report: Reporter, clock: Clock
) -> None:
    """Trains and validates until the last update or the target; the run is saved on the way.

    Raises:
      Diverged: a loss or gradient is not finite, and the config does not allow to go on.
      preemption.Stopped: a signal came.
    """
    config, watch = experiment.setup.config, HostWatch()
    while not trainer.done and not progress.reached_target:
        if config.batch.auto and trainer.at_validation:
            grow_batch(experiment.setup, trainer)
        try:
            for call in trainer.finish_outer_loop():
                watch.after_call(call.seconds)
                report.at(trainer.schedule_step, call.examples, call.seconds, trainer.examples_left)
                progress.note_training()
                if not trainer.at_validation:
                    progress.save_if_due()
            validation = validate(experiment, trainer, clock)
        except NonFinite as bad:
            recover(experiment, trainer, progress, bad)
        else:
            row = metrics_row(experiment, trainer, validation, watch, clock, progress.seconds_before)
            outcome = experiment.outcome(validation)
            is_best = progress.record(row, outcome)
            del validation, outcome  # which are on the devices
            is_last = trainer.done or progress.reached_target
            if is_best or is_last or row["outer"] % config.checkpoint.every_outer == 0:
                progress.save(after_validation=True)
            last_outer = -(-trainer.schedule.num_updates // config.train.inner_steps)
            report.row(row, row["outer"] if is_last else last_outer)
        if not trainer.done:
            trainer.stop_if_asked()


def validate(experiment: Experiment, trainer: Trainer, clock: Clock) -> Validation:
    """Scores the parameters as they are now on all validation examples.

    Raises:
      NonFinite: the validation loss is not finite.
    """
    with clock.measure("evaluation"):
        validation = experiment.validate(trainer.mean_state())
    if not np.isfinite(validation.scores.loss):
        raise trainer.nonfinite_validation(validation.scores.loss)
    return validation


def recover(experiment: Experiment, trainer: Trainer, progress: RunProgress, bad: NonFinite) -> None:
    """Answers a loss or gradient that is not finite: the run ends, or with train.on_nonfinite = rollback goes back.

    It goes back to the last validation that was saved, with a smaller learning rate.

    Raises:
      Diverged: the run ends, for the config does not say rollback, or it was rolled back train.max_nonfinite times.
    """
    reason = f"{bad}; {experiment.locate_nonfinite(trainer.state, bad.update)}"
    if experiment.setup.config.train.on_nonfinite != "rollback":
        raise Diverged(f"diverged: {reason}") from bad
    roll_back(progress, bad.step, reason)
    take_up_batch_sizes(experiment.setup, trainer, progress)


# ---- what a run is made of --------------------------------------------------------------------------


def make_trainer(experiment: Experiment, state: TrainState, clock: Clock, profile_dir: str | None) -> Trainer:
    """The trainer of an experiment.

    Args:
      state: before the first update; its buffers are donated to the first call.
      profile_dir: where a profile of a few updates is written. All hosts profile if host 0 does.
    """
    profiles = bool(collectives.from_primary(np.int32(bool(profile_dir))))
    setup = experiment.setup
    options = TrainerOptions(
        inner_steps=setup.config.train.inner_steps,
        max_nonfinite=setup.program.max_nonfinite,
        inputs_length=setup.program.inputs_length,
        first_local_step=setup.first_local_step,
        sync=setup.sync,
        profile_dir=(profile_dir or "profile") if profiles else None,
    )
    return Trainer(state, experiment.programs, experiment.data.train, setup.schedule, clock, options)


def grow_batch(setup: Setup, trainer: Trainer) -> None:
    """Between two outer loops: goes to the next larger batch size if the noise scale has reached it (batch.auto).

    This depends on nothing but the state, so a run that is resumed here grows as it would have without the stop.
    """
    if trainer.step == 0:
        return
    noise = noise_scale.noise_scale(replicas.first_replica(trainer.state.noise)) or 0.0
    current = trainer.schedule.batch_size_at(trainer.step - 1)
    larger = [size for size in setup.batch_sizes if current < size <= noise]
    if larger:
        batch_sizes = trainer.schedule.batch_sizes.changed_from(trainer.step, larger[0])
        trainer.schedule = setup.with_batch_sizes(batch_sizes).schedule


def take_up_batch_sizes(setup: Setup, trainer: Trainer, progress: RunProgress) -> None:
    """Gives the trainer the batch sizes of the checkpoint that was taken up, where only training finds them.

    With batch.auto they have grown up to there; with batch.per_device_batch_size the next one follows the devices.
    """
    batch_sizes = progress.batch_sizes
    if batch_sizes is None:
        return
    batch_size = setup.schedule.batch_size_at(0)
    if follows_devices(setup.config.batch) and batch_sizes.value_at(np.int64(trainer.step)) != batch_size:
        batch_sizes = batch_sizes.changed_from(trainer.step, batch_size)
    trainer.schedule = setup.with_batch_sizes(batch_sizes).schedule


# ---- what is written and shown ----------------------------------------------------------------------


def describe_run(experiment: Experiment, plain_config: dict) -> RunDescription:
    """What checkpoints and summary say of a run before its first update.

    Raises:
      UserError: hosts hold different traces.
    """
    data = {
        **experiment.cache.identity(),
        "order_version": batching.ORDER_VERSION,
        "network_version": models.NETWORK_VERSION,
        "virtual_shards": experiment.setup.program.sharding.num_shards,
    }
    trace = plain_config["batch"]["trace"]
    if isinstance(trace, str):
        data["trace"] = traces.digest(trace)
        if len(set(collectives.gather_text(data["trace"]))) > 1:
            raise UserError(f"batch.trace: {trace} is another file on some hosts")
    summary = {
        **empty_summary(),
        "devices": experiment.setup.num_devices,
        "hosts": jax.process_count(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "params": experiment.num_params,
        "flops_per_image": experiment.flops_per_image,
        "global_batch_size": experiment.setup.schedule.batch_size_at(0),
        "micro_batch_size": experiment.setup.micro_batch_size,
        "versions": versions(),
        "git_commit": git_commit(),
        "code_sha256": code_sha256(),
        "score": experiment.setup.program.task.kind.score_column,
        "target_accuracy": plain_config["train"]["target_accuracy"],
        "target_score": target_of(experiment.setup.config.train),
    }
    return RunDescription(plain_config, data, summary)


def headline(experiment: Experiment, clock: Clock) -> str:
    """Return four lines that say what is about to run."""
    setup, cache = experiment.setup, experiment.cache
    batch_sizes = setup.schedule.batch_sizes.first(setup.schedule.num_updates).values
    largest_shares = -(-batch_sizes // setup.num_devices)
    return (
        f"{experiment.num_params:,} parameters; {setup.num_devices} {jax.default_backend()} devices on "
        f"{jax.process_count()} hosts, computing in {setup.config.model.dtype}; "
        f"{cache.count('train'):,} training images as {setup.num_examples:,} views, "
        f"{cache.count('val'):,} validation images, decoded {cache.manifest['built'][:10]}\n"
        f"{what_is_learned(cache)}\n"
        f"batch {schedule_text.format_range(batch_sizes)} = {schedule_text.format_range(largest_shares)} a device "
        f"in micro-batches of up to {setup.micro_batch_size}{how_batches_change(setup.config)}; "
        f"data {clock.seconds['data']:.1f} s, compiling {clock.seconds['compile']:.1f} s\n"
        f"{setup.config.optimizer.name}, {schedule_text.describe(setup.schedule)}"
    )


def what_is_learned(cache: Cache) -> str:
    """Return the first classes in a line, with the number of training images of each; of masks those of pixels."""
    targets = cache.targets
    texts = list(map(printable, targets.classes or cache.class_names))
    if not targets.planes:
        texts = [f"{text} {count:,}" for text, count in zip(texts, cache.class_counts, strict=True)]
    more = f" and {len(texts) - SHOWN_CLASSES} more" if len(texts) > SHOWN_CLASSES else ""
    classes = f"{len(texts)} classes: {', '.join(texts[:SHOWN_CLASSES])}{more}"
    if not targets.planes:
        return f"training images of {classes}"
    masks = [f"masks of {classes}"] if targets.classes else []
    return " and ".join(["depths"] * targets.has_depth + masks)


def how_batches_change(config) -> str:
    """How the batch changes and when devices synchronise, where either is not the plain way."""
    batch, sync, text = config.batch, config.sync, ""
    if batch.trace is not None:
        text += f", from {read_trace(batch).text}"
    if follows_devices(batch):
        text += ", following the devices"
    if batch.auto:
        text += f", growing with the noise scale up to {batch.max_size}"
    if sync.mode != "every_step":
        first = f" from update {sync.start_step}" if sync.start_step else ""
        text += f"; local steps{first}, averaged every {sync.every} updates"
    return text


# ---- the command ------------------------------------------------------------------------------------


def new_workdir(config: config_dict.ConfigDict) -> str:
    """A run folder for a run that was given none: the same on all hosts, another for every run."""
    cli.start(config, models.MODELS)
    suffix = secrets.token_hex(4)  # for runs that start in the same second
    return collectives.gather_text(f"runs/{config.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}-{suffix}")[0]


def main(config: config_dict.ConfigDict) -> int:
    """Trains into --workdir; returns the exit code."""
    if flags.FLAGS.doctor or flags.FLAGS.compile_for:
        import examine  # few runs need it

        return examine.run(config, here=flags.FLAGS.doctor, target_name=flags.FLAGS.compile_for)
    preemption.answer_signals()
    workdir = flags.FLAGS.workdir or new_workdir(config)
    try:
        train_and_evaluate(config, workdir, profile=flags.FLAGS.profile)
    except Diverged as error:
        log.error("%s", error)
        return cli.EXIT_DIVERGED
    except preemption.Stopped as stopped:
        log.info("%s; give the same command with --workdir %s to go on", stopped, workdir)
        return stopped.exit_code
    return 0


def define_flags() -> None:
    """Defines the flags of this script."""
    cli.path_flag("workdir", None, "Run folder; default runs/NAME-DATE-TIME-XXXXXXXX, the end at random.")
    flags.DEFINE_bool("doctor", False, "Check this config on this machine before a long run; trains nothing.")
    flags.DEFINE_string(
        "compile_for", None, "Compile for devices that are not here, as v3:4x4 or h200:8; trains nothing."
    )
    flags.DEFINE_bool("profile", False, "Write a jax.profiler trace of a few updates to WORKDIR/profile.")


if __name__ == "__main__":
    define_flags()
    cli.run_script(main, models.MODELS)
