"""minimal.py does what train.py does: the same data, initial parameters, gradients and first 20 steps."""

import ast
import functools
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    ROOT,
    decode_all,
    find_set,
    make_folder,
    make_small_config,
    run_script,
    typed,
)
from test_sources import zip_of

import minimal
from build import ProgramCache, prepare
from largebatch.hardware.compiled import compile_and_look
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.training.validation import validate

# Of the largest parameter after 20 steps. Measured: 2.5e-6, 3.3e-6 and 7e-8.
RATES = {"lamb": 0.01, "adam": 1e-3, "sgd": 0.05}
TOLERANCES = {"lamb": 2e-5, "adam": 2e-5, "sgd": 1e-6}
STEPS, NUM_IMAGES, SIZE, CLASSES = 20, 50, 8, 5
KEY = jax.random.key(0)

IMAGES, LABELS = minimal.make_synthetic(NUM_IMAGES, SIZE)
TRAIN, VAL, _ = minimal.split_indices(NUM_IMAGES)
VIEWS, VIEW_LABELS = minimal.expand(IMAGES[TRAIN]), np.repeat(LABELS[TRAIN], 8)


# ---- runs of both on the same images ----------------------------------------------------------------------


class TrainPyRun:
    """train.py's own programs, full batch, on 8 devices."""

    def __init__(self, optimizer: str, cache_dir, programs: ProgramCache):
        config = make_small_config(cache_dir)
        config.dataset.num_examples, config.dataset.image_size = NUM_IMAGES, SIZE
        config.batch.micro_batch_size, config.log.noise_every = 40, 0
        config.optimizer.name, config.optimizer.learning_rate = optimizer, RATES[optimizer]
        config.train.inner_steps, config.train.outer_steps = STEPS, 1
        self.run = prepare(typed(config), Clock(), programs)
        self.plan, self.start = self.run.plan, replicas.first_replica(self.run.state)

    @functools.cache  # noqa: B019
    def after(self, num_steps: int):
        """The state after so many steps, and their losses."""
        inputs = self.plan.schedule.inputs(0, self.plan.inputs_length)
        arrays, state = self.run.data.train.arrays, replicas.replicate(self.start)
        state, metrics = self.run.programs.inner_loop(state, arrays, inputs, np.int32(num_steps))
        return replicas.first_replica(state), np.asarray(metrics["loss"])[:num_steps]


@pytest.fixture(scope="module")
def train_py(session_cache):
    """train_py(optimizer) is a TrainPyRun."""
    programs = ProgramCache()
    return functools.cache(lambda optimizer: TrainPyRun(optimizer, session_cache, programs))


@pytest.fixture(scope="module")
def network(train_py):
    """The network of minimal.py for these images, with train.py's statistics of them."""
    data = train_py("sgd").plan.data
    return minimal.ConvNet(CLASSES, (SIZE, SIZE, 3), np.array(data.mean), np.array(data.std))


class MinimalRun:
    """The inner loop of minimal.py."""

    def __init__(self, network, optimizer, params, num_devices, steps):
        self.devices, self.steps = jax.devices()[:num_devices], steps
        self.shard = minimal.shard(VIEWS, VIEW_LABELS, self.devices)
        self.loop = minimal.make_inner_loop(network, optimizer, self.devices, len(VIEWS), 24, steps)
        self.one_replica = params, optimizer.init(params)

    def arguments(self):
        """What the first call takes."""
        state = jax.tree.map(lambda x: np.stack([x] * len(self.devices)), self.one_replica)
        return *minimal.place(state, self.devices), self.shard, np.int32(0), KEY

    def run(self, num_steps: int):
        """Parameters, optimizer state and examples [num_steps]."""
        (params, opt_state, *_), counts = self.arguments(), []
        for first in range(0, num_steps, self.steps):
            params, opt_state, metrics = self.loop(params, opt_state, self.shard, np.int32(first), KEY)
            counts += metrics[1][0].tolist()
        return replicas.first_replica(params), replicas.first_replica(opt_state), counts


@pytest.fixture(scope="module")
def minimal_run(train_py, network):
    """minimal_run(optimizer, devices) is a MinimalRun from train.py's parameters, full batch."""

    @functools.cache
    def make(optimizer: str, num_devices: int) -> MinimalRun:
        # One step a call for SGD, whose momentum after the first is the gradient.
        steps = 1 if optimizer == "sgd" else 5
        made = minimal.OPTIMIZERS[optimizer](RATES[optimizer])
        return MinimalRun(network, made, train_py(optimizer).start.params, num_devices, steps)

    return make


