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
from largebatch import batching, checkpoints, devices, display, evaluation, metrics, preemption, resume
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
# A set of programs takes some 800 memory maps on a CPU; at Linux' limit of 65,530 a process dies.
MAX_PROGRAMS = 30


def resolve_micro_batch_size(size) -> int:
    """Examples per gradient evaluation."""
    if size == "auto":
        return AUTO_MICRO_BATCH_SIZE.get(jax.default_backend(), AUTO_MICRO_BATCH_SIZE_ELSEWHERE)
    return size


def plan_length(config) -> int:
    """Updates that one call may do: a power of two, so that runs of other inner_steps share its program."""
    return 1 << (config.train.inner_steps - 1).bit_length()


def make_plan(deal: batching.Deal, config, batch_size: int, first_step: int) -> Plan:
    """Inputs of the updates from `first_step` on, as many as one call may do."""
    length = plan_length(config)
    examples_before = np.arange(first_step, first_step + length, dtype=np.int64) * batch_size
    return Plan(
        *batching.epoch_and_offset(deal, examples_before),
        np.full(length, batch_size, np.int32),
        np.full(length, config.optimizer.learning_rate, np.float32),
    )


class Programs(NamedTuple):
    """The compiled part of a run, which serves every seed, batch size, rate, momentum and weight decay."""

    network: nn.Module
    optimizer: optax.GradientTransformation
    read: Callable
    loss_fn: Callable
    init: Callable
    inner_loop: Callable
    predict: Callable
    metric_names: tuple[str, ...]


class Shared:
    """Data on the devices and compiled programs, by what shapes them: runs of one process may share both.

    Args:
      packed: each device trains a run of its own, on all of the data.
    """

    def __init__(self, *, packed: bool = False):
        self.packed, self.local_devices = packed, jax.local_devices()
        self._data, self._programs = (None, None), {}

    def data(self, config) -> tuple[caches.Cache, augment.Placed]:
        """Places the data set, unless it is there; of several only the latest is kept, for it fills devices."""
        key = json.dumps([config.dataset.to_dict(), config.augment.to_dict()])
        if self._data[0] != key:
            self._data = (None, None)

            def other_bytes(cache):
                state = jax.eval_shape(make_init(config, cache), np.uint32(0), 0.0, 0.0)
                size = sizes(config, cache, 1 if self.packed else jax.device_count())[1]
                return bytes_beside_images(make_network(config, cache), state, cache.image_shape, size)

            cache, placed = augment.load_onto_devices(config, other_bytes, packed=self.packed)
            jax.block_until_ready((placed.train, placed.val_images))
            self._data = key, (cache, placed)
        return self._data[1]

    def key(self, config) -> tuple:
        """What shapes the programs of `config`; places its data."""
        cache, placed = self.data(config)
        return (
            self._data[0],
            *config.model.values(),
            config.optimizer.name,
            resolve_micro_batch_size(config.batch.micro_batch_size),  # of predictions
            sizes(config, cache, placed.deal.num_devices)[1],
            plan_length(config),
            tolerated_nonfinite(config),
        )

    def programs(self, config) -> Programs:
        """Compiles by running once, unless that was done; pmap's ahead-of-time way does not know several hosts."""
        key = self.key(config)
        if key not in self._programs:
            if len(self._programs) == MAX_PROGRAMS:
                self._programs.clear()
                jax.clear_caches()
            self._programs[key] = self._compile(config, *self.data(config))
        return self._programs[key]

    def _compile(self, config, cache, placed) -> Programs:
        network, manifest = make_network(config, cache), cache.manifest
        logits_fn = models.make_logits_fn(network, cache.image_shape, manifest["mean"], manifest["std"])
        loss_fn = models.cross_entropy(logits_fn)
        optimizer = create_optimizer(config.optimizer.name, 0.0, 0.0)
        read = augment.make_read(config.augment.storage, cache.image_shape)
        init = make_init(config, cache)
        inner_loop = make_inner_loop(
            loss_fn,
            optimizer,
            read,
            placed.deal,
            sizes(config, cache, placed.deal.num_devices)[1],
            max_nonfinite=tolerated_nonfinite(config),
            packed=self.packed,
        )
        predict = evaluation.make_predict(
            logits_fn, resolve_micro_batch_size(config.batch.micro_batch_size), packed=self.packed
        )
        state = devices.replicate(init(np.uint32(0), 0.0, 0.0), self.local_devices)
        plan, updates = make_plan(placed.deal, config, 1, first_step=0), np.int32(0)
        if self.packed:
            many = len(self.local_devices)
            plan, updates = jax.tree.map(lambda x: np.stack([x] * many), (plan, updates))
        state, values = inner_loop(state, placed.train, plan, updates)
        jax.block_until_ready((state, predict(state.params, placed.val_images)))
        return Programs(network, optimizer, read, loss_fn, init, inner_loop, predict, tuple(values))


class Job(NamedTuple):
    """What does not change while a run trains."""

    cache: caches.Cache
    placed: augment.Placed
    batch_size: int
    micro_batch_size: int
    num_params: int
    flops_per_image: float
    programs: Programs


