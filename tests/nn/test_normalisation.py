"""Batch normalisation by ghost batches, the whitened stem, moving averages and averages over views."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import (
    NUM_CLASSES,
    SCALE,
    SIZE,
    Images,
    assert_trees_close,
    gradient_of_one_step,
    make_problem,
)

import augment
import model as models
from largebatch.hosts import replicas
from largebatch.nn import layers
from largebatch.optim.noise_scale import NoisePlan
from largebatch.tasks.task import Classification
from largebatch.training.loss import Batch, make_logits_fn, make_loss_fn

STATISTICS = layers.STATISTICS


@pytest.fixture(scope="module")
def images_and_labels():
    rng = np.random.default_rng(0)
    smooth_images = rng.integers(60, 190, (48, 4, 4, 3)).repeat(4, 1).repeat(4, 2) + rng.integers(
        -40, 40, (48, 16, 16, 3)
    )
    return smooth_images.clip(0, 255).astype(np.uint8), rng.integers(0, NUM_CLASSES, 48, np.int32)


def make_network(**options):
    """Two layers: what is tested here is the same in each."""
    return models.ConvNet(NUM_CLASSES, conv="dot", features=(4,), blocks=(1,), hidden=None, **options)


# ---- one layer --------------------------------------------------------------------------------------


def test_batch_norm_is_that_of_numpy_for_each_ghost_batch():
    """Three groups of 4, one of them without an image: its padding stays finite and counts nowhere."""
    x, scale = np.random.default_rng(0).normal(1, 2, (12, 3, 3, 5)).astype(np.float32), np.arange(1, 6)
    x[4:8] += 10
    x[7] = 1e3  # padding
    weights = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], np.float32)
    layer = layers.BatchNorm()
    variables = layer.init(jax.random.key(0), x, weights)
    variables["params"]["scale"] = scale.astype(np.float32)
    y, new = layer.apply(variables, x, weights, mutable=[STATISTICS])
    groups = [x[0:4], x[4:7]]
    for normalised, group in zip((y[0:4], y[4:7]), groups, strict=True):
        expected = (group - group.mean((0, 1, 2))) / np.sqrt(group.var((0, 1, 2)) + 1e-5) * scale
        np.testing.assert_allclose(normalised, expected, atol=1e-3)
    for name, of_group in (("mean", np.mean), ("variance", np.var)):
        expected = np.average([of_group(group, (0, 1, 2)) for group in groups], axis=0, weights=[4, 3])
        np.testing.assert_allclose(new[STATISTICS][name], expected, rtol=1e-4)
    assert np.isfinite(y).all()
    # Evaluation normalises by what it is given, one image like many.
    given = {"params": variables["params"], STATISTICS: {"mean": np.ones(5), "variance": np.full(5, 4.0)}}
    np.testing.assert_allclose(layer.apply(given, x[:1]), (x[:1] - 1) / np.sqrt(4 + 1e-5) * scale, atol=1e-4)


# ---- in the step ------------------------------------------------------------------------------------


def batch_norm_problem(images, labels, stem="conv") -> Images:
    network = make_network(norm="batch", stem=stem)
    params, model_state = models.init_variables(network, (SIZE, SIZE, 3), 0)
    if stem == "whitened":
        model_state = models.with_whitening(model_state, models.whitening_kernel(network, images, *SCALE))
    task = Classification(NUM_CLASSES)
    loss_fn = make_loss_fn(network, (SIZE, SIZE, 3), *SCALE, task)
    return Images(task, images, labels, params, model_state, loss_fn)


def test_running_statistics_are_those_of_the_micro_batches_with_one_all_reduce(images_and_labels):
    """384 examples on 8 devices are a micro-batch of 48 each."""
    images, labels = images_and_labels
    problem = batch_norm_problem(images, labels)
    trainer = make_problem(problem, 8, micro_batch_size=48)
    model_state = replicas.first_replica(trainer.run_sizes([384])[0]).model_state
    expanded, _ = problem.expanded()
    loss_fn, statistics = jax.jit(problem.loss_fn), []
    for device in range(8):
        originals = trainer.sharding.originals_of(device, seed=0)
        examples = (originals[:, None] * 8 + np.arange(8)).ravel()
        micro_batch = Batch(expanded[examples], labels[examples // 8], jnp.ones((1, len(examples))))
        statistics.append(loss_fn(problem.params, problem.model_state, micro_batch)[1].statistics[STATISTICS])
    expected = jax.tree.map(lambda *parts: sum(parts) / 384, *statistics)  # in plain Python, one by one
    for a, b in zip(jax.tree.leaves(model_state[STATISTICS]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert trainer.collectives() == [("all-reduce", 1)]


def test_ghost_batches_do_not_depend_on_how_many_are_taken_at_once(images_and_labels):
    """The same gradients and statistics one by one, as in a step that measures the noise, and three at once.

    Batches are even and ragged.
    """
    problem, plan = batch_norm_problem(*images_and_labels), NoisePlan(0.98, 3, (8,), 8)
    trainer = make_problem(problem, 2, micro_batch_size=24, ghost_size=8, noise=plan)
    for batch_size in (384, 200, 61, 24):
        measuring, plain = (trainer.first_state().replace(step=np.full(2, step, np.int32)) for step in (0, 1))
        one_by_one, losses = trainer.run_sizes([batch_size], state=measuring)
        at_once, losses_at_once = trainer.run_sizes([batch_size], state=plain)
        assert [int(replicas.first_replica(state.noise.count)) for state in (one_by_one, at_once)] == [1, 0]
        gradients = (gradient_of_one_step(problem.params, state) for state in (one_by_one, at_once))
        assert_trees_close(*gradients, tolerance=1e-6)
        statistics = (replicas.first_replica(state).model_state for state in (one_by_one, at_once))
        assert_trees_close(*statistics, tolerance=1e-6)
        np.testing.assert_allclose(losses["loss"], losses_at_once["loss"], rtol=1e-6)


def test_moving_averages_hold_every_step_and_the_stem_stays_as_it_is(images_and_labels):
    problem = batch_norm_problem(*images_and_labels, stem="whitened")
    trainer = make_problem(problem, 2, ema_decay=0.5)
    states = [replicas.first_replica(trainer.run_sizes([96] * steps, 0.5)[0]) for steps in (1, 2, 3)]
    first, second, third = (jax.tree.map(np.asarray, state.params) for state in states)
    expected = jax.tree.map(lambda a, b, c: (a + b) / 4 + c / 2, first, second, third)
    assert_trees_close(expected, states[2].ema["params"], tolerance=1e-6)
    with pytest.raises(AssertionError):
        assert_trees_close(second, third, tolerance=1e-3)  # they moved
    frozen = problem.model_state["frozen"]["WhitenedPatches_0"]["kernel"]
    assert np.abs(frozen).max() > 0
    np.testing.assert_array_equal(states[2].model_state["frozen"]["WhitenedPatches_0"]["kernel"], frozen)


# ---- averages, heads and losses ----------------------------------------------------------------------


@pytest.mark.parametrize("num_views", [1, 8])
def test_views_are_averaged_once_each_and_moved_copies_have_half_of_the_weight(num_views):
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 6, 3), np.uint8)
    weights = np.random.default_rng(1).standard_normal((6 * 6 * 3, 4))

    def squares(variables, images):
        return (images.reshape(len(images), -1).astype(jnp.float32) / 255) ** 2 @ variables

    average = augment.average_over_copies(squares, num_views=num_views, shift=2)
    averaged = average(jnp.float32(weights), jnp.asarray(images))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    copies = [images, images, padded[:, 4:10, 4:10], padded[:, 0:6, 0:6]]  # a quarter each
    views = [augment.apply_view(copy, view) for copy in copies for view in range(num_views)]
    expected = np.mean([(view.reshape(5, -1) / 255) ** 2 @ weights for view in views], axis=0)
    np.testing.assert_allclose(averaged, expected, atol=1e-4)


def test_a_zero_head_gives_every_class_the_same_chance():
    network = make_network(zero_head=True)
    params, _ = models.init_variables(network, (SIZE, SIZE, 3), 0)
    images = np.random.default_rng(0).standard_normal((2, SIZE, SIZE, 3)).astype(np.float32)
    logits = jax.jit(network.apply)({"params": params}, images)
    np.testing.assert_array_equal(logits, np.zeros((2, NUM_CLASSES)))


def test_label_smoothing_by_hand():
    network = make_network()
    params, _ = models.init_variables(network, (SIZE, SIZE, 3), 0)
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE * SIZE * 3), np.uint8)
    labels, weights = jnp.array([0, 2, 1]), jnp.array([1.0, 1.0, 0.0])
    loss_fn = jax.jit(make_loss_fn(network, (SIZE, SIZE, 3), *SCALE, Classification(NUM_CLASSES, 0.2)))
    loss, _ = loss_fn(params, {}, Batch(images, labels, weights[None]))
    logits = jax.jit(make_logits_fn(network, (SIZE, SIZE, 3), *SCALE))({"params": params}, images)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    targets = np.full((3, NUM_CLASSES), 0.05) + 0.8 * np.eye(NUM_CLASSES)[np.asarray(labels)]
    assert float(loss) == pytest.approx(-(targets * log_p).sum(axis=1)[:2].sum(), rel=1e-5)


# ---- activation -------------------------------------------------------------------------------------


def test_gelu_has_the_value_and_gradient_of_the_formula_and_keeps_its_input_alone():
    def numpy_gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x, step = np.linspace(-6, 6, 101), 1e-4
    slope = (numpy_gelu(x + step) - numpy_gelu(x - step)) / (2 * step)
    values, gradients = jax.vmap(jax.value_and_grad(layers.gelu))(x.astype(np.float32))
    np.testing.assert_allclose(values, numpy_gelu(x), atol=1e-6)
    np.testing.assert_allclose(gradients, slope, atol=4e-6)
    for dtype in (jnp.float32, jnp.bfloat16):
        _, backward = jax.vjp(layers.gelu, jnp.zeros((4, 8), dtype))
        kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape]
        assert [(leaf.shape, leaf.dtype) for leaf in kept] == [((4, 8), dtype)]


@pytest.mark.parametrize("norm", sorted(layers.NORMS))
def test_gelu_is_in_the_dtype_of_the_convolution(norm):
    images = jnp.zeros((2, 16, 16, 3))
    for conv, dtype in (("dot", "f32"), ("lax", "bf16")):
        network = models.create_model("resconvnet", 10, "bfloat16", conv, norm=norm)
        variables = jax.eval_shape(network.init, jax.random.key(0), images)
        text = str(jax.make_jaxpr(network.apply)(variables, images))
        assert re.findall(r":(\w+)\[[\d,]+\] = tanh", text) == [dtype] * 6
