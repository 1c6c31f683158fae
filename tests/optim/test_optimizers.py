"""Every optimizer against its paper in NumPy, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from largebatch.config.fields import OptimizerConfig
from largebatch.optim import muon as muon_module
from largebatch.optim import optimizers
from largebatch.optim import soap as soap_module
from largebatch.optim.averages import smooth
from largebatch.optim.optimizers import Hyperparams, create_optimizer

BETA, B2, DECAY = 0.9, 0.99, 0.01
RATES = (0.1, 0.1, 0.03, 0.03)  # the rate changes on the way


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"conv": {"kernel": (3, 3, 2, 5), "bias": (5,)}, "head": {"kernel": (5, 4), "bias": (4,)}}
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def gradients(params, count=4):
    rng = np.random.default_rng(1)
    return [jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32), params) for _ in range(count)]


def run(name, params, grads, rates=RATES, b2s=None, **fields):
    """Parameters after updates of an optimizer with these fields of a config."""
    return steps_of(create_optimizer(OptimizerConfig(name=name, **fields)), params, grads, rates, b2s)


def steps_of(optimizer, params, grads, rates=RATES, b2s=None):
    """Parameters after updates by a transformation with injected hyper-parameters."""
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(params, state, grad, values):
        updates, state = optimizer.update(grad, optax.tree.set(state, **values), params)
        return optax.apply_updates(params, updates), state

    for number, (grad, rate) in enumerate(zip(grads, rates, strict=True)):
        values = {"learning_rate": jnp.float32(rate)} | ({"b2": jnp.float32(b2s[number])} if b2s else {})
        params, state = update(params, state, grad, values)
    return params


def assert_close(tree, expected, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), tree, expected)


def assert_follows(ours, params, grads, reference, rates=RATES, rtol=2e-5):
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        grads_of_leaf = [_at(grad, path).astype(np.float64) for grad in grads]
        expected = reference(path, leaf.astype(np.float64), grads_of_leaf, rates)
        np.testing.assert_allclose(_at(ours, path), expected, rtol=rtol, atol=1e-6, err_msg=str(path))


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree


def _moments(grads):
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m, v = BETA * m + (1 - BETA) * g, B2 * v + (1 - B2) * g**2
        yield t, g, m, m / (1 - BETA**t), v / (1 - B2**t)


# ---- references -----------------------------------------------------------------------------------


def sgd(path, p, grads, rates, *, nesterov=False):
    """Goyal et al. 2017, eq. 9; Nesterov as Sutskever et al. 2013 in the form of PyTorch."""
    u, decay = 0.0, DECAY if p.ndim > 1 else 0.0
    for g, rate in zip(grads, rates, strict=True):
        g = g + decay * p
        u = BETA * u + g
        p = p - rate * (g + BETA * u if nesterov else u)
    return p


def sgd_uncorrected(path, p, grads, rates):
    """Goyal et al. 2017, eq. 10: the rate is inside the momentum."""
    v, decay = 0.0, DECAY if p.ndim > 1 else 0.0
    for g, rate in zip(grads, rates, strict=True):
        v = BETA * v + rate * (g + decay * p)
        p = p - v
    return p


def sgd_corrected(path, p, grads, rates):
    """Goyal et al. 2017, remark 2: eq. 10 with the momentum scaled by the change of the rate."""
    v, before, decay = 0.0, rates[0], DECAY if p.ndim > 1 else 0.0
    for g, rate in zip(grads, rates, strict=True):
        v = BETA * (rate / before) * v + rate * (g + decay * p)
        p, before = p - v, rate
    return p


def lars(path, p, grads, rates):
    """You et al. 2017, algorithm 1, with the norm of the decayed gradient as optax has it, and eq. 9's momentum."""
    u = 0.0
    for g, rate in zip(grads, rates, strict=True):
        if p.ndim > 1:
            g = g + DECAY * p
            g = 0.001 * np.linalg.norm(p) / np.linalg.norm(g) * g
        u = BETA * u + g
        p = p - rate * u
    return p


