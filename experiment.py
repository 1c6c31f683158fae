"""What runs are made of: the data on the devices and the compiled programs, shared where runs of a process can."""

import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn

import augment
import model as models
from largebatch.data import batching
from largebatch.data.cache import Cache
from largebatch.errors import BadSetting
from largebatch.hosts import collectives, replicas
from largebatch.nn.normalisation import STATISTICS
from largebatch.optim import schedules
from largebatch.optim.batch_sizes import read_trace, resolve_batch_size
from largebatch.optim.optimizers import Numbers, Switches, create_optimizer
from largebatch.optim.piecewise import PiecewiseConstant
from largebatch.training import local_sgd
from largebatch.training.costs import training_costs
from largebatch.training.evaluation import make_predict
from largebatch.training.loss import make_logits_fn, make_loss_fn
from largebatch.training.state import TrainState, count_params, create_state
from largebatch.training.step import Plan, Step, make_inner_loop

# Best of 16..256 on a CPU core (LOG.md). Elsewhere a guess that fills the device.
AUTO_MICRO_BATCH_SIZE = {"cpu": 16}
AUTO_MICRO_BATCH_SIZE_ELSEWHERE = 1024
# A set of programs takes some 800 memory maps on a CPU; at Linux' limit of 65,530 a process dies.
MAX_PROGRAMS = 30
WHITENING_IMAGES = 2048  # training images whose patches whiten the stem


# ---- a config in terms of the library ----------------------------------------------------------------


def resolve_micro_batch_size(size) -> int:
    """Examples per gradient evaluation."""
    if size == "auto":
        return AUTO_MICRO_BATCH_SIZE.get(jax.default_backend(), AUTO_MICRO_BATCH_SIZE_ELSEWHERE)
    return size


def make_schedule(config, num_originals: int, grown: PiecewiseConstant | None = None) -> schedules.Schedule:
    """Batch sizes and rates of the run on a training set of `num_originals` images.

    Args:
      grown: the batch sizes so far, where the run finds them itself (batch.auto).
    Raises:
      BadSetting: the batch sizes or the warm-up do not go with the training set, or local steps would begin after
        the last update.
    """
    epoch_size = num_originals * augment.NUM_VIEWS
    if config.batch.trace is not None:
        batch_sizes = read_trace(config.batch, epoch_size).batch_sizes
    else:
        batch_sizes = grown or PiecewiseConstant.constant(resolve_batch_size(config.batch.size, epoch_size))
    schedule = schedules.create(
        config.schedule.to_dict(),
        config.optimizer.learning_rate,
        config.train.inner_steps * config.train.outer_steps,
        batch_sizes,
        epoch_size,
        grows=config.batch.auto,
    )
    if config.sync.start_step >= schedule.num_updates:  # growing batches leave fewer updates
        raise BadSetting(f"sync.start_step: {config.sync.start_step}; allowed: up to {schedule.num_updates - 1}")
    return schedule