def distance(one, other) -> float:
    """The largest difference of two trees, as a part of the largest entry."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return float(max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(a).max() for a, _ in pairs))


# ---- the data -----------------------------------------------------------------------------------------------


def test_a_zip_is_read_as_by_train_py(tmp_path):
    make_folder(tmp_path / "set" / "2750", {"River": 7, "Forest": 12, "Highway": 5}, suffix=".jpg")
    path = zip_of(tmp_path / "set", tmp_path / "set.zip")
    images, labels = minimal.load_zip(str(path))
    dataset = find_set("mine", path, source="zip")
    in_order = np.argsort(dataset.ids)
    np.testing.assert_array_equal(images, decode_all(dataset)[in_order])
    np.testing.assert_array_equal(labels, dataset.labels[in_order])


# ---- the network --------------------------------------------------------------------------------------------


def test_parameters_start_as_train_pys(train_py, network):
    params = jax.jit(network.init)(jax.random.key(0), VIEWS[:1])["params"]
    assert distance(train_py("sgd").start.params, params) < 1e-6


def test_convolutions_of_cpus_are_those_of_accelerators(monkeypatch):
    """Images have an odd size."""
    images = np.random.default_rng(0).integers(0, 256, (4, 11 * 11 * 3), np.uint8)
    network = minimal.ConvNet(CLASSES, (11, 11, 3), np.full(3, 120.0), np.full(3, 70.0))
    params = jax.jit(network.init)(KEY, images)

    def gradient_on(platform):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        return jax.jit(jax.grad(lambda params: jnp.sum(network.apply(params, images) ** 2)))(params)

    assert distance(gradient_on("gpu"), gradient_on("cpu")) < 2e-6


# ---- the steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 7, 8])
def test_the_gradient_of_the_full_batch_is_train_pys(train_py, minimal_run, num_devices):
    """On 7 devices two have padding; micro-batches of 24 divide no share."""
    run = minimal_run("sgd", num_devices)
    _, opt_state, counts = run.run(1)
    assert counts == [len(VIEWS)]
    # SGD's momentum after a step from rest.
    expected, gradient = (
        optax.tree.get(state, "trace") for state in (train_py("sgd").after(1)[0].opt_state, opt_state)
    )
    assert distance(expected, gradient) < 2e-6


def test_an_epoch_of_mini_batches_visits_each_example_once():
    """5 steps of 40, shares of 5 in micro-batches of 3 and 2; at zero each loss has the gradient -1/2."""

    def apply(variables, images):
        return jnp.stack([variables["params"][images[:, 0]], jnp.zeros(len(images))], axis=1)

    devices, optimizer, params = jax.devices()[:8], optax.sgd(8.0), np.zeros((8, 200), np.float32)
    state = minimal.place((params, optimizer.init(params)), devices)
    shard = minimal.shard(np.arange(200, dtype=np.uint8).reshape(-1, 1, 1, 1), np.zeros(200, np.int32), devices)
    loop = minimal.make_inner_loop(SimpleNamespace(apply=apply), optimizer, devices, 40, 3, 5)
    moved, _, (_, counts) = loop(*state, shard, np.int32(0), KEY)
    assert counts[0].tolist() == [40] * 5
    np.testing.assert_allclose(np.asarray(moved)[0], 8 * 0.5 / 40, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "num_devices"),
    [("lamb", 1), ("lamb", 8), pytest.param("adam", 8, marks=pytest.mark.full), ("sgd", 1), ("sgd", 8)],
)
def test_parameters_after_20_steps_are_train_pys(train_py, minimal_run, optimizer, num_devices):
    params, *_ = minimal_run(optimizer, num_devices).run(STEPS)
    expected = train_py(optimizer).after(STEPS)[0].params
    assert distance(expected, params) < TOLERANCES[optimizer]
    assert distance(train_py(optimizer).start.params, expected) > 1e-2  # they moved


def test_one_all_reduce_for_each_step_and_donated_arguments(minimal_run):
    run = minimal_run("lamb", 8)
    found = compile_and_look(run.loop.lower(*run.arguments()), {}, "cpu").collectives
    assert [(one.opcode.removesuffix("-start"), one.times) for one in found] == [("all-reduce", run.steps)]
    params, opt_state, *others = run.arguments()
    run.loop(params, opt_state, *others)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, opt_state)))


@pytest.mark.parametrize(("num_devices", "count", "micro_batch_size"), [(7, 1, 64), (1, 19, 3), (7, 50, 3)])
def test_validation_counts_every_example_once(num_devices, count, micro_batch_size):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 6, (count, 1, 1, CLASSES), np.uint8)
    labels = rng.integers(0, CLASSES, count, np.int32)
    labels[0] = images[0].argmax()  # which is what is repeated where padding counts
    network = SimpleNamespace(apply=lambda variables, images: images * variables["params"])
    devices = jax.devices()[:num_devices]
    count_correct = minimal.make_count_correct(network, devices, micro_batch_size)
    hits = count_correct(np.ones((num_devices, 1), np.float32), minimal.shard(images, labels, devices))
    assert float(hits) == np.sum(images.reshape(count, -1).argmax(axis=1) == labels)


# ---- the file and the command -------------------------------------------------------------------------------

SOURCE = (ROOT / "minimal.py").read_text()


def test_it_is_short_and_imports_nothing_of_the_project():
    assert len(SOURCE.splitlines()) <= 250
    nodes = list(ast.walk(ast.parse(SOURCE)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    libraries = {"PIL", "flax", "jax", "numpy", "optax"}
    assert {name.partition(".")[0] for name in names} <= libraries | sys.stdlib_module_names
    assert not re.search(r"importlib|__import__|exec\(|eval\(", SOURCE)


LINE = r"step (\d+)  train loss (\d\.\d{4})  val accuracy ([01]\.\d{4})  \d+ images/s  \d+\.\d ms/step"


def test_the_command_does_what_train_py_does(train_py, monkeypatch, capsys):
    """The losses of the first 20 steps and the accuracy after them, with its own statistics of the images."""
    monkeypatch.setattr(minimal, "make_synthetic", lambda: (IMAGES, LABELS))
    flags = ["--optimizer", "sgd", "--learning_rate", "0.05", "--inner_steps", "5", "--outer_steps", "4"]
    monkeypatch.setattr(sys, "argv", ["minimal.py", *flags])
    minimal.main()
    matches = re.findall(LINE, capsys.readouterr().out)
    state, losses = train_py("sgd").after(STEPS)
    found = [float(loss) for _, loss, _ in matches]
    np.testing.assert_allclose(found, losses.reshape(4, 5).mean(axis=1), atol=1e-4)
    run = train_py("sgd").run
    expected = validate(run.programs, run.data, replicas.replicate(state)).scores.score
    assert float(matches[-1][2]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.full
def test_the_command_learns_the_synthetic_set():
    flags = ["--optimizer", "adam", "--learning_rate", 0.002, "--batch_size", 256]
    # Compiled as users do: the run takes longer than compiling.
    result = run_script("minimal.py", *flags, "--inner_steps", 25, "--outer_steps", 2, env={"XLA_FLAGS": ""})
    assert result.returncode == 0, result.stderr
    first, *lines, last = result.stdout.splitlines()
    assert re.fullmatch(r"3072 examples on 2 devices; compiled in \d+\.\d s", first)
    matches = [re.fullmatch(LINE, line) for line in lines]
    assert [int(match[1]) for match in matches] == [25, 50]
    assert last == f"final val accuracy {matches[-1][3]}"
    assert float(matches[-1][3]) > 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "lion"], ["--optimizer", "'lion'", "lamb", "adam", "sgd"]),
        (["--batch_size", "0"], ["--batch_size", "0", "1 to 3072", "full"]),
        (["--inner_steps", "0"], ["--inner_steps", "1 or more"]),
        (["--batchsize", "3"], ["unrecognized arguments", "--batchsize"]),
    ],
)
def test_a_bad_value_is_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minimal.py", *arguments])
    with pytest.raises(SystemExit) as end:
        minimal.main()
    lines = capsys.readouterr().err.splitlines()
    assert (end.value.code, len(lines)) == (2, 1)
    assert all(word in lines[0] for word in words), lines[0]


def test_a_missing_file_is_one_line():
    with pytest.raises(SystemExit, match=r"^minimal\.py: --path no/where\.zip: there is no such zip file$"):
        minimal.load_zip("no/where.zip")