def adam(path, p, grads, rates):
    """Kingma and Ba 2015, with L2 regularisation."""
    m = v = 0.0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
        g = g + (DECAY * p if p.ndim > 1 else 0.0)
        m, v = BETA * m + (1 - BETA) * g, B2 * v + (1 - B2) * g**2
        p = p - rate * m / (1 - BETA**t) / (np.sqrt(v / (1 - B2**t)) + 1e-8)
    return p


def adamw(path, p, grads, rates, *, nesterov=False):
    """Loshchilov and Hutter 2019; Dozat 2016 for Nesterov."""
    for (t, g, m, m_hat, v_hat), rate in zip(_moments(grads), rates, strict=True):
        if nesterov:
            m_hat = BETA * m / (1 - BETA ** (t + 1)) + (1 - BETA) * g / (1 - BETA**t)
        p = p - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + (DECAY * p if p.ndim > 1 else 0.0))
    return p


def lamb(path, p, grads, rates):
    """You et al. 2020, algorithm 2."""
    for (_, _, _, m_hat, v_hat), rate in zip(_moments(grads), rates, strict=True):
        r = m_hat / (np.sqrt(v_hat) + 1e-6)
        if p.ndim > 1:
            r = r + DECAY * p
            r = np.linalg.norm(p) / np.linalg.norm(r) * r
        p = p - rate * r
    return p


def orthogonal(matrix):
    """Jordan 2024: five steps of the quintic Newton-Schulz iteration."""
    transpose = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if transpose else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if transpose else x


def muon(path, p, grads, rates):
    """Jordan 2024, with the momentum as a corrected average, as optax has it; 0.5 x AdamW for the rest."""
    is_orthogonalised = p.ndim > 1 and path[0].key != "head"
    for (_, _, _, m_hat, v_hat), rate in zip(_moments(grads), rates, strict=True):
        if is_orthogonalised:
            matrix = m_hat.reshape(-1, p.shape[-1])
            scale = np.sqrt(max(1, matrix.shape[1] / matrix.shape[0]))
            move = (scale * orthogonal(matrix)).reshape(p.shape)
        else:
            move = 0.5 * m_hat / (np.sqrt(v_hat) + 1e-8)
        p = p - rate * (move + (DECAY * p if p.ndim > 1 else 0.0))
    return p


def soap_reference(path, p, grads, rates, *, every=10, of_direction=lambda matrix: matrix):
    """Vyas et al. 2024, algorithm 3, for matrices; plain Adam for vectors."""
    shape, m, v = p.shape, 0.0, 0.0
    if p.ndim < 2:
        return adamw(path, p, grads, rates)
    rows, columns = p.size // shape[-1], shape[-1]
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
        g = g.reshape(rows, columns)
        left, right = B2 * left + (1 - B2) * g @ g.T, B2 * right + (1 - B2) * g.T @ g
        if t == 1:
            in_left, in_right = np.linalg.eigh(left)[1][:, ::-1], np.linalg.eigh(right)[1][:, ::-1]
            continue
        m = BETA * m + (1 - BETA) * g
        v = B2 * v + (1 - B2) * (in_left.T @ g @ in_right) ** 2
        m_hat, v_hat = in_left.T @ m @ in_right / (1 - BETA ** (t - 1)), v / (1 - B2 ** (t - 1))
        move = of_direction(in_left @ (m_hat / (np.sqrt(v_hat) + 1e-8)) @ in_right.T)
        p = p - rate * (move.reshape(shape) + DECAY * p)
        if t % every == 0:
            rows_order = np.argsort(-np.diag(in_left.T @ left @ in_left))
            columns_order = np.argsort(-np.diag(in_right.T @ right @ in_right))
            in_left = np.linalg.qr((left @ in_left)[:, rows_order])[0]
            in_right = np.linalg.qr((right @ in_right)[:, columns_order])[0]
            v = v[rows_order][:, columns_order]
    return p