def possible_batch_sizes(config, num_originals: int) -> np.ndarray:
    """The batch sizes that the run may come to, ascending.

    Raises:
      BadSetting: with batch.auto, the largest is below the smallest.
    """
    schedule = make_schedule(config, num_originals)
    if not config.batch.auto:
        stages = schedule.batch_sizes
        return np.unique((stages if schedule.scale_invariant else stages.cut(schedule.num_updates)).values)
    smallest, epoch_size = schedule.max_batch_size, num_originals * augment.NUM_VIEWS
    largest = resolve_batch_size(config.batch.max_size, epoch_size, field="batch.max_size")
    if largest < smallest:
        raise BadSetting(f"batch.max_size: {largest}; allowed: at least batch.size, {smallest}")
    doublings = smallest * 2 ** np.arange((largest // smallest).bit_length())
    return np.unique([*doublings, largest])


def micro_batch_size(config, num_originals: int, num_devices: int) -> int:
    """Examples per gradient evaluation of one device.

    Raises:
      BadSetting: batch normalisation would see single images.
    """
    batch_sizes, wanted = possible_batch_sizes(config, num_originals), config.batch.micro_batch_size
    needs_noise = config.batch.auto or config.schedule.scaling == "adascale"
    deal = batching.Deal(num_originals, num_devices, augment.NUM_VIEWS)
    share = deal.share_bounds(int(batch_sizes[-1]))[1]
    if wanted == "auto" and num_devices == 1:  # leaves at least two, between which noise is measured
        share = -(-int(batch_sizes[0 if needs_noise else -1]) // 2)
    size = min(resolve_micro_batch_size(wanted), share)
    if config.model.norm == "batch":
        for batch_size in batch_sizes:
            if _smallest_micro_batch(deal.share_bounds(int(batch_size)), size) < 2:
                raise BadSetting(
                    f"model.norm: 'batch' with batches of {batch_size} in micro-batches of up to {size} on "
                    f"{num_devices} devices; allowed: at least 2 images in each, or 'group' or 'none'"
                )
    if needs_noise and (batch_sizes[0] == 1 or (num_devices == 1 and size >= batch_sizes[0])):
        raise BadSetting(
            f"batch.micro_batch_size: {size} for batches from {batch_sizes[0]} on; allowed: at least two "
            "micro-batches with batch.auto or AdaScale, since noise is measured between them"
        )
    return size


def _smallest_micro_batch(share_bounds: tuple[int, int], size: int) -> int:
    """Images in the smallest micro-batch of any share within the bounds; a share is split evenly."""
    fewest, most = share_bounds
    if fewest == 0:
        return 0
    return min(share // -(-share // size) for share in range(fewest, most + 1))


def plan_length(config) -> int:
    """Updates that one call may do: a power of two, so that runs of other inner_steps share its program."""
    return 1 << (config.train.inner_steps - 1).bit_length()


def make_plan(deal: batching.Deal, schedule: schedules.Schedule, length: int, first_update: int) -> Plan:
    """Inputs of `length` updates from `first_update` on."""
    updates = np.arange(first_update, first_update + length, dtype=np.int64)
    return Plan(
        *batching.epoch_and_offset(deal, schedule.batch_sizes.sum_before(updates)),
        schedule.batch_sizes.at(updates).astype(np.int32),
        rates_of(schedule, updates),
    )


def rates_of(schedule: schedules.Schedule, updates: np.ndarray) -> np.ndarray:
    """Rates of `updates`; with AdaScale those of the whole run, and below 0 beyond it, by scale-invariant step."""
    if not schedule.scale_invariant:
        return schedule.rates(updates).astype(np.float32)
    rates = np.full(1 << schedule.num_updates.bit_length(), -1, np.float32)
    rates[: schedule.num_updates] = schedule.rates(np.arange(schedule.num_updates))
    return rates


def make_sync(config) -> local_sgd.Sync:
    """When devices that take local steps synchronise."""
    fields = config.sync
    numbers = np.float32(fields.outer_learning_rate), np.float32(fields.outer_momentum)
    return local_sgd.Sync(np.int32(fields.every), np.int32(fields.start_step), *numbers)


def make_network(config, num_classes: int) -> nn.Module:
    """The network of `config`."""
    conv = models.resolve_conv(config.model.conv, jax.default_backend())
    fields, options = config.model, {}
    if fields.norm != "auto":
        options["norm"] = fields.norm
    if fields.stem != "conv":
        options["stem"] = fields.stem
    return models.create_model(fields.name, num_classes, fields.dtype, conv, zero_head=fields.zero_head, **options)


def optimizer_numbers(config) -> Numbers:
    """The hyper-parameters that are data."""
    fields = {name: config.optimizer[name] for name in Numbers._fields}
    return Numbers(**fields | {"clip_norm": np.inf if fields["clip_norm"] is None else fields["clip_norm"]})


def make_optimizer(config, numbers: Numbers) -> optax.GradientTransformation:
    """The optimizer of `config`, with other hyper-parameters."""
    switches = Switches(**{name: config.optimizer[name] for name in Switches._fields})
    return create_optimizer(config.optimizer.name, numbers, switches)


def make_init(config, cache: Cache) -> Callable[[int, Numbers, np.ndarray | None], TrainState]:
    """(seed, hyper-parameters, kernel of the stem) -> the state before the first update, of one replica."""
    network, keeps_ema = make_network(config, len(cache.class_names)), config.train.ema_decay is not None
    local = config.sync.mode != "every_step"

    def init(seed, numbers, kernel):
        params, model_state = models.init_variables(network, cache.image_shape, seed)
        model_state = models.with_whitening(model_state, kernel)
        optimizer = make_optimizer(config, numbers)
        return create_state(params, optimizer, seed, model_state, ema=keeps_ema, local=local)

    return jax.jit(init)


def tolerated_nonfinite(config) -> int:
    """Updates in a row that may be passed over."""
    return config.train.max_nonfinite if config.train.on_nonfinite == "skip" else 0


def bytes_beside_images(network, state, image_shape, micro_batch_size: int) -> dict[str, int]:
    """Estimate of what a step needs on a device beside the images, in bytes by part; `state` may be shapes."""
    costs = training_costs(network, image_shape)
    return {
        "parameters and optimizer": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "gradients": 3 * 4 * count_params(state.params),  # one micro-batch's, their sum, the flat vector
        f"activations of {micro_batch_size} images": micro_batch_size * costs.activation_bytes,
    }


# ---- shared by the runs of a process ------------------------------------------------------------------


class Programs(NamedTuple):
    """The compiled part of a run, which serves every seed, batch size, schedule and hyper-parameter.

    `predict` takes (variables, images); so does `predict_views`, which averages over the 8 views of an image, or is
    None where the config does not ask for it. `local_loop` and `average` are None where all updates are
    synchronous, `inner_loop` where all are local steps. `bytes_put_in` is what a device puts into the all-reduce
    of a synchronous update, and of a synchronisation after local steps.
    """

    network: nn.Module
    optimizer: optax.GradientTransformation
    read: Callable
    loss_fn: Callable
    init: Callable
    inner_loop: Callable | None
    local_loop: Callable | None
    average: Callable | None
    predict: Callable
    predict_views: Callable | None
    metric_names: tuple[str, ...]
    bytes_put_in: tuple[int, int]


class Shared:
    """Data on the devices and compiled programs, by what shapes them: runs of one process may share both.

    Args:
      packed: each device trains a run of its own, on all of the data.
    """

    def __init__(self, *, packed: bool = False):
        self.packed, self.local_devices = packed, jax.local_devices()
        self._data, self._programs, self._kernel = (None, None), {}, None

    def data(self, config) -> tuple[Cache, augment.Placed]:
        """Places the data set, unless it is there; of several only the latest is kept, for it fills devices."""
        key = json.dumps([config.dataset.to_dict(), config.augment.storage, config.augment.cache_dir])
        if self._data[0] != key:
            self._data, self._kernel = (None, None), None

            def other_bytes(cache):
                shapes = jax.eval_shape(make_init(config, cache), np.uint32(0), Numbers(), np.zeros(()))
                size = micro_batch_size(config, cache.count("train"), 1 if self.packed else jax.device_count())
                return bytes_beside_images(
                    make_network(config, len(cache.class_names)), shapes, cache.image_shape, size
                )

            cache, placed = augment.load_onto_devices(config, other_bytes, packed=self.packed)
            jax.block_until_ready((placed.train, placed.val_images))
            self._data = key, (cache, placed)
        return self._data[1]

    def whitening_kernel(self, config) -> np.ndarray | None:
        """The kernel of the network's frozen stem, if it has one: host 0's, on every host."""
        if config.model.stem != "whitened":
            return None
        if self._kernel is None:

            def read(cache):
                if not collectives.is_primary():
                    return np.zeros(models.whitening_shape(cache.image_shape), np.float32)
                images = augment.read_originals(cache, min(WHITENING_IMAGES, cache.count("train")))
                return models.whitening_kernel(images, cache.manifest["mean"], cache.manifest["std"])

            self._kernel = collectives.from_primary(augment.with_cache(config, read)[1])
        return self._kernel

    def key(self, config) -> tuple:
        """What shapes the programs of `config`; places its data.

        Raises:
          BadSetting: it cannot be packed.
        """
        if self.packed and config.sync.mode != "every_step":
            raise BadSetting(
                f"sync.mode: {config.sync.mode!r}; allowed: 'every_step' where each device has its own run"
            )
        cache, placed = self.data(config)
        schedule = make_schedule(config, cache.count("train"))
        return (
            self._data[0],
            *config.model.values(),
            config.optimizer.name,
            *(config.optimizer[name] for name in Switches._fields),
            config.augment.shift,
            config.train.label_smoothing,
            config.train.ema_decay,
            config.schedule.noise_decay,
            config.schedule.reference_batch_size if config.schedule.scaling == "adascale" else None,
            config.sync.mode,
            config.sync.optimizer_state,
            config.eval.view_average,
            resolve_micro_batch_size(config.batch.micro_batch_size),  # of predictions
            micro_batch_size(config, cache.count("train"), placed.deal.num_devices),
            plan_length(config),
            schedule.num_updates.bit_length() if schedule.scale_invariant else None,  # length of the table of rates
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
        network, manifest, shape = make_network(config, len(cache.class_names)), cache.manifest, cache.image_shape
        scale = manifest["mean"], manifest["std"]
        size = resolve_micro_batch_size(config.batch.micro_batch_size)
        step = self._step(config, cache, placed, make_loss_fn(network, shape, *scale, config.train.label_smoothing))
        logits_fn, predict_views = make_logits_fn(network, shape, *scale), None
        predict = make_predict(logits_fn, size, packed=self.packed)
        if config.eval.view_average:
            averaged = augment.average_over_views(logits_fn, shape)
            predict_views = make_predict(averaged, size, packed=self.packed)
        init, kernel = make_init(config, cache), self.whitening_kernel(config)
        one = init(np.uint32(0), Numbers(), kernel)
        state = replicas.replicate(one, self.local_devices)
        schedule, updates = make_schedule(config, cache.count("train")), np.int32(0)
        plan = make_plan(placed.deal, schedule, plan_length(config), first_update=0)
        if self.packed:
            many = len(self.local_devices)
            plan, updates = jax.tree.map(lambda x: np.stack([x] * many), (plan, updates))
        inner_loop = local_loop = average = None
        names, statistics = {}, tuple({STATISTICS} & set(one.model_state))
        summed = one.params, [one.model_state[name] for name in statistics]
        put_in = [4 * (count_params(summed) + 3), 0]  # and loss, accuracy, noise
        if config.sync.mode != "local":
            inner_loop = make_inner_loop(step)
            state, values = inner_loop(state, placed.train, plan, updates)
            names |= values
        if config.sync.mode != "every_step":
            policy = config.sync.optimizer_state
            local = local_sgd.LocalStep(step._replace(noise_decay=None), policy, statistics)
            local_loop = local_sgd.make_local_loop(local)
            average = local_sgd.make_average(statistics, policy)
            state, values = local_loop(state, placed.train, plan, updates, make_sync(config))
            state, names = average(state), names | values
            put_in[1] = local_sgd.bytes_of_sync(one, statistics, policy)
        for program in filter(None, (predict, predict_views)):
            jax.block_until_ready(program(state.variables, placed.val_images))
        return Programs(
            network, step.optimizer, step.read, step.loss_fn, init, inner_loop, local_loop, average,
            predict, predict_views, tuple(names), tuple(put_in),
        )  # fmt: skip

    def _step(self, config, cache, placed, loss_fn) -> Step:
        return Step(
            loss_fn,
            make_optimizer(config, Numbers()),
            augment.make_read(config.augment.storage, cache.image_shape, config.augment.shift),
            placed.deal,
            micro_batch_size(config, cache.count("train"), placed.deal.num_devices),
            max_nonfinite=tolerated_nonfinite(config),
            statistics_decay=config.model.norm_decay,
            ema_decay=config.train.ema_decay or 0.0,
            noise_decay=config.schedule.noise_decay,
            adascale_reference=(
                config.schedule.reference_batch_size if config.schedule.scaling == "adascale" else None
            ),
            packed=self.packed,
        )
