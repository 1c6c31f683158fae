import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import augment
import model as models
from largebatch.config.fields import OptimizerConfig, TaskConfig
from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping, choose_sharding
from largebatch.data.random_augment import RandomAugment
from largebatch.hosts import replicas
from largebatch.optim.optimizers import create_optimizer
from largebatch.optim.schedules import UpdateInputs, epoch_and_offset
from largebatch.tasks.planes import MASK_PLANES, PixelTargets, split_planes
from largebatch.tasks.task import Classification, Task, make_task
from largebatch.training.loss import Batch, make_loss_fn
from largebatch.training.state import TrainState, create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop
from largebatch.training.views import make_read

NUM_ORIGINALS, SIZE, NUM_CLASSES, MICRO_BATCH_SIZE = 50, 16, 4, 16
MAX_UPDATES = 4
SCALE = (120.0,) * 3, (70.0,) * 3


@dataclasses.dataclass(frozen=True)
class Problem:
    """A training set, the variables to start from and a loss function."""

    task: Task
    images: np.ndarray  # with what is to be predicted of their pixels
    labels: np.ndarray
    params: Any
    model_state: dict
    loss_fn: Callable


def make_problem(network, task=None) -> Problem:
    task = task or Classification(NUM_CLASSES)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_ORIGINALS, SIZE, SIZE, 3 + task.target_planes), np.uint8)
    images[..., 3 : 3 + MASK_PLANES] %= 2
    labels = rng.integers(0, NUM_CLASSES, NUM_ORIGINALS, np.int32)
    params, model_state = models.init_variables(network, (SIZE, SIZE, 3), 0)
    return Problem(task, images, labels, params, model_state, make_loss_fn(network, (SIZE, SIZE, 3), *SCALE, task))


def small_network(dtype="float32"):
    """Two convolutions, which show what four would."""
    return models.ConvNet(NUM_CLASSES, dtype=dtype, conv="dot", features=(8, 16), blocks=(0, 0), hidden=None)


@pytest.fixture(scope="module")
def problem():
    return make_problem(small_network())


@pytest.fixture(scope="module")
def problem_of_maps():
    """A mask of two classes and a depth of 16 bits."""
    config = TaskConfig(name="mask_depth", mask_loss="cross_entropy_dice", depth_loss="berhu", depth_weight=2.0)
    task = make_task(config, 0, PixelTargets(("floor", "thing"), has_depth=True))
    network = models.ResUNet(task.outputs, conv="dot", features=(8, 16), blocks=(1, 1))
    return make_problem(network, task)


def place(images, labels, num_devices, storage="expanded"):
    """A sharding of these images, and the data on the devices."""
    sharding = choose_sharding(None, len(images), num_devices, 8)
    shards = []
    for index, device in enumerate(jax.local_devices()[:num_devices]):
        originals = sharding.originals_of(index, seed=0)
        padding = sharding.max_originals - len(originals)
        views = augment.expand(images[originals], 8) if storage == "expanded" else images[originals][:, None]
        views = np.pad(views, ((0, padding), *((0, 0),) * 4)).reshape(1, -1, images[0].size)
        rows = {"images": views, "labels": np.pad(labels[originals], (0, padding))[None]}
        shards.append(jax.device_put(rows, device))
    return sharding, replicas.stack(shards)