REFERENCES = {
    "sgd": sgd,
    "lars": lars,
    "adam": adam,
    "adamw": adamw,
    "nadamw": lambda *arguments: adamw(*arguments, nesterov=True),
    "lamb": lamb,
    "muon": muon,
}
ALL = [*REFERENCES, "soap", "soap_muon"]
FIELDS = {"momentum": BETA, "b2": B2, "weight_decay": DECAY, "adamw_multiplier": 0.5}


def test_there_is_a_reference_for_every_optimizer():
    assert sorted(ALL) == sorted(optimizers.OPTIMIZERS)


@pytest.mark.parametrize("name", REFERENCES)
def test_optimizers_follow_their_papers(name, params):
    grads = gradients(params)
    tolerance = 2e-4 if name == "muon" else 2e-5  # five steps of Newton-Schulz in float32
    assert_follows(run(name, params, grads, **FIELDS), params, grads, REFERENCES[name], rtol=tolerance)


@pytest.fixture
def matrices():
    """Parameters and 14 gradients whose rows and columns have full rank and eigenvalues apart.

    Otherwise the bases would be arbitrary.
    """
    rng = np.random.default_rng(0)
    params = {"kernel": rng.standard_normal((2, 2, 1, 4)).astype(np.float32), "bias": np.ones(4, np.float32)}
    scale = np.outer([1, 2, 4, 8], [1, 3, 9, 27]).reshape(2, 2, 1, 4)
    grads = [
        {"kernel": (rng.standard_normal((2, 2, 1, 4)) * scale).astype(np.float32), "bias": np.ones(4, np.float32)}
        for _ in range(14)
    ]
    return params, grads


@pytest.mark.parametrize("every", [10, 1])
def test_soap_follows_its_paper_over_refreshes_of_its_bases(matrices, every):
    (params, grads), rates = matrices, [0.01] * 14
    ours = run("soap", params, grads, rates, soap_every=every, **FIELDS)
    assert_follows(ours, params, grads, partial(soap_reference, every=every), rates, rtol=2e-3)
    kernel, of_kernel = params["kernel"].astype(np.float64), [g["kernel"].astype(np.float64) for g in grads]
    stale = ours["kernel"] - soap_reference(None, kernel, of_kernel, rates, every=99)
    assert np.abs(stale).max() > 1e-3  # the refreshes count


def test_soap_muon_orthogonalises_soaps_direction(matrices):
    (params, grads), rates = matrices, [0.01] * 14
    ours = run("soap_muon", params, grads, rates, **FIELDS)

    def reference(path, p, grads, rates):
        if p.ndim < 2:
            return muon(path, p, grads, rates)
        return soap_reference(path, p, grads, rates, of_direction=orthogonal)

    assert_follows(ours, params, grads, reference, rates, rtol=2e-3)


@pytest.mark.parametrize(
    ("name", "moved"), [("soap", {"bias"}), ("soap_muon", {"bias", "head"}), ("muon", {"bias", "head", "kernel"})]
)
def test_soap_leaves_its_kernels_alone_at_the_first_update(name, moved):
    """As the authors' program does, decay and all. What is AdamW's moves and decays."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 3, 2, 5), "head": (5, 4), "bias": (5,)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    grads = [jax.tree.map(np.ones_like, params)] * 2
    for count in (1, 2):
        ours = run(name, params, grads[:count], [0.1] * count, **FIELDS)
        plain = run(name, params, grads[:count], [0.1] * count, **FIELDS | {"weight_decay": 0.0})
        if count == 1:
            assert {key for key in params if (ours[key] != params[key]).any()} == moved
        decayed = {key for key in params if (ours[key] != plain[key]).any()}
        assert decayed == ({"kernel", "head"} & moved if count == 1 else {"kernel", "head"})


def test_a_refresh_of_soaps_bases_does_not_throw_it_about():
    """The first gradient has a few directions only, so most of the first basis is arbitrary."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (72, 32))
    spectrum = np.outer(1 / np.arange(1, 73), 1 / np.arange(1, 33)) ** 0.5
    transformation = soap_module.soap(0.9, 0.999)
    state, norms = transformation.init({"kernel": np.zeros((72, 32), np.float32)}), []
    update = jax.jit(transformation.update)
    for _ in range(22):
        grad = left @ (rng.standard_normal((72, 32)) * spectrum) @ right.T
        updates, state = update({"kernel": grad.astype(np.float32)}, state)
        norms.append(float(optax.tree.norm(updates)))
    assert max(norms[10:13]) < 1.2 * norms[9]  # the refresh after update 10
    assert max(norms[20:]) < 1.2 * norms[19]


