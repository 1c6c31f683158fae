"""Train and evaluate an image model.

python train.py                                                     synthetic images, no download
python train.py --config configs/eurosat.py --workdir runs/eurosat  the real job
python train.py --config configs/eurosat.py --config.optimizer.name sgd --config.batch.size 1024
python train.py --workdir runs/eurosat                              the rest of that run, by its own config

`run_loop` is the outer loop. `Trainer.run` calls the compiled inner loop, whose step is in training/step.py.
"""

import logging
import secrets
import sys
import time

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict

import model as models
from build import ProgramCache, prepare
from largebatch import cli
from largebatch.data import batching
from largebatch.data.cache import describe_targets
from largebatch.data.placement import DeviceData
from largebatch.data.streaming import load_inputs
from largebatch.hosts import collectives, preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim import noise_scale, traces
from largebatch.optim.schedule_text import describe_batches, describe_schedule, format_range
from largebatch.runs.display import Reporter
from largebatch.runs.folder import RunFolder
from largebatch.runs.lifecycle import Diverged, open_run, recorded_end, roll_back
from largebatch.runs.progress import RunProgress
from largebatch.runs.summary import code_sha256, empty_summary, git_commit, versions
from largebatch.tasks.kinds import KINDS
from largebatch.training.costs import training_costs
from largebatch.training.local_sgd import Sync
from largebatch.training.loss import make_normalise
from largebatch.training.state import count_params, params_sha256
from largebatch.training.trainer import NonFinite, Trainer, locate_nonfinite
from largebatch.training.validation import metrics_row, outcome_of, validate
from largebatch.util import UserError
from plan import RunPlan

log = logging.getLogger("largebatch")


def train_and_evaluate(
    config: config_dict.ConfigDict,
    workdir: str,
    *,
    profile: bool = False,
    shared: ProgramCache | None = None,
    report: Reporter | None = None,
) -> dict:
    """Train and evaluate an image model in the run folder `workdir`, or resume its run; return the summary.

    Args:
      profile: write a jax.profiler trace of a few steps to the run folder.
      shared: data and compiled programs, where several runs of this process share them.
      report: is told of the run's progress; may end it by raising lifecycle.Pruned from `row`.
    Raises:
      UserError: bad input. Where it is found before the first step, no run is written.
      Diverged: a loss is not finite; the summary says so.
      lifecycle.Pruned: `report` ended the run.
      preemption.Stopped: a signal came; all is saved, and the same call resumes from there.
    """
    clock = Clock()
    config, plain_config = cli.start(config, models.MODELS, lambda: RunFolder(workdir).read_config())
    run, ended = open_run(plain_config, workdir)
    if ended and ended["status"] == "diverged":
        raise Diverged(f"{workdir} is a run of this config that diverged; change the config and give a new folder")
    if ended:  # done or pruned
        log.info("%s is a finished run of this config; nothing to do", workdir)
        return ended
    with run:
        with collectives.named_collective_errors():
            plan, data, programs, state = prepare(config, clock, shared or ProgramCache())
            trainer = Trainer(
                state,
                programs,
                data.train,
                plan.schedule,
                clock,
                inner_steps=plan.config.train.inner_steps,
                max_nonfinite=plan.max_nonfinite,
                inputs_length=plan.inputs_length,
                first_local_step=plan.first_local_step,
                sync=Sync.from_config(plan.config.sync),
                profile_dir=str(run.path / "profile") if profile else None,
            )
            del state  # donated at the first step
            about_data, summary = describe_run(plan, data, trainer, plain_config)
            progress = RunProgress(run, trainer, clock, plain_config, about_data, summary)
            preemption.training_begins()  # from here on a first signal saves before it ends the process
            preparation = f"data {clock.seconds['data']:.1f} s, compiling {clock.seconds['compile']:.1f} s"
            progress.resume()  # adds the seconds of the processes before to the clock
            restore_batch_sizes(plan, trainer, progress)
        report = report or Reporter(KINDS[config.task.name], enabled=collectives.is_primary())
        report.start(plan.schedule.num_steps, trainer.schedule_step, headline(plan, data, trainer, preparation))
        with recorded_end(progress), report:
            run_loop(plan, data, trainer, progress, report, clock)
            params = replicas.first_replica(trainer.mean_state().params)
            progress.summary["params_sha256"] = params_sha256(params)
        report.results(progress.summary, str(workdir))
    return progress.summary


