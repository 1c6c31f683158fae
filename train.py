"""The story of a run: config -> data -> state -> outer loop.

python train.py                                                     synthetic images, no download
python train.py --config configs/eurosat.py --workdir runs/eurosat  the real job
python train.py --config configs/eurosat.py --config.optimizer.name sgd --config.batch.size 1024
"""

import functools
import json
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
from absl import flags
from flax import linen as nn
from ml_collections import config_dict

import augment
import model as models
from largebatch import UserError, batching, checkpoints, devices, display, evaluation, metrics, preemption, resume
from largebatch import cache as caches
from largebatch import config as configs
from largebatch.optimizers import create_optimizer
from largebatch.resume import Diverged
from largebatch.state import TrainState, count_params, create_state, params_sha256
from largebatch.step import Plan, make_count_nonfinite, make_inner_loop
from largebatch.trainer import NonFinite, Trainer

log = logging.getLogger("largebatch")

# Best of 16..256 on a CPU core (LOG.md). Elsewhere a guess that fills the device.
AUTO_MICRO_BATCH_SIZE = {"cpu": 16}
AUTO_MICRO_BATCH_SIZE_ELSEWHERE = 1024


def resolve_micro_batch_size(size, platform: str) -> int:
    """Examples per gradient evaluation."""
    if size == "auto":
        return AUTO_MICRO_BATCH_SIZE.get(platform, AUTO_MICRO_BATCH_SIZE_ELSEWHERE)
    return size


def make_plan(deal: batching.Deal, config, batch_size: int, first_step: int) -> Plan:
    """Inputs of the updates from `first_step` on, as many as one call may do."""
    length = config.train.inner_steps
    examples_before = np.arange(first_step, first_step + length, dtype=np.int64) * batch_size
    return Plan(
        *batching.epoch_and_offset(deal, examples_before),
        np.full(length, batch_size, np.int32),
        np.full(length, config.optimizer.learning_rate, np.float32),
    )


def start(config: config_dict.ConfigDict) -> dict:
    """Starts JAX by a config that all hosts agree on; returns it as a plain dict.

    Raises:
      UserError: the config is bad, or another than host 0's; or the devices or hosts are not there.
    """
    configs.validate(config)
    configs.use_compilation_cache(config.augment.cache_dir)
    devices.start(**config.devices.to_dict())
    plain = config.to_dict()
    plain["devices"]["host_index"] = None
    first, *others = map(json.loads, devices.gather_text(json.dumps(plain)))
    for host, theirs in enumerate(others, 1):
        if fields := configs.differences(first, theirs, ("on host 0", f"on host {host}")):
            raise UserError(f"hosts disagree about the config: {fields}")
    return plain


def open_run(plain: dict, workdir: str) -> tuple[metrics.RunFolder, dict | None]:
    """The run folder; with its summary where it holds an ended run. The same answer on every host.

    Raises:
      UserError: the folder cannot be written, is in use, or holds a run of another config.
    """
    run = metrics.RunFolder(workdir, tensorboard=plain["log"]["tensorboard"])
    error = summary = None
    if devices.is_primary():
        try:
            summary = _look_at_folder(run, plain)
        except UserError as found:
            error = found
    devices.share_error(error)
    return run, json.loads(devices.gather_text(json.dumps(summary))[0])


def _look_at_folder(run: metrics.RunFolder, plain: dict) -> dict | None:
    theirs, summary = run.read("config.json"), run.read("summary.json")
    if theirs and (
        fields := configs.differences(configs.identity(plain), configs.identity(theirs), ("here", "there"))
    ):
        raise UserError(f"--workdir: {run.path} holds a run of another config: {fields}")
    if theirs and summary and summary.get("status") in ("done", "diverged"):
        return summary
    if theirs is None and (run.path / "metrics.jsonl").exists():
        raise UserError(f"--workdir: {run.path} holds metrics.jsonl but no config.json; give a new folder")
    run.lock()
    return None