def test_soap_without_bases_is_adamw(params, monkeypatch):
    """Of sides that are too large; its decay does not wait then."""
    grads = gradients(params)
    monkeypatch.setattr(soap_module, "MAX_SIDE", 1)
    ours, expected = (run(name, params, grads, **FIELDS) for name in ("soap", "adamw"))
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(soap_module, "MAX_SIDE", 6)
    _, (moments,) = soap_module.soap(BETA, B2).init({"kernel": np.zeros((3, 3, 2, 5), np.float32)})
    assert moments.bases[0] is None  # 18 rows
    assert moments.bases[1].shape == (5, 5)


def test_lars_keeps_its_coefficient_beside_a_zero_norm(params):
    (grad,) = gradients(params, 1)
    params["head"]["kernel"] *= 0
    moved = run("lars", params, [grad], [1.0])["head"]["kernel"]
    np.testing.assert_allclose(moved, -0.001 * grad["head"]["kernel"], rtol=1e-5)


# ---- Muon -----------------------------------------------------------------------------------------


def test_muon_moves_by_nearly_orthogonal_matrices(params):
    (grad,) = gradients(params, 1)
    moved = run("muon", params, [grad], [1.0])
    kernel = (params["conv"]["kernel"] - moved["conv"]["kernel"]).reshape(18, 5)
    values = np.linalg.svd(kernel, compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    head = np.asarray(params["head"]["kernel"] - moved["head"]["kernel"])
    np.testing.assert_allclose(np.abs(head), 1.0, rtol=1e-3)  # Adam's first update


def test_matrices_of_a_shape_are_orthogonalised_at_once_as_one_by_one(monkeypatch):
    """As a GPU does; those that are wide lie among them transposed."""
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal(shape).astype(np.float32) for shape in [(9, 4), (4, 9), (9, 5), (9, 4), (6, 6)]]
    groups = []

    def on_gpu(*arguments, cuda, **others):
        groups.append(len(arguments))
        return cuda(*arguments)

    monkeypatch.setattr(muon_module.lax, "platform_dependent", on_gpu)
    found = muon_module.orthogonalize(matrices)
    assert groups == [3, 1, 1]
    for ours, matrix in zip(found, matrices, strict=True):
        scale = np.sqrt(max(1, matrix.shape[1] / matrix.shape[0]))
        np.testing.assert_allclose(ours, scale * orthogonal(matrix.astype(np.float64)), atol=2e-5)


@pytest.mark.parametrize("shape", [(9, 5), (27, 32), (288, 64), (1152, 128)])
@pytest.mark.parametrize(
    ("way", "tolerance"),
    [("default", 2e-5), ("cpu", 2e-4)],  # by Newton-Schulz; by Gram matrices, squares of small singular values
)
def test_both_ways_to_orthogonalize_are_those_of_numpy(way, tolerance, shape, monkeypatch):
    rng = np.random.default_rng(0)
    spectrum = np.exp(2 * rng.standard_normal(shape[1]))  # over three decades
    matrix = (rng.standard_normal(shape) * spectrum).astype(np.float32)
    monkeypatch.setattr(muon_module.lax, "platform_dependent", lambda matrix, **ways: ways[way](matrix))
    (found,) = muon_module.orthogonalize([matrix])
    scale = np.sqrt(max(1, shape[1] / shape[0]))
    np.testing.assert_allclose(found, scale * orthogonal(matrix.astype(np.float64)), atol=tolerance)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_that_of_optax(params, nesterov):
    def dimensions(params):
        return jax.tree.map(
            lambda p: optax.contrib.MuonDimensionNumbers(tuple(range(p.ndim - 1)), p.ndim - 1), params
        )

    kernels = {"conv": params["conv"]["kernel"], "wide": np.ones((2, 7), np.float32)}
    theirs = optax.contrib.muon(0.1, beta=0.9, nesterov=nesterov, muon_weight_dimension_numbers=dimensions)
    ours = optax.chain(muon_module.scale_by_muon(0.9, nesterov=nesterov), optax.scale(-0.1))
    their_state, our_state = theirs.init(kernels), ours.init(kernels)
    for grads in gradients(kernels, 4):
        expected, their_state = theirs.update(grads, their_state, kernels)
        found, our_state = ours.update(grads, our_state, kernels)
        assert_close(found, expected, atol=2e-5)