def inputs_of(sharding, batch_sizes, learning_rate=1.0, examples_before=0) -> UpdateInputs:
    """The inputs of updates with these batch sizes, padded to MAX_UPDATES."""
    starts = examples_before + np.cumsum([0, *batch_sizes[:-1]])
    padding = (0, MAX_UPDATES - len(batch_sizes))
    epoch, offset = epoch_and_offset(np.pad(starts, padding), sharding.num_examples)
    rates = np.broadcast_to(np.float32(learning_rate), len(batch_sizes))
    return UpdateInputs(
        epoch=epoch,
        offset=offset,
        batch_size=np.pad(np.int32(batch_sizes), padding, constant_values=1),
        learning_rate=np.pad(rates, padding),
        b2=np.full(MAX_UPDATES, 0.999, np.float32),
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """An inner loop with the data that it runs on."""

    sharding: DataSharding
    data: Any
    loop: Callable
    one_replica: TrainState  # before the first update

    def first_state(self) -> TrainState:
        """A new one at every call, since the loop takes its memory."""
        return replicas.replicate(self.one_replica, replicas.local_devices_of(self.data))

    def run(self, batch_sizes, learning_rate=1.0, examples_before=0, state=None):
        """The state after updates with these batch sizes, and the metrics."""
        inputs = inputs_of(self.sharding, batch_sizes, learning_rate, examples_before)
        return self.loop(state or self.first_state(), self.data, inputs, np.int32(len(batch_sizes)))

    def compiled_text(self) -> str:
        """The compiled program."""
        inputs = inputs_of(self.sharding, [64])
        return self.loop.lower(self.first_state(), self.data, inputs, np.int32(1)).compile().as_text()


def make_trainer(
    problem: Problem,
    optimizer,
    num_devices,
    *,
    storage="expanded",
    random_augment=None,
    micro_batch_size=MICRO_BATCH_SIZE,
    ghost_size=None,
    **options,
) -> Trainer:
    """A trainer whose TrainStep has these `options`."""
    sharding, data = place(problem.images, problem.labels, num_devices, storage)
    read = make_read(storage, problem.images.shape[1:], 8, problem.task, random_augment)
    reader = MicroBatchReader(read, sharding, Grouping(micro_batch_size, ghost_size or micro_batch_size))
    loop = make_inner_loop(TrainStep(problem.loss_fn, optimizer, reader, **options))
    keeps_ema = "ema_decay" in options
    state = create_train_state(problem.params, optimizer, 0, problem.model_state, ema=keeps_ema)
    return Trainer(sharding, data, loop, state)


def sgd_trainer(problem: Problem, num_devices, **options) -> Trainer:
    """Plain SGD; options as of `make_trainer`."""
    optimizer = create_optimizer(OptimizerConfig(name="sgd", momentum=0.0))
    return make_trainer(problem, optimizer, num_devices, **options)


def gradient_of_one_update(params, state):
    """With plain SGD at rate 1 the update is the gradient."""
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new)[0], params, state.params)


def assert_trees_close(one, other, tolerance):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)


@partial(jax.jit, static_argnums=0)
def whole_device_batch(sharding, device, epoch, offset, batch_size) -> batching.MicroBatchIndices:
    """All that falls to a device, in one micro-batch."""
    batch = batching.device_batch(sharding, device, epoch, offset, batch_size)
    return batching.micro_batch(sharding, batch, 0, Grouping(sharding.num_examples, sharding.num_examples), 0)


def examples_of(sharding, device, epoch, offset, batch_size) -> np.ndarray:
    """The examples of a batch that fall to a device, by its own numbering."""
    chosen = whole_device_batch(sharding, device, epoch, offset, batch_size)
    return np.asarray(chosen.examples)[np.asarray(chosen.weights) == 1]