def make_network(config, cache: caches.Cache) -> nn.Module:
    """The network of `config` for the classes of `cache`."""
    conv = models.resolve_conv(config.model.conv, jax.default_backend())
    return models.create_model(config.model.name, len(cache.class_names), config.model.dtype, conv)


def make_init(config, cache: caches.Cache) -> Callable[[int, float, float], TrainState]:
    """(seed, momentum, weight decay) -> the state before the first update, of one replica."""
    network = make_network(config, cache)

    def init(seed, momentum, weight_decay):
        optimizer = create_optimizer(config.optimizer.name, momentum, weight_decay)
        return create_state(models.init_params(network, cache.image_shape, seed), optimizer, seed)

    return jax.jit(init)


def sizes(config, cache: caches.Cache, num_devices: int) -> tuple[int, int]:
    """Examples per update, and per gradient evaluation of one device."""
    batch_size = configs.resolve_batch_size(config.batch.size, cache.count("train") * augment.NUM_VIEWS)
    micro_batch_size = resolve_micro_batch_size(config.batch.micro_batch_size)
    return batch_size, min(micro_batch_size, -(-batch_size // num_devices))


def bytes_beside_images(network, state, image_shape, micro_batch_size: int) -> dict[str, int]:
    """Estimate of what a step needs on a device beside the images, in bytes by part; `state` may be shapes."""
    costs = models.training_costs(network, image_shape)
    return {
        "parameters and optimizer": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "gradients": 3 * 4 * count_params(state.params),  # one micro-batch's, their sum, the flat vector
        f"activations of {micro_batch_size} images": micro_batch_size * costs.activation_bytes,
    }


def prepare(config: config_dict.ConfigDict, clock: metrics.Clock, shared: Shared) -> tuple[Job, TrainState]:
    """Places the data, compiles the programs, makes the state; times both sections."""
    with clock.measure("data"):
        cache, placed = shared.data(config)
    batch_size, micro_batch_size = sizes(config, cache, placed.deal.num_devices)
    with clock.measure("compile"):
        programs = shared.programs(config)
        state = programs.init(np.uint32(config.seed), config.optimizer.momentum, config.optimizer.weight_decay)
        state = devices.replicate(state, shared.local_devices)
        devices.check_replicas(state.params, "initial parameters")
    job = Job(
        cache=cache,
        placed=placed,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        num_params=count_params(devices.first_replica(state.params)),
        flops_per_image=models.training_costs(programs.network, cache.image_shape).flops,
        programs=programs,
    )
    return job, state


def make_trainer(job: Job, state: TrainState, config, clock: metrics.Clock, profile_dir: str | None) -> Trainer:
    """What runs the compiled inner loop; all hosts profile if host 0 does."""
    profiles = bool(devices.from_primary(np.int32(bool(profile_dir))))
    return Trainer(
        state,
        job.programs.inner_loop,
        job.programs.metric_names,
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
    gathered = np.asarray(job.programs.predict(params, job.placed.val_images))
    logits = evaluation.in_split_order(gathered, len(job.placed.val_labels))
    devices.check_replicas(params, "parameters")
    return evaluation.score(logits, job.placed.val_labels), logits


def where_nonfinite(job: Job, trainer: Trainer, place: tuple) -> str:
    """The first layer, from input to output, that is not finite in the update at `place`; in words."""
    manifest, programs = job.cache.manifest, job.programs
    layer_outputs = models.make_layer_outputs(
        programs.network, job.cache.image_shape, manifest["mean"], manifest["std"]
    )
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
    return metrics.empty_summary() | {
        "devices": job.placed.deal.num_devices,
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
    num_devices = job.placed.deal.num_devices
    share = -(-job.batch_size // num_devices)
    return (
        f"{job.num_params:,} parameters; {num_devices} {jax.default_backend()} devices on "
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
    if row["skipped_updates"]:
        log.warning("outer loop %d: %d updates skipped, not finite", outer, row["skipped_updates"])
        if devices.is_primary():
            run.log_event("skipped", step=trainer.step, updates=row["skipped_updates"])
    if improved or last or outer % config.checkpoint.every_outer == 0:
        progress.save(at_boundary=True)
    report.row(row, config.train.outer_steps)


def train_and_evaluate(
    config: config_dict.ConfigDict,
    workdir: str,
    profile: bool = False,
    shared: Shared | None = None,
    report: display.Reporter | None = None,
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
    clock = metrics.Clock()
    plain = configs.start(config)
    run, ended = resume.open_run(plain, workdir)
    if ended and ended["status"] == "diverged":
        raise Diverged(f"{workdir} is a run of this config that diverged; change the config and give a new folder")
    if ended:  # done or pruned
        log.info("%s is a finished run of this config; nothing to do", workdir)
        return ended
    with run:
        with devices.named_collective_errors():
            job, state = prepare(config, clock, shared or Shared())
            trainer = make_trainer(job, state, config, clock, str(run.path / "profile") if profile else None)
            summary = describe(job) | {"target_accuracy": config.train.target_accuracy}
            progress = resume.Progress(run, trainer, clock, summary, plain, job.cache.identity())
            del state  # donated at the first update
            progress.resume()
        report = report or display.Reporter(enabled=devices.is_primary())
        report.start(
            config.train.inner_steps * config.train.outer_steps, trainer.step, headline(job, config, clock)
        )
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

        configs.start(config)
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
