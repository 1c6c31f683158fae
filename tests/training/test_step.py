"""Gradients and steps of images on several devices, against those of the whole batch at once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import PLAIN_SGD, Problem, inputs_of, place

import augment
import model as models
from largebatch.config.fields import OptimizerConfig, TaskConfig
from largebatch.data.batching import Grouping, choose_sharding
from largebatch.data.random_augment import RandomAugment
from largebatch.hosts import replicas
from largebatch.optim.optimizers import create_optimizer
from largebatch.tasks.planes import MASK_PLANES, PixelTargets, split_planes
from largebatch.tasks.task import Classification, Task, make_task
from largebatch.training.loss import Batch, make_loss_fn
from largebatch.training.step import MicroBatchReader, TrainStep
from largebatch.training.views import make_read

NUM_IMAGES, SIZE, NUM_CLASSES = 50, 16, 4
SCALE = (120.0,) * 3, (70.0,) * 3


@dataclasses.dataclass(frozen=True)
class Images:
    """A training set, the variables to start from and a loss function."""

    task: Task
    images: np.ndarray  # with what is to be predicted of their pixels
    labels: np.ndarray
    params: Any
    model_state: dict
    loss_fn: Callable

    def expanded(self) -> tuple[np.ndarray, np.ndarray]:
        """All views of all images, and their targets."""
        views = augment.expand(self.images, 8).reshape(-1, *self.images.shape[1:])
        images, planes = split_planes(views, self.task.target_planes)
        return images, planes if self.task.target_planes else np.repeat(self.labels, 8)


def make_images(network, task=None) -> Images:
    task = task or Classification(NUM_CLASSES)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_IMAGES, SIZE, SIZE, 3 + task.target_planes), np.uint8)
    images[..., 3 : 3 + MASK_PLANES] %= 2
    labels = rng.integers(0, NUM_CLASSES, NUM_IMAGES, np.int32)
    params, model_state = models.init_variables(network, (SIZE, SIZE, 3), 0)
    return Images(task, images, labels, params, model_state, make_loss_fn(network, (SIZE, SIZE, 3), *SCALE, task))


def small_network(dtype="float32"):
    """Two convolutions, which show what four would."""
    return models.ConvNet(NUM_CLASSES, dtype=dtype, conv="dot", features=(8, 16), blocks=(0, 0), hidden=None)


@pytest.fixture(scope="module")
def images():
    return make_images(small_network())


@pytest.fixture(scope="module")
def maps():
    """A mask of two classes and a depth of 16 bits."""
    config = TaskConfig(name="mask_depth", mask_loss="cross_entropy_dice", depth_loss="berhu", depth_weight=2.0)
    task = make_task(config, 0, PixelTargets(("floor", "thing"), has_depth=True))
    return make_images(models.ResUNet(task.outputs, conv="dot", features=(8,), blocks=(1,)), task)


def make_problem(
    images: Images,
    num_devices,
    optimizer=PLAIN_SGD,
    *,
    storage="expanded",
    random_augment=None,
    micro_batch_size=16,
    ghost_size=None,
    **options,
) -> Problem:
    """A problem whose TrainStep has these `options`."""

    def arrays_of(originals):
        rows = images.images[originals]
        rows = augment.expand(rows, 8) if storage == "expanded" else rows
        return {"images": rows.reshape(-1, images.images[0].size), "labels": images.labels[originals]}

    sharding = choose_sharding(None, len(images.images), num_devices, 8)
    read = make_read(storage, images.images.shape[1:], 8, images.task, random_augment)
    reader = MicroBatchReader(read, sharding, Grouping(micro_batch_size, ghost_size or micro_batch_size))
    step = TrainStep(images.loss_fn, create_optimizer(optimizer), reader, **options)
    return Problem(step, place(sharding, arrays_of), images.params, images.model_state)


def gradient_of_one_step(params, state):
    """With plain SGD at rate 1 the step is the gradient."""
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new)[0], params, state.params)


def assert_trees_close(one, other, tolerance):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)


# ---- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "storage", "num_devices", "batch_sizes"),
    [
        ("images", "expanded", 1, (50, 400)),
        ("images", "on_device", 2, (1, 133, 400)),
        ("images", "expanded", 8, (1, 7, 256, 400)),
        pytest.param("maps", "on_device", 8, (7, 133), marks=pytest.mark.full),
    ],
)
def test_the_gradient_is_that_of_the_full_batch_with_one_compilation(
    request, name, storage, num_devices, batch_sizes
):
    """Masks and depths are read, turned and sharded with their images, and each image has losses of its own."""
    images, traces = request.getfixturevalue(name), []

    def counted(*arguments):
        traces.append(1)
        return images.loss_fn(*arguments)

    problem = make_problem(dataclasses.replace(images, loss_fn=counted), num_devices, storage=storage)
    reference, traces_of_first_size = jax.jit(jax.value_and_grad(images.loss_fn, has_aux=True)), 0
    for batch_size in batch_sizes:
        state, metrics = problem.run_sizes([batch_size])
        rows = problem.all_examples(inputs_of([batch_size], 400, 1.0), 0)
        assert len(set(rows.tolist())) == len(rows) == batch_size
        weights = np.zeros(400, np.float32)
        weights[rows] = 1 / batch_size
        (loss, sums), grads = reference(images.params, {}, Batch(*images.expanded(), weights[None]))
        # Sums of up to 400 float32 gradients in another order: 1e-6 of the largest entry.
        assert_trees_close(grads, gradient_of_one_step(images.params, state), 2e-6)
        np.testing.assert_allclose(metrics["loss"][0], loss, rtol=2e-6)
        np.testing.assert_allclose(metrics["grad_norm"][0], optax.tree.norm(grads), rtol=1e-5)
        for metric, value in sums.metrics.items():
            np.testing.assert_allclose(metrics[metric][0], value, rtol=1e-5, err_msg=metric)
        traces_of_first_size = traces_of_first_size or len(traces)
        assert len(traces) == traces_of_first_size  # no other size traced, so none compiled, anything


@pytest.mark.full
def test_randomly_changed_images_give_the_same_gradients_on_any_devices(images):
    """In another epoch they are changed otherwise."""
    everything = RandomAugment(
        crop_scale=0.5, shift=2, brightness=0.3, contrast=0.3, cutout=4, fill=(120.0, 130.0, 140.0)
    )
    one, four, plain = (
        make_problem(images, num_devices, random_augment=random_augment)
        for num_devices, random_augment in ((1, everything), (4, everything), (1, RandomAugment()))
    )

    def gradient(problem, epoch=0):
        return gradient_of_one_step(images.params, problem.run_sizes([400], before=epoch * 400)[0])

    expected = gradient(one)
    assert_trees_close(expected, gradient(four), 2e-6)
    for other in (gradient(plain), gradient(four, epoch=1)):
        with pytest.raises(AssertionError):
            assert_trees_close(expected, other, 1e-3)


# Muon and LAMB divide by norms of gradients, and so make more of a difference. Seen: 6e-8, 1e-7 and 1e-6.
@pytest.mark.parametrize(
    ("name", "rate", "bound"),
    [
        pytest.param("sgd", 0.05, 1e-6, marks=pytest.mark.full),
        ("lamb", 0.01, 3e-6),
        pytest.param("muon", 0.02, 3e-5, marks=pytest.mark.full),
    ],
)
def test_parameters_after_20_steps_on_7_devices_are_those_on_one(images, name, rate, bound):
    """7 devices hold the images unevenly."""
    problems = (make_problem(images, num_devices, OptimizerConfig(name)) for num_devices in (1, 7))
    one, several = (replicas.first_replica(problem.run_sizes([64] * 20, rate)[0].params) for problem in problems)
    norm = optax.tree.norm(one)
    assert optax.tree.norm(optax.tree.sub(several, one)) < bound * norm
    assert optax.tree.norm(optax.tree.sub(one, images.params)) > 1e-2 * norm  # they moved


# ---- the loop -----------------------------------------------------------------------------------------------


def test_results_do_not_depend_on_how_the_loop_is_cut(images):
    problem = make_problem(images, 8)
    sizes, rates = [300, 7, 256, 90], [0.1, 0.3, 0.02, 0.2]  # crosses the end of the first epoch
    whole, metrics = problem.run_sizes(sizes, rates)
    state, values = problem.run_sizes(sizes[:1], rates[:1])
    losses = np.asarray(values["loss"])[:1].tolist()
    state, values = problem.run_sizes(sizes[1:], rates[1:], sizes[0], state)
    losses += np.asarray(values["loss"])[:3].tolist()
    assert losses == np.asarray(metrics["loss"])[:4].tolist()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert np.asarray(state.step).tolist() == [4] * 8


def test_one_all_reduce_and_no_other_collective(images):
    assert make_problem(images, 8).collectives() == [("all-reduce", 1)]


def test_bfloat16_gives_float32_gradients(images):
    in_bfloat16, (pixels, labels) = make_images(small_network(jnp.bfloat16)), images.expanded()
    batch = Batch(pixels[:40], labels[:40], jnp.ones((1, 40)))
    loss, exact = (float(jax.jit(one.loss_fn)(images.params, {}, batch)[0]) for one in (in_bfloat16, images))
    assert loss == pytest.approx(exact, rel=2e-2)
    assert loss != exact
    gradients = jax.eval_shape(jax.grad(lambda params: in_bfloat16.loss_fn(params, {}, batch)[0]), images.params)
    assert {leaf.dtype for leaf in jax.tree.leaves((gradients, in_bfloat16.params))} == {jnp.dtype("float32")}