# ---- decays that change -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "muon", "soap"])
def test_a_decay_that_changes_corrects_by_what_is_in_the_moment(name, params):
    """The first gradient again and again: then every average of it is itself, whatever the decays were."""
    grads, rates, b2s = gradients(params, 1) * 4, [1.0] * 4, (0.999, 0.9, 0.5, 0.99)
    ends = [params, *(run(name, params, grads[:n], rates[:n], b2s[:n]) for n in (1, 2, 3, 4))]
    biases = np.array([end["conv"]["bias"] for end in ends])  # of vectors moves are Adam's with every optimizer
    np.testing.assert_allclose(np.diff(biases, axis=0), [biases[1] - biases[0]] * 4, rtol=2e-3)


def test_adam_with_a_decay_that_changes_is_that_of_numpy(params):
    grads, b2s = gradients(params, 4), (0.999, 0.999, 0.9, 0.5)
    ours = run("adam", params, grads, (0.1,) * 4, b2s)

    def reference(path, p, grads, rates):
        for t in range(1, 5):
            # Weights of gradient i in both moments, and how much they add up to.
            of_first = np.array([(1 - BETA) * BETA ** (t - 1 - i) for i in range(t)])
            of_second = np.array([(1 - b2s[i]) * np.prod(b2s[i + 1 : t]) for i in range(t)])
            m = sum(w * g for w, g in zip(of_first, grads, strict=False)) / of_first.sum()
            v = sum(w * g**2 for w, g in zip(of_second, grads, strict=False)) / of_second.sum()
            p = p - 0.1 * m / (np.sqrt(v) + 1e-8)
        return p

    assert_follows(ours, params, grads, reference, rates=(0.1,) * 4, rtol=2e-4)


def test_smoothing_is_a_mean_at_first_and_then_forgets():
    values, average = [4.0, 8.0, 0.0, 10.0], jnp.float32(123)  # where it starts does not count
    for step, value in enumerate(values):
        average = smooth(average, jnp.float32(value), 0.75, jnp.int32(step))
    assert float(average) == pytest.approx(np.mean(values))
    assert float(smooth(jnp.float32(1), jnp.float32(5), 0.75, jnp.int32(1000))) == pytest.approx(2.0)


# ---- momentum -------------------------------------------------------------------------------------


def test_a_change_of_the_rate_corrects_the_momentum(params):
    grads = gradients(params)
    corrected, plain = (run("sgd", params, grads, momentum_correction=on, **FIELDS) for on in (True, False))
    assert_follows(corrected, params, grads, sgd_corrected)
    assert_follows(plain, params, grads, sgd_uncorrected)
    assert np.abs(corrected["conv"]["kernel"] - plain["conv"]["kernel"]).max() > 0.01


def test_nesterov(params):
    grads = gradients(params)
    ours = run("sgd", params, grads, nesterov=True, **FIELDS)
    assert_follows(ours, params, grads, lambda *arguments: sgd(*arguments, nesterov=True))


