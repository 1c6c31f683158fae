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
    """Parameters after steps of an optimizer with these fields of a config."""
    return steps_of(create_optimizer(OptimizerConfig(name=name, **fields)), params, grads, rates, b2s)


def steps_of(optimizer, params, grads, rates=RATES, b2s=None):
    """Parameters after steps by a transformation with injected hyper-parameters."""
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


def muon(path, p, grads, rates, *, nesterov=False):
    """Jordan 2024, with the momentum as a corrected average, as optax has it; 0.5 x AdamW for the rest."""
    is_orthogonalised = p.ndim > 1 and path[0].key != "head"
    for (t, g, m, m_hat, v_hat), rate in zip(_moments(grads), rates, strict=True):
        if nesterov:
            m_hat = BETA * m / (1 - BETA ** (t + 1)) + (1 - BETA) * g / (1 - BETA**t)
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


FIELDS = {"momentum": BETA, "b2": B2, "weight_decay": DECAY, "adamw_multiplier": 0.5}
CASES = {  # by optimizer and what differs from FIELDS
    ("sgd",): sgd,
    ("sgd", "nesterov"): partial(sgd, nesterov=True),
    ("sgd", "momentum_correction"): sgd_uncorrected,
    ("lars",): lars,
    ("adam",): adam,
    ("adamw",): adamw,
    ("nadamw",): partial(adamw, nesterov=True),
    ("lamb",): lamb,
    ("muon",): muon,
    ("muon", "nesterov"): partial(muon, nesterov=True),
}
ALL = [*dict.fromkeys(name for name, *_ in CASES), "soap", "soap_muon"]


def test_there_is_a_reference_for_every_optimizer():
    assert sorted(ALL) == sorted(optimizers.OPTIMIZERS)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_optimizers_follow_their_papers(case, params):
    """The rate changes on the way, which momentum correction is about."""
    (name, *switched), grads = case, gradients(params)
    fields = FIELDS | {field: not getattr(OptimizerConfig(), field) for field in switched}
    tolerance = 2e-4 if name == "muon" else 2e-5  # five steps of Newton-Schulz in float32
    assert_follows(run(name, params, grads, **fields), params, grads, CASES[case], rtol=tolerance)


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


def test_soap_follows_its_paper_over_refreshes_of_its_bases(matrices):
    (params, grads), rates = matrices, [0.01] * 14
    ours = run("soap", params, grads, rates, soap_every=5, **FIELDS)
    assert_follows(ours, params, grads, partial(soap_reference, every=5), rates, rtol=2e-3)
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


def test_soap_without_bases_is_adamw(params, monkeypatch):
    """Too large sides have none; their decay does not wait."""
    grads = gradients(params)
    monkeypatch.setattr(soap_module, "MAX_SIDE", 1)
    ours, expected = (run(name, params, grads, **FIELDS) for name in ("soap", "adamw"))
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(soap_module, "MAX_SIDE", 6)
    _, (moments,) = soap_module.soap(BETA, B2).init({"kernel": np.zeros((3, 3, 2, 5), np.float32)})
    assert moments.bases[0] is None  # 18 rows
    assert moments.bases[1].shape == (5, 5)


def test_lamb_of_biases_and_lars_without_correction_are_those_of_optax(params):
    grads, kernels = gradients(params), jax.tree.map(lambda p: p.ndim > 1, params)
    lamb = optax.inject_hyperparams(partial(optax.lamb, b1=BETA, weight_decay=DECAY))(0.0, b2=B2)
    ours = run("lamb", params, grads, exclude_biases=False, **FIELDS)
    assert_close(ours, steps_of(lamb, params, grads), rtol=1e-5, atol=1e-6)
    make_lars = optax.inject_hyperparams(partial(optax.lars, trust_ratio_mask=kernels, weight_decay_mask=kernels))
    lars = make_lars(0.0, weight_decay=DECAY, momentum=BETA)
    ours = run("lars", params, grads, momentum_correction=False, **FIELDS)
    assert_close(ours, steps_of(lars, params, grads), rtol=1e-5, atol=1e-6)


def test_lars_keeps_its_coefficient_beside_a_zero_norm(params):
    (grad,) = gradients(params, 1)
    params["head"]["kernel"] *= 0
    moved = run("lars", params, [grad], [1.0])["head"]["kernel"]
    np.testing.assert_allclose(moved, -0.001 * grad["head"]["kernel"], rtol=1e-5)


# ---- Muon -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(27, 32), (288, 64)])
@pytest.mark.parametrize(
    ("way", "tolerance"),
    [("default", 2e-5), ("cuda", 2e-5), ("cpu", 2e-4)],  # on CPUs by the squares of small singular values
)
def test_all_ways_to_orthogonalize_are_those_of_numpy(way, tolerance, shape, monkeypatch):
    """On GPUs all matrices of a shape at once; those that are wide lie among them transposed."""
    rng = np.random.default_rng(0)
    spectrum = np.exp(2 * rng.standard_normal(shape[1]))  # over three decades
    matrices = [(rng.standard_normal(shape) * spectrum).astype(np.float32) for _ in range(2)]
    matrices.append(matrices[0].T)
    monkeypatch.setattr(muon_module.lax, "platform_dependent", lambda *matrices, **ways: ways[way](*matrices))
    for found, matrix in zip(muon_module.orthogonalize(matrices), matrices, strict=True):
        scale = np.sqrt(max(1, matrix.shape[1] / matrix.shape[0]))
        np.testing.assert_allclose(found, scale * orthogonal(matrix.astype(np.float64)), atol=tolerance)


# ---- decays that change -----------------------------------------------------------------------------


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


# ---- masks and numbers ----------------------------------------------------------------------------


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