class Job(NamedTuple):
    """What does not change while a run trains: its data on the devices and its compiled programs."""

    cache: caches.Cache
    placed: augment.Placed
    batch_size: int
    micro_batch_size: int
    num_params: int
    flops_per_image: float
    network: nn.Module
    optimizer: optax.GradientTransformation
    read: Callable
    loss_fn: Callable
    inner_loop: Callable
    predict: Callable


def bytes_beside_images(network, state, image_shape, micro_batch_size: int) -> dict[str, int]:
    """Estimate of what a step needs on a device beside the images, in bytes by part; `state` may be shapes."""
    costs = models.training_costs(network, image_shape)
    return {
        "parameters and optimizer": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "gradients": 3 * 4 * count_params(state.params),  # one micro-batch's, their sum, the flat vector
        f"activations of {micro_batch_size} images": micro_batch_size * costs.activation_bytes,
    }


def prepare(config: config_dict.ConfigDict, clock: metrics.Clock) -> tuple[Job, TrainState]:
    """Places the data, makes the state and compiles the two programs by running them; times both sections."""
    platform = jax.default_backend()
    conv = models.resolve_conv(config.model.conv, platform)
    micro_batch_size = resolve_micro_batch_size(config.batch.micro_batch_size, platform)
    optimizer = create_optimizer(config.optimizer.name, config.optimizer.momentum, config.optimizer.weight_decay)

    def sizes_for(cache):
        batch_size = configs.resolve_batch_size(config.batch.size, cache.count("train") * augment.NUM_VIEWS)
        return batch_size, min(micro_batch_size, -(-batch_size // jax.device_count()))

    def network_for(cache):
        return models.create_model(config.model.name, len(cache.class_names), config.model.dtype, conv)

    def initial_state(cache):
        params = models.init_params(network_for(cache), cache.image_shape, config.seed)
        return create_state(params, optimizer, np.uint32(config.seed))

    def other_bytes(cache):
        state = jax.eval_shape(functools.partial(initial_state, cache))
        return bytes_beside_images(network_for(cache), state, cache.image_shape, sizes_for(cache)[1])

    with clock.measure("data"):
        cache, placed = augment.load_onto_devices(config, other_bytes)
        jax.block_until_ready((placed.train, placed.val_images))
    batch_size, size = sizes_for(cache)
    network = network_for(cache)
    logits_fn = models.make_logits_fn(network, cache.image_shape, cache.manifest["mean"], cache.manifest["std"])
    state = devices.replicate(jax.jit(functools.partial(initial_state, cache))())

    # Calling, not lowering: pmap's ahead-of-time programs do not take the arrays of several hosts.
    with clock.measure("compile"):
        read = augment.make_read(config.augment.storage, cache.image_shape)
        loss_fn, tolerated = models.cross_entropy(logits_fn), tolerated_nonfinite(config)
        inner_loop = make_inner_loop(loss_fn, optimizer, read, placed.deal, size, max_nonfinite=tolerated)
        plan = make_plan(placed.deal, config, batch_size, first_step=0)
        state, _ = inner_loop(state, placed.train, plan, np.int32(0))
        predict = evaluation.make_predict(logits_fn, micro_batch_size)
        jax.block_until_ready((state, predict(state.params, placed.val_images)))
        devices.check_replicas(state.params, "initial parameters")
    flops = models.training_costs(network, cache.image_shape).flops
    num_params = count_params(state.params) // jax.local_device_count()
    job = Job(
        cache, placed, batch_size, size, num_params, flops, network, optimizer, read, loss_fn, inner_loop, predict
    )
    return job, state


def make_trainer(job: Job, state: TrainState, config, clock: metrics.Clock, profile_dir: str | None) -> Trainer:
    """What runs the compiled inner loop; all hosts profile if host 0 does."""
    profiles = bool(devices.from_primary(np.int32(bool(profile_dir))))
    return Trainer(
        state,
        job.inner_loop,
        job.placed.train,
        functools.partial(make_plan, job.placed.deal, config, job.batch_size),
        clock,
        inner_steps=config.train.inner_steps,
        max_nonfinite=tolerated_nonfinite(config),
        profile_dir=(profile_dir or "profile") if profiles else None,
    )


def tolerated_nonfinite(config) -> int:
    """Updates in a row that may be passed over."""
    return config.train.max_nonfinite if config.train.on_nonfinite == "skip" else 0


def validate_model(job: Job, params) -> tuple[evaluation.Scores, np.ndarray]:
    """Scores and logits [N, num_classes] of all validation examples, on every host.

    Raises:
      RuntimeError: the replicas no longer hold the same parameters.
    """
    gathered = np.asarray(job.predict(params, job.placed.val_images))
    logits = evaluation.in_split_order(gathered, len(job.placed.val_labels))
    devices.check_replicas(params, "parameters")
    return evaluation.score(logits, job.placed.val_labels), logits


def where_nonfinite(job: Job, trainer: Trainer, place: tuple) -> str:
    """The first layer, from input to output, that is not finite in the update at `place`; in words."""
    manifest = job.cache.manifest
    layer_outputs = models.make_layer_outputs(job.network, job.cache.image_shape, manifest["mean"], manifest["std"])
    count = make_count_nonfinite(layer_outputs, job.loss_fn, job.read, job.placed.deal, job.micro_batch_size)
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
    return metrics.empty_summary() | {
        "devices": jax.device_count(),
        "hosts": jax.process_count(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "params": job.num_params,
        "flops_per_image": job.flops_per_image,
        "global_batch_size": job.batch_size,
        "micro_batch_size": job.micro_batch_size,
        "versions": metrics.versions(),
        "git_commit": metrics.git_commit(),
    }


def headline(job: Job, config, clock: metrics.Clock) -> str:
    """Two lines that say what is about to run."""
    share = -(-job.batch_size // jax.device_count())
    return (
        f"{job.num_params:,} parameters; {jax.device_count()} {jax.default_backend()} devices on "
        f"{jax.process_count()} hosts; {job.cache.count('train'):,} training images as "
        f"{job.placed.deal.num_examples:,} views, {job.cache.count('val'):,} validation images\n"
        f"batch {job.batch_size:,} = {share:,} a device in micro-batches of up to {job.micro_batch_size}; "
        f"{config.optimizer.name} at {config.optimizer.learning_rate:g}; "
        f"data {clock.seconds['data']:.1f} s, compiling {clock.seconds['compile']:.1f} s"
    )


def write_row(job: Job, config, trainer: Trainer, progress: resume.Progress, run, report, clock) -> None:
    """Validates and records the outer loop that has just ended.

    Raises:
      NonFinite: the validation loss is not finite.
    """
    with clock.measure("evaluation"):
        scores, logits = validate_model(job, trainer.state.params)
    if not np.isfinite(scores.loss):
        raise trainer.nonfinite_validation(scores.loss)
    applied = trainer.values["nonfinite"] == 0
    mean = {name: values[applied].mean() if applied.any() else None for name, values in trainer.values.items()}
    inner_steps, outer = config.train.inner_steps, trainer.step // config.train.inner_steps
    row = {
        "step": trainer.step,
        "outer": outer,
        "examples_seen": trainer.step * job.batch_size,
        "epoch": trainer.step * job.batch_size / job.placed.deal.num_examples,
        "global_batch_size": job.batch_size,
        "learning_rate": config.optimizer.learning_rate * trainer.learning_rate_scale,
        "train_loss": mean["loss"],
        "train_accuracy": mean["accuracy"],
        "grad_norm": trainer.values["grad_norm"][-1],
        "skipped_updates": int((~applied).sum()),
        "noise_scale": None,
        "val_loss": scores.loss,
        "val_accuracy": scores.accuracy,
        "val_examples": scores.num_examples,
    } | metrics.timings(clock, progress.before, inner_steps, job.batch_size)
    progress.before = dict(clock.seconds)
    improved = metrics.add_to_summary(progress.summary, row)
    if devices.is_primary():
        run.append_row(row)
        if improved:
            run.write_predictions(job.placed.val_labels, logits, job.placed.val_ids)
    last = outer == config.train.outer_steps or progress.summary["steps_to_target"] is not None
    if improved or last or outer % config.checkpoint.every_outer == 0:
        progress.save(at_boundary=True)
    report.row(row, config.train.outer_steps)


def train_and_evaluate(config: config_dict.ConfigDict, workdir: str, profile: bool = False) -> dict:
    """Trains by `config` in the run folder `workdir`, goes on where a run there stopped, returns its summary.

    Raises:
      UserError: bad input. Where it is found before the first update, no run is written.
      Diverged: a loss is not finite; the summary says so.
      preemption.Stopped: a signal came; all is saved, and the same call goes on from there.
    """
    clock = metrics.Clock()
    plain = start(config)
    run, ended = open_run(plain, workdir)
    if ended and ended["status"] == "diverged":
        raise Diverged(f"{workdir} is a run of this config that diverged; change the config and give a new folder")
    if ended:
        log.info("%s is a finished run of this config; nothing to do", workdir)
        return ended
    with run:
        with devices.named_collective_errors():
            job, state = prepare(config, clock)
        trainer = make_trainer(job, state, config, clock, str(run.path / "profile") if profile else None)
        summary = describe(job) | {"target_accuracy": config.train.target_accuracy}
        data = job.cache.identity()
        progress = resume.Progress(run, trainer, clock, summary, plain, data)
        del state  # donated at the first update
        progress.resume()
        report = display.Reporter(config.train.inner_steps * config.train.outer_steps, enabled=devices.is_primary())
        report.line(headline(job, config, clock))
        with progress.recorded_end(), report:
            run_outer_loops(job, config, trainer, progress, run, report, clock)
            summary["params_sha256"] = params_sha256(devices.first_replica(trainer.state.params))
        report.results(summary, str(workdir))
    return summary


def run_outer_loops(job, config, trainer, progress, run, report, clock) -> None:
    """Trains and validates until the last update or the target; the run is saved on the way.

    Raises:
      Diverged: a loss or gradient is not finite, and the config does not allow to go on.
      preemption.Stopped: a signal came.
    """
    total = config.train.inner_steps * config.train.outer_steps
    while trainer.step < total and progress.summary["steps_to_target"] is None:
        try:
            for updates, seconds in trainer.finish_outer_loop():
                report.at(trainer.step, updates * job.batch_size / seconds)
                if trainer.step % config.train.inner_steps:
                    progress.save_if_due()
            write_row(job, config, trainer, progress, run, report, clock)
        except NonFinite as bad:
            trouble = f"{bad}; {where_nonfinite(job, trainer, bad.place)}"
            if config.train.on_nonfinite != "rollback":
                raise Diverged(f"diverged: {trouble}") from bad
            progress.roll_back(bad.step, trouble)
        if trainer.step < total:
            trainer.stop_if_asked()


def main(config: config_dict.ConfigDict) -> int:
    """Trains into --workdir; returns the exit code."""
    if flags.FLAGS.doctor:
        from largebatch import doctor  # which imports this script

        start(config)
        return doctor.main(config)
    preemption.answer_signals()
    workdir = flags.FLAGS.workdir or f"runs/{config.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        train_and_evaluate(config, workdir, flags.FLAGS.profile)
    except Diverged as error:
        log.error("%s", error)
        return configs.EXIT_DIVERGED
    except preemption.Stopped as stopped:
        log.info("%s; start again with --workdir %s to go on", stopped, workdir)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder; default runs/NAME-DATE-TIME.")
    flags.DEFINE_bool("doctor", False, "Check this config on this machine before a long run; trains nothing.")
    flags.DEFINE_bool("profile", False, "Write a jax.profiler trace of a few updates to WORKDIR/profile.")
    configs.run_script(main)