def visited_examples(sharding, epoch, offset, batch_size) -> list[int]:
    """Global expanded indices of a batch, from the functions that the device uses."""
    visited = []
    for device in range(sharding.num_devices):
        examples = examples_of(sharding, device, epoch, offset, batch_size)
        originals = sharding.originals_of(device, seed=0)
        visited += (originals[examples // 8] * 8 + examples % 8).tolist()
    return visited


@pytest.mark.parametrize("num_devices", [*(pytest.param(few, marks=pytest.mark.full) for few in (1, 2)), 8])
def test_summed_gradient_equals_the_full_batch_gradient_with_one_compilation(problem, num_devices):
    traces = []

    def counted(*arguments):
        traces.append(1)
        return problem.loss_fn(*arguments)

    trainer = sgd_trainer(dataclasses.replace(problem, loss_fn=counted), num_devices)
    num_examples = trainer.sharding.num_examples
    expanded = augment.expand(problem.images, 8).reshape(-1, SIZE, SIZE, 3)
    traces_of_first_size = 0
    reference = jax.jit(jax.value_and_grad(problem.loss_fn, has_aux=True))
    for batch_size in (1, 7, 50, 256, num_examples):
        state, metrics = trainer.run([batch_size])
        rows = visited_examples(trainer.sharding, 0, 0, batch_size)
        assert len(set(rows)) == len(rows) == batch_size
        weights = np.zeros(num_examples, np.float32)
        weights[rows] = 1 / batch_size
        batch = Batch(expanded, np.repeat(problem.labels, 8), weights[None])
        (loss, sums), grads = reference(problem.params, {}, batch)
        # Sums of up to 400 float32 gradients in another order: 1e-6 of the largest entry.
        assert_trees_close(grads, gradient_of_one_update(problem.params, state), 2e-6)
        np.testing.assert_allclose(metrics["loss"][0], loss, rtol=2e-6)
        np.testing.assert_allclose(metrics["accuracy"][0], sums.metrics["accuracy"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"][0], optax.tree.norm(grads), rtol=1e-5)
        traces_of_first_size = traces_of_first_size or len(traces)
        assert len(traces) == traces_of_first_size  # no other size traced, so none compiled, anything


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_gradient_of_maps_equals_the_full_batch_gradient(problem_of_maps, num_devices):
    """Masks and depths are read, turned and sharded with their images, and each image has losses of its own."""
    problem = problem_of_maps
    trainer = sgd_trainer(problem, num_devices, storage="on_device")
    expanded = augment.expand(problem.images, 8).reshape(-1, *problem.images.shape[1:])
    images, planes = split_planes(expanded, problem.task.target_planes)
    of_one = jax.jit(jax.value_and_grad(problem.loss_fn, has_aux=True))
    for batch_size in (7, 133):
        state, metrics = trainer.run([batch_size])
        rows = visited_examples(trainer.sharding, 0, 0, batch_size)
        batches = [Batch(images[[r]], planes[[r]], np.ones((1, 1))) for r in rows]
        each = [of_one(problem.params, {}, batch) for batch in batches]
        # Added in float64: what is left is the rounding of the step.
        (loss, sums), grads = jax.tree.map(lambda *parts: np.mean(parts, axis=0, dtype=np.float64), *each)
        assert_trees_close(grads, gradient_of_one_update(problem.params, state), 1e-6)
        np.testing.assert_allclose(metrics["loss"][0], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["depth_error"][0], sums.metrics["depth_error"], rtol=1e-5)


@pytest.mark.full
def test_expanded_and_on_device_storage_give_the_same_gradients(problem):
    gradients, losses = [], []
    for storage in ("expanded", "on_device"):
        state, metrics = sgd_trainer(problem, 2, storage=storage).run([133])
        gradients.append(gradient_of_one_update(problem.params, state))
        losses.append(float(metrics["loss"][0]))
    assert_trees_close(*gradients, 1e-7)
    assert losses[0] == losses[1]


@pytest.mark.full
def test_randomly_changed_images_give_the_same_gradients_on_any_devices(problem):
    """In another epoch they are changed otherwise."""
    everything = RandomAugment(
        crop_scale=0.5, shift=2, brightness=0.3, contrast=0.3, cutout=4, fill=(120.0, 130.0, 140.0)
    )

    def gradient_of_an_epoch(num_devices, random_augment, epoch):
        trainer = sgd_trainer(problem, num_devices, random_augment=random_augment)
        size = trainer.sharding.num_examples
        state, _ = trainer.run([size], examples_before=epoch * size)
        return gradient_of_one_update(problem.params, state)

    on_one_device = gradient_of_an_epoch(1, everything, epoch=0)
    on_four_devices = gradient_of_an_epoch(4, everything, epoch=0)
    not_changed = gradient_of_an_epoch(1, RandomAugment(), epoch=0)
    later = gradient_of_an_epoch(4, everything, epoch=1)
    assert_trees_close(on_one_device, on_four_devices, 2e-6)
    for other in (not_changed, later):
        with pytest.raises(AssertionError):
            assert_trees_close(on_one_device, other, 1e-3)


def test_results_do_not_depend_on_how_the_loop_is_cut(problem):
    trainer = sgd_trainer(problem, 2)
    sizes, rates = [300, 7, 256, 90], [0.1, 0.3, 0.02, 0.2]  # crosses the end of the first epoch
    whole, metrics = trainer.run(sizes, rates)
    state, values = trainer.run(sizes[:1], rates[:1])
    losses = np.asarray(values["loss"])[:1].tolist()
    state, values = trainer.run(sizes[1:], rates[1:], examples_before=sizes[0], state=state)
    losses += np.asarray(values["loss"])[:3].tolist()
    assert losses == np.asarray(metrics["loss"]).tolist()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert np.asarray(state.step).tolist() == [4, 4]


@pytest.mark.parametrize("name", ["problem", pytest.param("problem_of_maps", marks=pytest.mark.full)])
def test_one_all_reduce_and_no_other_collective(name, request):
    text = sgd_trainer(request.getfixturevalue(name), 8).compiled_text()
    calls = [line for line in text.splitlines() if "all-reduce(" in line or "all-reduce-start(" in line]
    assert len(calls) == 1, calls
    for other in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f"{other}(" not in text


def test_everything_that_crosses_devices_goes_through_reduce(problem):
    reduced = []

    def stay_on_device(tree):
        reduced.append(jax.tree.structure(tree))
        return tree

    state, _ = sgd_trainer(problem, 2, reduce=stay_on_device).run([64])
    one, other = (jax.tree.map(lambda x, d=d: np.asarray(x)[d], state.params) for d in (0, 1))
    assert len(set(reduced)) == 1  # the loss, the averages and the gradients, together
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_learning_rate_is_data(problem):
    trainer = sgd_trainer(problem, 1)
    half, whole = (gradient_of_one_update(problem.params, trainer.run([64], rate)[0]) for rate in (0.5, 1.0))
    assert_trees_close(jax.tree.map(lambda x: 2 * x, half), whole, 1e-6)


def test_golden_first_step():
    """Recorded once; a doubled rate, a sum in place of a mean or another normalisation all miss it."""
    problem = make_problem(models.create_model("convnet", NUM_CLASSES, "float32", "dot"))
    trainer = make_trainer(problem, create_optimizer(OptimizerConfig(name="lamb")), 2)

    def first_step(rate):
        state, metrics = trainer.run([trainer.sharding.num_examples], rate)
        params = replicas.first_replica(state.params)
        distance = optax.tree.norm(jax.tree.map(lambda a, b: a - b, params, problem.params))
        return {"loss": metrics["loss"][0], "grad_norm": metrics["grad_norm"][0], "distance": distance}

    golden = {"loss": 1.3851700, "grad_norm": 0.1954451, "distance": 0.3499827}
    step = first_step(0.01)
    for name, value in golden.items():
        np.testing.assert_allclose(step[name], value, rtol=1e-4, err_msg=name)
    assert abs(first_step(0.02)["distance"] / golden["distance"] - 2) < 0.01


def test_bfloat16_keeps_float32_parameters(problem):
    state, metrics = sgd_trainer(make_problem(small_network(jnp.bfloat16)), 1).run([400])
    _, exact = sgd_trainer(problem, 1).run([400])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(metrics["loss"][0], exact["loss"][0], rtol=2e-2)
    assert float(metrics["loss"][0]) != float(exact["loss"][0])
