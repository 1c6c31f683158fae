from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import augment
import model as models
from largebatch.data import batching
from largebatch.data.batching import Deal
from largebatch.hosts import replicas
from largebatch.optim import optimizers
from largebatch.optim.optimizers import Numbers
from largebatch.training.loss import make_loss_fn
from largebatch.training.state import create_state
from largebatch.training.step import Batch, Plan, Step, make_inner_loop

NUM_ORIGINALS, SIZE, NUM_CLASSES, MICRO = 50, 16, 4, 16
LENGTH = 4
SCALE = (120.0,) * 3, (70.0,) * 3


def make_problem(network):
    """Images, labels, parameters and a loss function."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_ORIGINALS, SIZE, SIZE, 3), np.uint8)
    labels = rng.integers(0, NUM_CLASSES, NUM_ORIGINALS, np.int32)
    params, _ = models.init_variables(network, (SIZE, SIZE, 3), 0)
    return images, labels, params, make_loss_fn(network, (SIZE, SIZE, 3), *SCALE)


def small_network(dtype="float32"):
    """Two convolutions, which show what four would."""
    return models.ConvNet(NUM_CLASSES, dtype=dtype, conv="dot", features=(8, 16), blocks=(0, 0), hidden=None)


@pytest.fixture(scope="module")
def problem():
    return make_problem(small_network())


def place(images, labels, num_devices, storage="expanded"):
    deal = Deal(len(images), num_devices, augment.NUM_VIEWS)
    shards = []
    for index, device in enumerate(jax.local_devices()[:num_devices]):
        held = deal.originals_of(index, seed=0)
        pad = deal.max_originals - len(held)
        views = augment.expand(images[held]) if storage == "expanded" else images[held][:, None]
        views = np.pad(views, ((0, pad), *((0, 0),) * 4)).reshape(1, -1, images[0].size)
        shards.append(jax.device_put({"images": views, "labels": np.pad(labels[held], (0, pad))[None]}, device))
    return deal, replicas.stack(shards)


def plan(deal, batch_sizes, learning_rate=1.0, before=0):
    starts = before + np.cumsum([0, *batch_sizes[:-1]])
    pad = LENGTH - len(batch_sizes)
    epoch, offset = batching.epoch_and_offset(deal, np.pad(starts, (0, pad)))
    sizes = np.pad(np.int32(batch_sizes), (0, pad), constant_values=1)
    rates = np.broadcast_to(np.float32(learning_rate), len(batch_sizes))
    return Plan(epoch, offset, sizes, np.pad(rates, (0, pad)))


def sgd_loop(problem, num_devices, storage="expanded", shift=0, **kwargs):
    images, labels, params, loss_fn = problem
    deal, shards = place(images, labels, num_devices, storage)
    optimizer = optimizers.create_optimizer("sgd", Numbers(momentum=0.0))
    read = augment.make_read(storage, (SIZE, SIZE, 3), shift)
    loop = make_inner_loop(Step(loss_fn, optimizer, read, deal, MICRO, **kwargs))
    return (
        deal,
        shards,
        loop,
        lambda: replicas.replicate(create_state(params, optimizer, 0), jax.local_devices()[:num_devices]),
    )


def gradient_of_one_update(params, state):
    """With plain SGD at rate 1 the update is the gradient."""
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new)[0], params, state.params)


def assert_trees_close(one, other, tolerance):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)


@partial(jax.jit, static_argnums=0)
def examples_of(deal, device, epoch, offset, batch_size):
    """Local indices and 0/1 weights of a device's share, in one micro-batch."""
    share = batching.device_share(deal, device, epoch, offset, batch_size)
    examples, _, weights = batching.micro_batch(deal, device, share, 0, 1, deal.num_examples, 0)
    return examples, weights


