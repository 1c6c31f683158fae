"""The story of a run: config -> data -> state -> outer loop.

python train.py                                                     synthetic images, no download
python train.py --config configs/eurosat.py --workdir runs/eurosat  the real job
python train.py --config configs/eurosat.py --config.optimizer.name sgd --config.batch.size 1024
"""

import contextlib
import functools
import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from ml_collections import config_dict

import augment
import model as models
from largebatch import UserError, batching, devices, evaluation, metrics
from largebatch import cache as caches
from largebatch import config as configs
from largebatch.optimizers import create_optimizer
from largebatch.state import TrainState, count_params, create_state, params_sha256
from largebatch.step import Plan, make_inner_loop

log = logging.getLogger("largebatch")

# A call is as many updates as fit in about this long, so that progress is seen and signals are answered.
SECONDS_PER_CALL = 2.0
# Best of 16..256 on a CPU core (LOG.md). Elsewhere a guess that fills the device.
AUTO_MICRO_BATCH_SIZE = {"cpu": 16}
AUTO_MICRO_BATCH_SIZE_ELSEWHERE = 1024
PROFILED_UPDATES = 3


_interrupted = threading.Event()


def answer_interrupts() -> None:
    """Ctrl-C ends the run after the running call, a second one at once.

    Python's own handler raises at any line, and a KeyboardInterrupt raised in a destructor is lost.
    """

    def note(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupted.set()

    signal.signal(signal.SIGINT, note)


class Diverged(Exception):
    """The loss is no longer a number."""


def make_logits_fn(network, image_shape, mean, std):
    """(params, uint8 images [M, H * W * C]) -> float32 logits, normalising where images are read."""
    mean, scale = np.float32(mean), np.float32(1 / np.asarray(std))

    def logits_fn(params, images):
        images = images.reshape(-1, *image_shape)
        normalised = (images.astype(jnp.float32) - mean) * scale
        return network.apply({"params": params}, normalised.astype(network.dtype))

    return logits_fn


def cross_entropy(logits_fn):
    """The `loss_fn` of the step: sums over a micro-batch of weighted cross-entropy and of hits."""

    def loss_fn(params, batch):
        logits = logits_fn(params, batch.images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        hits = jnp.argmax(logits, axis=-1) == batch.labels
        return jnp.sum(losses * batch.weights), {"accuracy": jnp.sum(hits * batch.weights)}

    return loss_fn


def init_params(network, image_shape, seed: int):
    """float32 parameters, the same for the same seed on every host."""
    images = jnp.zeros((1, *image_shape), network.dtype)
    return jax.jit(network.init)(jax.random.key(seed), images)["params"]


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


def agree_on_config(config: config_dict.ConfigDict) -> dict:
    """The config as a plain dict.

    Raises:
      UserError: this host or another was started with another config than host 0.
    """
    plain = config.to_dict()
    plain["devices"]["host_index"] = None
    first, *others = map(json.loads, devices.gather_text(json.dumps(plain)))
    for host, theirs in enumerate(others, 1):
        if fields := configs.differences(first, theirs, ("on host 0", f"on host {host}")):
            raise UserError(f"hosts disagree about the config: {fields}")
    return plain


def open_run(plain: dict, workdir: str) -> tuple[metrics.RunFolder, dict | None]:
    """The run folder, new or finished (then with its summary); the same answer on every host.

    Raises:
      UserError: the folder cannot be written, holds another config, or a run that did not end.
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
    if theirs is None:
        run.check_new()
        return None
    if fields := configs.differences(configs.identity(plain), configs.identity(theirs), ("here", "there")):
        raise UserError(f"--workdir: {run.path} holds a run of another config: {fields}")
    if summary is None or summary.get("status") != "done":
        status = "unfinished" if summary is None else summary.get("status")
        raise UserError(f"--workdir: {run.path} holds a run that is {status}; give a new folder or remove it")
    return summary


class Job(NamedTuple):
    """What does not change while a run trains: its data on the devices and its compiled programs."""

    cache: caches.Cache
    placed: augment.Placed
    batch_size: int
    micro_batch_size: int
    num_params: int
    flops_per_image: float
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
        params = init_params(network_for(cache), cache.image_shape, config.seed)
        return create_state(params, optimizer, np.uint32(config.seed))

    def other_bytes(cache):
        state = jax.eval_shape(functools.partial(initial_state, cache))
        return bytes_beside_images(network_for(cache), state, cache.image_shape, sizes_for(cache)[1])

    with clock.measure("data"):
        cache, placed = augment.load_onto_devices(config, other_bytes)
        jax.block_until_ready((placed.train, placed.val_images))
    batch_size, size = sizes_for(cache)
    network = network_for(cache)
    logits_fn = make_logits_fn(network, cache.image_shape, cache.manifest["mean"], cache.manifest["std"])
    state = devices.replicate(jax.jit(functools.partial(initial_state, cache))())

    # Calling, not lowering: pmap's ahead-of-time programs do not take the arrays of several hosts.
    with clock.measure("compile"):
        read = augment.make_read(config.augment.storage, cache.image_shape)
        inner_loop = make_inner_loop(cross_entropy(logits_fn), optimizer, read, placed.deal, size)
        plan = make_plan(placed.deal, config, batch_size, first_step=0)
        state, _ = inner_loop(state, placed.train, plan, np.int32(0))
        predict = evaluation.make_predict(logits_fn, micro_batch_size)
        jax.block_until_ready((state, predict(state.params, placed.val_images)))
        devices.check_replicas(state.params, "initial parameters")
    flops = models.training_costs(network, cache.image_shape).flops
    num_params = count_params(state.params) // jax.local_device_count()
    return Job(cache, placed, batch_size, size, num_params, flops, inner_loop, predict), state


class Trainer:
    """Runs the compiled inner loop in calls of a few seconds; holds the state and the update count."""

    def __init__(self, job: Job, state: TrainState, plan_of, clock: metrics.Clock, profile_dir: str | None):
        self._job, self._plan_of, self._clock, self._profile_dir = job, plan_of, clock, profile_dir
        self._sec_per_update = None
        self.state, self.step = state, 0

    def run(self, num_updates: int, on_call) -> dict[str, np.ndarray]:
        """Does `num_updates` updates; calls on_call(updates, seconds) after each piece.

        Returns:
          The metrics of each update, float32 [num_updates] each.
        Raises:
          Diverged: a loss or gradient is not finite.
        """
        pieces, done = [], 0
        while done < num_updates:
            count = self._next_count(num_updates - done)
            plan = self._plan_of(first_step=self.step)
            begin = time.perf_counter()
            with self._maybe_profile(), self._clock.measure("train"):
                self.state, values = self._job.inner_loop(self.state, self._job.placed.train, plan, np.int32(count))
                jax.block_until_ready((self.state, values))
            seconds = time.perf_counter() - begin
            self._sec_per_update = seconds / count
            pieces.append({name: np.asarray(value)[:count] for name, value in values.items()})
            for name in ("loss", "grad_norm"):
                bad = np.flatnonzero(~np.isfinite(pieces[-1][name]))
                if len(bad):
                    raise Diverged(
                        f"diverged: {name} of update {self.step + bad[0] + 1} is {pieces[-1][name][bad[0]]} "
                        f"(learning rate {plan.learning_rate[bad[0]]:g})"
                    )
            self.step += count
            done += count
            on_call(count, seconds)
            if _interrupted.is_set():
                raise KeyboardInterrupt
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def _next_count(self, remaining: int) -> int:
        """Updates of the next call: one to learn its time, then SECONDS_PER_CALL's worth, as host 0 says."""
        if self._sec_per_update is None:
            return 1
        if self._profile_dir:
            return min(PROFILED_UPDATES, remaining)
        fitting = max(1, int(SECONDS_PER_CALL / self._sec_per_update))
        return int(devices.from_primary(np.int32(min(fitting, remaining))))

    def _maybe_profile(self):
        """Host 0 traces the call after the first; the others do as many updates in it."""
        if not self._profile_dir or self._sec_per_update is None:
            return contextlib.nullcontext()
        folder, self._profile_dir = self._profile_dir, None
        return jax.profiler.trace(folder) if devices.is_primary() else contextlib.nullcontext()


def validate_model(job: Job, params) -> tuple[evaluation.Scores, np.ndarray]:
    """Scores and logits [N, num_classes] of all validation examples, on every host.

    Raises:
      RuntimeError: the replicas no longer hold the same parameters.
    """
    gathered = np.asarray(job.predict(params, job.placed.val_images))
    logits = evaluation.in_split_order(gathered, len(job.placed.val_labels))
    devices.check_replicas(params, "parameters")
    return evaluation.score(logits, job.placed.val_labels), logits


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


def train_and_evaluate(config: config_dict.ConfigDict, workdir: str, profile: bool = False) -> dict:
    """Trains by `config`, writes the run folder `workdir` and returns its summary.

    Raises:
      UserError: bad input. Where it is found before the first update, no run is written.
      Diverged: a loss is not finite; the summary says so.
    """
    clock = metrics.Clock()
    configs.validate(config)
    configs.use_compilation_cache(config.augment.cache_dir)
    devices.start(**config.devices.to_dict())
    plain = agree_on_config(config)
    run, finished = open_run(plain, workdir)
    if finished:
        log.info("%s is a finished run of this config; nothing to do", workdir)
        return finished

    job, state = prepare(config, clock)
    plan_of = functools.partial(make_plan, job.placed.deal, config, job.batch_size)
    profile = bool(devices.from_primary(np.int32(profile)))
    trainer = Trainer(job, state, plan_of, clock, f"{workdir}/profile" if profile else None)
    del state  # donated at the first update
    inner_steps, outer_steps = config.train.inner_steps, config.train.outer_steps
    report = metrics.Reporter(inner_steps * outer_steps, enabled=devices.is_primary())
    report.line(headline(job, config, clock))
    summary = describe(job) | {"target_accuracy": config.train.target_accuracy}
    if devices.is_primary():
        run.create(plain)

    def on_call(updates, seconds):
        report.advance(updates, updates * job.batch_size / seconds)

    try:
        with report:
            for outer in range(1, outer_steps + 1):
                before = dict(clock.seconds)
                values = trainer.run(inner_steps, on_call)
                with clock.measure("evaluation"):
                    scores, logits = validate_model(job, trainer.state.params)
                if not np.isfinite(scores.loss):
                    raise Diverged(f"diverged: the validation loss after update {trainer.step} is {scores.loss}")
                row = {
                    "step": trainer.step,
                    "outer": outer,
                    "examples_seen": trainer.step * job.batch_size,
                    "epoch": trainer.step * job.batch_size / job.placed.deal.num_examples,
                    "global_batch_size": job.batch_size,
                    "learning_rate": config.optimizer.learning_rate,
                    "train_loss": values["loss"].mean(),
                    "train_accuracy": values["accuracy"].mean(),
                    "grad_norm": values["grad_norm"][-1],
                    "noise_scale": None,
                    "val_loss": scores.loss,
                    "val_accuracy": scores.accuracy,
                    "val_examples": scores.num_examples,
                } | metrics.timings(clock, before, inner_steps, job.batch_size)
                improved = metrics.add_to_summary(summary, row)
                report.row(row, outer_steps)
                if devices.is_primary():
                    run.append_row(row)
                    if improved:
                        run.write_predictions(job.placed.val_labels, logits, job.placed.val_ids)
                if summary["steps_to_target"] is not None:
                    break
        summary["params_sha256"] = params_sha256(devices.first_replica(trainer.state.params))
        summary["status"] = "done"
    except Diverged:
        summary["status"] = "diverged"
        raise
    except KeyboardInterrupt:
        summary["status"] = "interrupted"
        raise
    finally:
        summary["seconds"] = clock.seconds | {"total": clock.total()}
        if devices.is_primary():
            try:
                run.write_json("summary.json", summary)
            finally:
                run.close()
    report.results(summary, str(workdir))
    return summary


def main(config: config_dict.ConfigDict) -> int:
    """Trains into --workdir; returns the exit code."""
    answer_interrupts()
    workdir = flags.FLAGS.workdir or f"runs/{config.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        train_and_evaluate(config, workdir, flags.FLAGS.profile)
    except Diverged as error:
        log.error("%s", error)
        return configs.EXIT_DIVERGED
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder; default runs/NAME-DATE-TIME.")
    flags.DEFINE_bool("profile", False, "Write a jax.profiler trace of a few updates to WORKDIR/profile.")
    configs.run_script(main)
