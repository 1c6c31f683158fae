"""Batch normalisation by ghost batches, the whitened stem, moving averages and averages over views."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import typed
from test_step import (
    NUM_CLASSES,
    SCALE,
    SIZE,
    Problem,
    assert_trees_close,
    gradient_of_one_update,
    sgd_trainer,
    visited_examples,
)

import augment
import model as models
import train
from largebatch.data import batching
from largebatch.data.batching import Grouping
from largebatch.hosts import replicas
from largebatch.nn import layers
from largebatch.optim.noise_scale import NoisePlan
from largebatch.tasks.task import Classification
from largebatch.training.loss import Batch, make_logits_fn, make_loss_fn
from largebatch.util import UserError

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
    return models.ConvNet(NUM_CLASSES, conv="dot", features=(4, 8), blocks=(0, 1), hidden=None, **options)


# ---- one layer --------------------------------------------------------------------------------------


def test_batch_norm_is_that_of_numpy_and_passes_padding_over():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (6, 4, 4, 5)).astype(np.float32)
    x[4:] = 1e3  # padding
    layer, weights = layers.BatchNorm(), jnp.array([[1, 1, 1, 1, 0, 0.0]])
    variables = layer.init(jax.random.key(0), x, weights)
    variables["params"]["scale"] = np.arange(1, 6, dtype=np.float32)
    y, new = layer.apply(variables, x, weights, mutable=[STATISTICS])
    mean, variance = x[:4].mean((0, 1, 2)), x[:4].var((0, 1, 2))
    np.testing.assert_allclose(new[STATISTICS]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(new[STATISTICS]["variance"], variance, rtol=1e-4)
    expected = (x[:4] - mean) / np.sqrt(variance + 1e-5) * np.arange(1, 6)
    np.testing.assert_allclose(y[:4], expected, atol=1e-4)
    # Evaluation normalises by what it is given, one image like many.
    given = {"params": variables["params"], STATISTICS: {"mean": np.ones(5), "variance": np.full(5, 4.0)}}
    one = layer.apply(given, x[:1])
    np.testing.assert_allclose(one, (x[:1] - 1) / np.sqrt(4 + 1e-5) * np.arange(1, 6), atol=1e-4)


def test_ghost_batches_at_once_are_normalised_each_by_itself():
    """Three groups of 4, one of them without an image: its padding stays finite and counts nowhere."""
    x = np.random.default_rng(0).normal(1, 2, (12, 3, 3, 5)).astype(np.float32)
    x[4:8] += 10
    weights = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], np.float32)
    layer = layers.BatchNorm()
    variables = layer.init(jax.random.key(0), x, weights)
    y, new = layer.apply(variables, x, weights, mutable=[STATISTICS])
    groups = [x[0:4], x[4:7]]
    for normalised, group in zip((y[0:4], y[4:7]), groups, strict=True):
        expected = (group - group.mean((0, 1, 2))) / np.sqrt(group.var((0, 1, 2)) + 1e-5)
        np.testing.assert_allclose(normalised, expected, atol=1e-4)
    for name, of_group in (("mean", np.mean), ("variance", np.var)):
        expected = np.average([of_group(group, (0, 1, 2)) for group in groups], axis=0, weights=[4, 3])
        np.testing.assert_allclose(new[STATISTICS][name], expected, rtol=1e-4)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("norm", sorted(layers.NORMS))
def test_gelu_is_in_the_dtype_of_the_convolution(norm):
    """Not in bfloat16 behind "dot", which gives float32: on a CPU that is slow."""
    for conv, dtype in (("dot", "f32"), ("lax", "bf16")):
        network = models.create_model("resconvnet", 10, "bfloat16", conv, norm=norm)
        images = jnp.zeros((2, 16, 16, 3))
        variables = jax.eval_shape(network.init, jax.random.key(0), images)
        dtypes = re.findall(r":(\w+)\[[\d,]+\] = tanh", str(jax.make_jaxpr(network.apply)(variables, images)))
        assert dtypes == [dtype] * 6


def test_group_norm_knows_no_other_image():
    x = np.random.default_rng(0).standard_normal((3, 4, 4, 16)).astype(np.float32)
    layer = layers.GroupNorm()
    variables = layer.init(jax.random.key(0), x)
    np.testing.assert_allclose(layer.apply(variables, x)[:1], layer.apply(variables, x[:1]), atol=1e-6)
    scaled = x * np.arange(1, 17, dtype=np.float32)
    grouped = np.asarray(layer.apply(variables, scaled)).reshape(3, 16, 8, 2)  # 8 groups of 2
    np.testing.assert_allclose(grouped.mean((1, 3)), np.zeros((3, 8)), atol=1e-5)
    np.testing.assert_allclose(grouped.var((1, 3)), np.ones((3, 8)), atol=1e-3)


def test_whitened_patches_have_the_identity_as_covariance(images_and_labels):
    images = (images_and_labels[0].astype(np.float32) - 120) / 70
    patches = layers.Patches(size=3, stride=2, padding=1)
    kernel = layers.whitening_kernel(images, patches, epsilon=0.0)
    layer = layers.WhitenedPatches(patches, jnp.float32, "dot")
    assert kernel.shape == (3, 3, 3, 27)
    out = np.asarray(layer.apply({"frozen": {"kernel": kernel}}, images))
    inner = out[:, 1:, 1:].reshape(-1, 27)  # without the patches that padding is in: sizes are even
    np.testing.assert_allclose(np.cov(inner, rowvar=False), np.eye(27), atol=2e-3)
    damped = layers.whitening_kernel(images, patches, epsilon=0.1)
    norms, damped = (np.linalg.norm(k.reshape(27, 27), axis=0) for k in (kernel, damped))
    assert (np.diff(norms) > -1e-5).all()  # falling eigenvalues
    np.testing.assert_allclose(damped, 1 / np.sqrt(norms**-2.0 + 0.1), rtol=1e-3)


def test_the_smallest_images_can_be_whitened():
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), np.uint8)
    for network in (models.ConvNet, models.AirbenchNet):
        kernel = models.whitening_kernel(network, images, *SCALE)
        assert kernel.shape == models.whitening_shape(network, (8, 8, 3))
        assert np.isfinite(kernel).all()
        assert np.abs(kernel).max() > 0


# ---- in the step ------------------------------------------------------------------------------------


def batch_norm_problem(images, labels, stem="conv") -> Problem:
    network = make_network(norm="batch", stem=stem)
    params, model_state = models.init_variables(network, (SIZE, SIZE, 3), 0)
    if stem == "whitened":
        model_state = models.with_whitening(model_state, models.whitening_kernel(network, images, *SCALE))
    task = Classification(NUM_CLASSES)
    loss_fn = make_loss_fn(network, (SIZE, SIZE, 3), *SCALE, task)
    return Problem(task, images, labels, params, model_state, loss_fn)


def model_state_after_one_update(trainer, batch_size):
    state, _ = trainer.run([batch_size], learning_rate=0.1)
    return replicas.first_replica(state).model_state


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_running_statistics_are_those_of_the_same_micro_batches_on_any_devices(images_and_labels, num_devices):
    """48 originals by 8 devices hold 48 examples each: whole epochs of 384 = 8 micro-batches of 48."""
    images, labels = images_and_labels
    problem = batch_norm_problem(images, labels)
    trainer = sgd_trainer(problem, num_devices, micro_batch_size=48)
    model_state = model_state_after_one_update(trainer, 384)
    expanded = augment.expand(images, 8).reshape(-1, SIZE, SIZE, 3)
    loss_fn = jax.jit(problem.loss_fn)
    statistics = []
    for device in range(num_devices):
        of_device = batching.device_batch(trainer.sharding, device, 0, 0, 384)
        num_micro_batches = 8 // num_devices
        for index in range(num_micro_batches):
            chosen = batching.micro_batch(trainer.sharding, of_device, index, Grouping(48, 48), 0)
            examples = np.asarray(chosen.examples)
            originals = trainer.sharding.originals_of(device, seed=0)[examples // 8]
            batch = Batch(expanded[originals * 8 + examples % 8], labels[originals], chosen.weights[None])
            _, sums = loss_fn(problem.params, problem.model_state, batch)
            statistics.append(sums.statistics[STATISTICS])
    expected = jax.tree.map(lambda *parts: sum(parts) / 384, *statistics)  # in plain Python, one by one
    for a, b in zip(jax.tree.leaves(model_state[STATISTICS]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.full), 8])
def test_ghost_batches_do_not_depend_on_how_many_are_taken_at_once(images_and_labels, num_devices):
    """The same gradients and statistics in micro-batches of 8 and of three times 8, of even and ragged batches."""
    problem = batch_norm_problem(*images_and_labels)
    one, three = (sgd_trainer(problem, num_devices, micro_batch_size=m, ghost_size=8) for m in (8, 24))
    for batch_size in (384, 200, 61, 24):
        (one_by_one, losses), (at_once, losses_at_once) = one.run([batch_size]), three.run([batch_size])
        gradients = (gradient_of_one_update(problem.params, state) for state in (one_by_one, at_once))
        assert_trees_close(*gradients, tolerance=1e-6)
        statistics = (replicas.first_replica(state).model_state for state in (one_by_one, at_once))
        assert_trees_close(*statistics, tolerance=1e-6)
        np.testing.assert_allclose(losses["loss"], losses_at_once["loss"], rtol=1e-6)


def test_measuring_the_noise_cuts_no_ghost_batch(images_and_labels):
    """Updates that measure, 0 and 3 of 4, take one ghost batch at a time: the same parameters but for rounding."""
    problem, plan = batch_norm_problem(*images_and_labels), NoisePlan(0.98, 3, (8,), 8)
    plain, measuring = (sgd_trainer(problem, 2, micro_batch_size=24, ghost_size=8, noise=n) for n in (None, plan))
    sizes = [200, 61, 150, 93]
    (state, metrics), (measured, metrics_of_measured) = (
        t.run(sizes, learning_rate=0.1) for t in (plain, measuring)
    )
    assert_trees_close(*(jax.tree.map(np.asarray, s.params) for s in (state, measured)), tolerance=1e-6)
    np.testing.assert_allclose(metrics["loss"], metrics_of_measured["loss"], rtol=1e-6)
    assert [int(replicas.first_replica(s.noise.count)) for s in (state, measured)] == [0, 2]


def test_one_all_reduce_with_batch_norm(images_and_labels):
    text = sgd_trainer(batch_norm_problem(*images_and_labels), 8, micro_batch_size=48).compiled_text()
    assert sum("all-reduce(" in line or "all-reduce-start(" in line for line in text.splitlines()) == 1


@pytest.mark.full
def test_padding_counts_in_no_statistic(images_and_labels):
    """A batch of 60 in micro-batches of 48 is 30 and 30, with 18 places of padding each."""
    images, labels = images_and_labels
    problem = batch_norm_problem(images, labels)
    trainer = sgd_trainer(problem, 1, micro_batch_size=48)
    model_state = model_state_after_one_update(trainer, 60)
    rows = np.array(visited_examples(trainer.sharding, 0, 0, 60))
    expanded = augment.expand(images, 8).reshape(-1, SIZE, SIZE, 3)
    loss_fn = jax.jit(problem.loss_fn)

    def statistics_of(half):
        batch = Batch(expanded[half], labels[half // 8], jnp.ones((1, 30)))
        _, sums = loss_fn(problem.params, problem.model_state, batch)
        return sums.statistics[STATISTICS]

    expected = jax.tree.map(lambda a, b: (a + b) / 60, statistics_of(rows[:30]), statistics_of(rows[30:]))
    for a, b in zip(jax.tree.leaves(model_state[STATISTICS]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.full
def test_the_stem_stays_as_it_is(images_and_labels):
    problem = batch_norm_problem(*images_and_labels, stem="whitened")
    model_state = model_state_after_one_update(sgd_trainer(problem, 2, ema_decay=0.5), 96)
    frozen = problem.model_state["frozen"]["WhitenedPatches_0"]["kernel"]
    assert np.abs(frozen).max() > 0
    np.testing.assert_array_equal(model_state["frozen"]["WhitenedPatches_0"]["kernel"], frozen)
    assert "WhitenedPatches_0" not in problem.params


# ---- in a run ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_moving_average_of_the_parameters_is_that_of_the_updates(small_config, tmp_path):
    """Checked against the parameters of each update, which runs of 1, 2 and 3 updates end with."""
    small_config.train.ema_decay, small_config.batch.size = 0.5, 128
    small_config.train.inner_steps, small_config.model.norm = 1, "batch"
    ends = []
    for updates in (1, 2, 3):
        small_config.train.outer_steps = updates
        train.train_and_evaluate(small_config, str(tmp_path / str(updates)))
        ends.append(final_arrays(tmp_path / str(updates)))
    name = "state.{}params.Conv_0.kernel"
    first, second, third = (end[name.format("")] for end in ends)
    np.testing.assert_allclose(ends[2][name.format("ema.")], (first + second) / 4 + third / 2, rtol=1e-5, atol=1e-7)
    assert np.abs(second - third).max() > 1e-3


def final_arrays(folder):
    from largebatch.runs import checkpoints

    kept = folder / "checkpoints"
    return checkpoints.read_arrays(checkpoints.path_of(kept, checkpoints.saved_steps(kept)[-1]))[0]


def test_views_are_averaged_once_each():
    image = np.arange(27, dtype=np.uint8).reshape(1, 3, 3, 3)

    def first_pixels(variables, images):
        return images.reshape(len(images), -1)[:, :3].astype(jnp.float32)

    average = augment.average_over_copies(first_pixels, num_views=8)
    averaged = average(None, jnp.asarray(image))
    # Each corner is the first pixel of two of the 8 views.
    corners = image[0][[0, 0, 2, 2], [0, 2, 0, 2]].astype(np.float32)
    np.testing.assert_allclose(averaged[0], corners.mean(axis=0))


@pytest.mark.parametrize("num_views", [1, 2])
def test_moved_copies_have_half_of_the_weight_of_an_average(num_views):
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 8, 3), np.uint8)
    weights = np.random.default_rng(1).standard_normal((6 * 8 * 3, 4))

    def squares(variables, images):
        return (images.reshape(len(images), -1).astype(jnp.float32) / 255) ** 2 @ variables

    average = augment.average_over_copies(squares, num_views=num_views, shift=2)
    averaged = average(jnp.float32(weights), jnp.asarray(images))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    copies = [images, images, padded[:, 4:10, 4:12], padded[:, 0:6, 0:8]]  # a quarter each
    if num_views == 2:
        copies = copies + [copy[:, :, ::-1] for copy in copies]
    expected = np.mean([(copy.reshape(5, -1) / 255) ** 2 @ weights for copy in copies], axis=0)
    np.testing.assert_allclose(averaged, expected, atol=1e-4)


@pytest.mark.full
def test_views_and_moving_average_stand_beside_the_plain_accuracy(small_config, tmp_path):
    from test_train import rows_of

    plain = train.train_and_evaluate(small_config, str(tmp_path / "plain"))
    small_config.eval.view_average, small_config.train.ema_decay = True, 0.9
    train.train_and_evaluate(small_config, str(tmp_path / "all"))
    without, row = rows_of(tmp_path / "plain")[-1], rows_of(tmp_path / "all")[-1]
    assert row["val_accuracy"] == without["val_accuracy"] == plain["final_val_accuracy"]
    extra = {"val_accuracy_views", "val_accuracy_ema", "val_accuracy_ema_views"}
    assert row.keys() - without.keys() == extra
    assert all(0 <= row[name] <= 1 for name in extra)


@pytest.mark.parametrize("name", ["convnet", "resconvnet", "resconvnet7"])
def test_every_network_with_a_stem_may_have_it_whitened(small_config, name):
    small_config.model.stem, small_config.model.name = "whitened", name
    typed(small_config)


def test_a_whitened_stem_wants_a_network_with_a_stem(small_config, tmp_path):
    small_config.model.stem, small_config.model.name = "whitened", "resnet8"
    with pytest.raises(UserError, match=r"model.stem: 'whitened'; allowed: 'conv' with model 'resnet8'"):
        train.train_and_evaluate(small_config, str(tmp_path / "run"))


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