def visited_examples(deal, epoch, offset, batch_size):
    """Global expanded indices of a batch, from the functions that the device uses."""
    found = []
    for device in range(deal.num_devices):
        examples, weights = examples_of(deal, device, epoch, offset, batch_size)
        local = np.asarray(examples)[np.asarray(weights) == 1]
        originals = deal.originals_of(device, seed=0)
        found += (originals[local // 8] * 8 + local % 8).tolist()
    return found


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.full), 8])
def test_summed_gradient_equals_the_full_batch_gradient_with_one_compilation(problem, num_devices):
    images, labels, params, loss_fn = problem
    traces = []

    def counted(*arguments):
        traces.append(1)
        return loss_fn(*arguments)

    deal, shards, loop, fresh = sgd_loop((images, labels, params, counted), num_devices)
    expanded = augment.expand(images).reshape(-1, SIZE, SIZE, 3)
    made = 0
    reference = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    for batch_size in (1, 7, 50, 256, deal.num_examples):
        state, metrics = loop(fresh(), shards, plan(deal, [batch_size]), np.int32(1))
        rows = visited_examples(deal, 0, 0, batch_size)
        assert len(set(rows)) == len(rows) == batch_size
        weights = np.zeros(deal.num_examples, np.float32)
        weights[rows] = 1 / batch_size
        batch = Batch(expanded, np.repeat(labels, 8), weights)
        (loss, (sums, _)), grads = reference(params, {}, batch)
        # Sums of up to 400 float32 gradients in another order: 1e-6 of the largest entry.
        assert_trees_close(grads, gradient_of_one_update(params, state), 2e-6)
        np.testing.assert_allclose(metrics["loss"][0], loss, rtol=2e-6)
        np.testing.assert_allclose(metrics["accuracy"][0], sums["accuracy"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"][0], optax.tree.norm(grads), rtol=1e-5)
        made = made or len(traces)
        assert len(traces) == made  # no size but the first traced, so none compiled, anything


def test_expanded_and_on_device_storage_give_the_same_gradients(problem):
    _, _, params, _ = problem
    found = []
    for storage in ("expanded", "on_device"):
        deal, shards, loop, fresh = sgd_loop(problem, 2, storage)
        state, metrics = loop(fresh(), shards, plan(deal, [133]), np.int32(1))
        found.append((gradient_of_one_update(params, state), float(metrics["loss"][0])))
    assert_trees_close(found[0][0], found[1][0], 1e-7)
    assert found[0][1] == found[1][1]


def test_moved_images_give_the_same_gradients_on_any_devices(problem):
    """In another epoch they are moved by something else."""
    _, _, params, _ = problem
    found = []
    for num_devices, shift, epoch in ((1, 0, 0), (1, 2, 0), (4, 2, 0), (4, 2, 1)):
        deal, shards, loop, fresh = sgd_loop(problem, num_devices, shift=shift)
        size = deal.num_examples
        state, _ = loop(fresh(), shards, plan(deal, [size], before=epoch * size), np.int32(1))
        found.append(gradient_of_one_update(params, state))
    still, one, four, later = found
    assert_trees_close(one, four, 2e-6)
    for other in (still, later):
        with pytest.raises(AssertionError):
            assert_trees_close(one, other, 1e-3)


def test_results_do_not_depend_on_how_the_loop_is_cut(problem):
    deal, shards, loop, fresh = sgd_loop(problem, 2)
    sizes, rates = [300, 7, 256, 90], [0.1, 0.3, 0.02, 0.2]  # crosses the end of the first epoch
    whole, metrics = loop(fresh(), shards, plan(deal, sizes, rates), np.int32(4))
    state, losses = fresh(), []
    for first, count in ((0, 1), (1, 3)):
        part = slice(first, first + count)
        part = plan(deal, sizes[part], rates[part], before=sum(sizes[:first]))
        state, values = loop(state, shards, part, np.int32(count))
        losses += np.asarray(values["loss"])[:count].tolist()
    assert losses == np.asarray(metrics["loss"]).tolist()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert np.asarray(state.step).tolist() == [4, 4]


def test_one_all_reduce_and_no_other_collective(problem):
    deal, shards, loop, fresh = sgd_loop(problem, 8)
    text = loop.lower(fresh(), shards, plan(deal, [64]), np.int32(1)).compile().as_text()
    calls = [line for line in text.splitlines() if "all-reduce(" in line or "all-reduce-start(" in line]
    assert len(calls) == 1, calls
    for other in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f"{other}(" not in text


def test_everything_that_crosses_devices_goes_through_reduce(problem):
    seen = []

    def local_only(tree):
        seen.append(jax.tree.structure(tree))
        return tree

    deal, shards, loop, fresh = sgd_loop(problem, 2, reduce=local_only)
    state, _ = loop(fresh(), shards, plan(deal, [64]), np.int32(1))
    one, other = (jax.tree.map(lambda x, d=d: np.asarray(x)[d], state.params) for d in (0, 1))
    assert len(set(seen)) == 1  # the loss, the averages and the gradients, together
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_learning_rate_is_data(problem):
    _, _, params, _ = problem
    deal, shards, loop, fresh = sgd_loop(problem, 1)
    moves = []
    for rate in (0.5, 1.0):
        state, _ = loop(fresh(), shards, plan(deal, [64], rate), np.int32(1))
        moves.append(gradient_of_one_update(params, state))
    assert_trees_close(jax.tree.map(lambda x: 2 * x, moves[0]), moves[1], 1e-6)


def test_golden_first_step():
    """Recorded once; a doubled rate, a sum in place of a mean or another normalisation all miss it."""
    network = models.create_model("convnet", NUM_CLASSES, "float32", "dot")
    images, labels, params, loss_fn = make_problem(network)
    deal, shards = place(images, labels, 2)
    optimizer = optimizers.create_optimizer("lamb")
    read = augment.make_read("expanded", (SIZE, SIZE, 3))
    loop = make_inner_loop(Step(loss_fn, optimizer, read, deal, MICRO))

    def moved(rate):
        state = replicas.replicate(create_state(params, optimizer, 0), jax.local_devices()[:2])
        state, metrics = loop(state, shards, plan(deal, [deal.num_examples], rate), np.int32(1))
        new = jax.tree.map(lambda x: np.asarray(x)[0], state.params)
        distance = optax.tree.norm(jax.tree.map(lambda a, b: a - b, new, params))
        return float(metrics["loss"][0]), float(metrics["grad_norm"][0]), float(distance)

    golden = (1.3861731, 0.1939164, 0.3498806)
    np.testing.assert_allclose(moved(0.01), golden, rtol=1e-4)
    assert abs(moved(0.02)[2] / golden[2] - 2) < 0.01


def test_bfloat16_keeps_float32_parameters(problem):
    deal, shards, loop, fresh = sgd_loop(make_problem(small_network(jnp.bfloat16)), 1)
    state, metrics = loop(fresh(), shards, plan(deal, [400]), np.int32(1))
    deal, shards, exact, fresh = sgd_loop(problem, 1)
    _, reference = exact(fresh(), shards, plan(deal, [400]), np.int32(1))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(metrics["loss"][0], reference["loss"][0], rtol=2e-2)
    assert float(metrics["loss"][0]) != float(reference["loss"][0])