def run_loop(
    plan: RunPlan, data: DeviceData, trainer: Trainer, progress: RunProgress, report: Reporter, clock: Clock
) -> None:
    """Train, validate and save until the last step or the target.

    Raises:
      Diverged, lifecycle.Pruned, preemption.Stopped: see `train_and_evaluate`.
    """
    flops_per_image = training_costs(plan.network, plan.image_shape).flops
    while not trainer.done and not progress.reached_target:
        if plan.config.batch.auto and trainer.at_validation:
            grow_batch(plan, trainer)
        try:
            end = trainer.next_validation
            # A call takes about 2 s at most, so that signals and saves are not kept waiting.
            while trainer.step < end and not trainer.done:
                examples, seconds = trainer.run(end - trainer.step)
                report.at(trainer.schedule_step, examples, seconds, trainer.examples_left)
                if not trainer.at_validation:
                    progress.save_if_due()
                    trainer.stop_if_asked()
            with clock.measure("evaluation"):
                validation = validate(trainer.programs, data, trainer.mean_state())
            if not np.isfinite(validation.scores.loss):
                raise trainer.nonfinite_validation(validation.scores.loss)
        except NonFinite as bad:
            recover(plan, data, trainer, progress, bad)
        else:
            row = metrics_row(trainer, validation, flops_per_image, clock, progress.seconds_before)
            is_best = progress.record(row, outcome_of(validation, trainer.programs, data))
            del validation  # frees its memory on the devices
            is_last = trainer.done or progress.reached_target
            if is_best or is_last or row["outer"] % plan.config.checkpoint.every_outer == 0:
                progress.save(after_validation=True)
            last_outer = -(-trainer.schedule.num_steps // trainer.inner_steps)
            report.row(row, row["outer"] if is_last else last_outer)
        if not trainer.done:
            trainer.stop_if_asked()


def recover(plan: RunPlan, data: DeviceData, trainer: Trainer, progress: RunProgress, bad: NonFinite) -> None:
    """Handle a non-finite loss or gradient: roll back to the last saved validation, or raise Diverged.

    Raises:
      Diverged: the config does not say rollback, or the run was rolled back train.max_nonfinite times.
    """
    seed, inputs = replicas.first_replica(trainer.state.seed), jax.tree.map(np.atleast_1d, bad.inputs)
    arrays = load_inputs(data.train, plan.sharding, seed, inputs).arrays
    normalise = make_normalise(plan.network, plan.image_shape, plan.data.mean, plan.data.std)
    step = trainer.programs.step
    place = locate_nonfinite(plan.network, normalise, step, trainer.state, arrays, bad.inputs)
    reason = f"{bad}; {place}"
    if plan.config.train.on_nonfinite != "rollback":
        raise Diverged(f"diverged: {reason}") from bad
    roll_back(progress, bad.step, reason)
    restore_batch_sizes(plan, trainer, progress)


# ---- batches that change ------------------------------------------------------------------------------


def grow_batch(plan: RunPlan, trainer: Trainer) -> None:
    """Switch to the next larger batch size if the noise scale has reached it (batch.auto), at a validation.

    Only the state decides, so a resumed run grows as an uninterrupted one does.
    """
    if trainer.step == 0:
        return
    noise = noise_scale.noise_scale(replicas.first_replica(trainer.state.noise)) or 0.0
    current = trainer.schedule.batch_size_at(trainer.step - 1)
    larger = [size for size in plan.batch_sizes if current < size <= noise]
    if larger:
        batch_sizes = trainer.schedule.batch_sizes.changed_from(trainer.step, larger[0])
        trainer.schedule = plan.schedule.with_batch_sizes(batch_sizes)


def restore_batch_sizes(plan: RunPlan, trainer: Trainer, progress: RunProgress) -> None:
    """Give the trainer the batch sizes of the restored checkpoint, where they are found in training."""
    if progress.batch_sizes is not None:
        batch_sizes = plan.schedule.batch_sizes.restored(progress.batch_sizes, trainer.step)
        trainer.schedule = plan.schedule.with_batch_sizes(batch_sizes)


# ---- what is written and shown ----------------------------------------------------------------------


def describe_run(plan: RunPlan, data: DeviceData, trainer: Trainer, plain_config: dict) -> tuple[dict, dict]:
    """Return the description of the data, for checkpoints, and the summary before the first step.

    Raises:
      UserError: hosts hold different traces.
    """
    about_data = {
        **data.cache.identity(),
        "order_version": batching.ORDER_VERSION,
        "network_version": models.NETWORK_VERSION,
        "virtual_shards": plan.sharding.num_shards,
    }
    trace = plain_config["batch"]["trace"]
    if isinstance(trace, str):
        about_data["trace"] = traces.digest(trace)
        if len(set(collectives.gather_text(about_data["trace"]))) > 1:
            raise UserError(f"batch.trace: {trace} is another file on some hosts")
    summary = {
        **empty_summary(),
        "devices": plan.num_devices,
        "hosts": jax.process_count(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "params": count_params(replicas.first_replica(trainer.state.params)),
        "flops_per_image": training_costs(plan.network, plan.image_shape).flops,
        "global_batch_size": plan.schedule.batch_size_at(0),
        "micro_batch_size": plan.micro_batch_size,
        "versions": versions(),
        "git_commit": git_commit(),
        "code_sha256": code_sha256(),
        "score": plan.task.kind.score_column,
        "target_accuracy": plain_config["train"]["target_accuracy"],
        "target_score": plan.config.train.target,
    }
    return about_data, summary


def headline(plan: RunPlan, data: DeviceData, trainer: Trainer, preparation: str) -> str:
    """Return the lines that say what is about to run, and how long its `preparation` took."""
    config, cache, counts = plan.config, data.cache, plan.data.layout.counts
    num_params = count_params(replicas.first_replica(trainer.state.params))
    batch_sizes = plan.schedule.batch_sizes.first(plan.schedule.num_steps).values
    largest_shares, changes = -(-batch_sizes // plan.num_devices), describe_batches(config.batch, config.sync)
    return (
        f"{num_params:,} parameters; {plan.num_devices} {jax.default_backend()} devices on "
        f"{jax.process_count()} hosts, computing in {config.model.dtype}; "
        f"{counts['train']:,} training images as {plan.num_examples:,} views, "
        f"{counts['val']:,} validation images, decoded {cache.manifest['built'][:10]}\n"
        f"{describe_targets(cache.split('train'))}\n"
        f"batch {format_range(batch_sizes)} = {format_range(largest_shares)} a device "
        f"in micro-batches of up to {plan.micro_batch_size}{changes}; {preparation}\n"
        f"{config.optimizer.name}, {describe_schedule(plan.schedule)}"
    )


# ---- the command ------------------------------------------------------------------------------------


def new_workdir(config: config_dict.ConfigDict) -> str:
    """Return a path for a run folder that was not given: equal on all hosts, different for every run."""
    cli.start(config, models.MODELS)
    suffix = secrets.token_hex(4)  # for runs that start in the same second
    return collectives.gather_text(f"runs/{config.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}-{suffix}")[0]


def main(config: config_dict.ConfigDict) -> int:
    """Train into --workdir; return the exit code."""
    given = flags.FLAGS
    if given.doctor or given.compile_for or given.show_batches:
        import examine  # few runs need it

        if given.show_batches:
            return examine.show_batches(config)
        return examine.run(config, here=given.doctor, target_name=given.compile_for)
    preemption.answer_signals()
    if given.workdir and not any(argument.startswith("--config") for argument in sys.argv[1:]):
        config = config_dict.ConfigDict(RunFolder(given.workdir).read_config() or config)
    workdir = given.workdir or new_workdir(config)
    try:
        train_and_evaluate(config, workdir, profile=given.profile)
    except Diverged as error:
        log.error("%s", error)
        return cli.EXIT_DIVERGED
    except preemption.Stopped as stopped:
        log.info("%s; python train.py --workdir %s resumes it", stopped, workdir)
        return stopped.exit_code
    return 0


def define_flags() -> None:
    """Define the flags of this script."""
    cli.path_flag("workdir", None, "Run folder; default runs/NAME-DATE-TIME-XXXXXXXX, the end at random.")
    flags.DEFINE_bool("doctor", False, "Check this config on this machine before a long run; trains nothing.")
    flags.DEFINE_string(
        "compile_for", None, "Compile for devices that are not here, as v3:4x4 or h200:8; trains nothing."
    )
    flags.DEFINE_bool("show_batches", False, "Show how large the batches of a run are; trains nothing.")
    flags.DEFINE_bool("profile", False, "Write a jax.profiler trace of a few steps to WORKDIR/profile.")


if __name__ == "__main__":
    define_flags()
    cli.run_script(main, models.MODELS)