def test_lars_without_momentum_correction_and_lamb_of_biases_are_those_of_optax(params):
    grads, kernels = gradients(params), jax.tree.map(lambda p: p.ndim > 1, params)
    ours = run("lars", params, grads, momentum_correction=False, **FIELDS)
    lars = optax.inject_hyperparams(partial(optax.lars, trust_ratio_mask=kernels))
    theirs = lars(0.0, DECAY, weight_decay_mask=kernels, momentum=BETA)
    assert_close(ours, steps_of(theirs, params, grads), rtol=1e-5)
    ours = run("lamb", params, grads, exclude_biases=False, **FIELDS)
    theirs = optax.inject_hyperparams(partial(optax.lamb, b1=BETA, weight_decay=DECAY))(0.0, b2=B2)
    assert_close(ours, steps_of(theirs, params, grads), rtol=1e-5)


# ---- masks and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_without_a_gradient_only_kernels_decay(name, params):
    rates = [0.0, 0.1] if "soap" in name else [0.1]  # SOAP begins with the second update
    zero = [jax.tree.map(np.zeros_like, params)] * len(rates)
    moved = run(name, params, zero, rates, weight_decay=0.5)
    for layer, leaves in params.items():
        np.testing.assert_array_equal(moved[layer]["bias"], leaves["bias"])
        assert not np.array_equal(moved[layer]["kernel"], leaves["kernel"])
        if name not in ("adam", "lars", "lamb"):  # in which the decay's own size does not count
            np.testing.assert_allclose(moved[layer]["kernel"], leaves["kernel"] * 0.95, rtol=1e-5)
    assert_close(run(name, params, zero, rates), params, rtol=0)  # without decay nothing moves


@pytest.mark.parametrize("name", ALL)
def test_parameters_and_gradients_of_zero_norm_give_finite_numbers(name, params):
    params["conv"]["kernel"] *= 0
    grads = gradients(params, 3)
    for grad in grads:
        grad["head"]["kernel"] *= 0
    moved = run(name, params, grads, [0.1] * 3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(moved))
    assert np.any(moved["conv"]["kernel"])  # it gets away from zero
    np.testing.assert_array_equal(moved["head"]["kernel"], params["head"]["kernel"])


@pytest.mark.parametrize("name", ALL)
def test_one_compiled_program_serves_all_numbers(name, params):
    """A program of the default numbers gives what an optimizer made with others gives."""
    made, others = [], {"clip_norm": 1.0, "bias_multiplier": 4.0, **FIELDS, "momentum": 0.5}
    config, grads = OptimizerConfig(name=name), gradients(params, 2)

    @jax.jit
    def step(params, state, grad):
        made.append(name)
        updates, state = create_optimizer(config).update(grad, state, params)
        return optax.apply_updates(params, updates), state

    for fields in ({}, others):
        hyperparams, moved = Hyperparams.from_config(OptimizerConfig(name=name, **fields)), params
        state = create_optimizer(config, hyperparams).init(params)
        for grad, rate in zip(grads, (0.1, 3.0), strict=True):
            moved, state = step(moved, optax.tree.set(state, learning_rate=jnp.float32(rate)), grad)
        assert_close(moved, run(name, params, grads, (0.1, 3.0), **fields), rtol=1e-4, atol=1e-5)
    assert made == [name]


def test_the_whole_gradient_is_clipped(params):
    (grad,) = gradients(params, 1)
    norm = float(optax.tree.norm(grad))
    for limit, factor in ((norm / 4, 1 / 4), (norm * 2, 1)):
        moved = run("sgd", params, [grad], [1.0], momentum=0.0, clip_norm=limit)
        assert_close(moved, jax.tree.map(lambda p, g: p - factor * g, params, grad), atol=1e-6)  # noqa: B023


def test_biases_have_a_rate_of_their_own(params):
    grads = gradients(params)
    plain, times = (run("sgd", params, grads, bias_multiplier=factor) for factor in (1.0, 4.0))
    np.testing.assert_array_equal(plain["conv"]["kernel"], times["conv"]["kernel"])
    moves = [moved["conv"]["bias"] - params["conv"]["bias"] for moved in (plain, times)]
    np.testing.assert_allclose(4 * moves[0], moves[1], rtol=1e-4)
