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
    assert_one_line_error,
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
from largebatch.data.sources.splits import split_indices
from largebatch.data.sources.synthetic import synthetic, synthetic_labels
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.training.loss import Batch
from largebatch.training.validation import validate
from largebatch.training.views import expand

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

    def __init__(
        self, network, optimizer, params, num_devices, *, size=None, micro_batch_size=16, steps=1, data=None
    ):
        self.devices, self.steps = jax.devices()[:num_devices], steps
        images, labels = data or (VIEWS, VIEW_LABELS)
        self.shard = minimal.shard(images, labels, self.devices)
        batch_size = size or len(images)
        self.loop = minimal.make_inner_loop(network, optimizer, self.devices, batch_size, micro_batch_size, steps)
        self.one_replica = params, optimizer.init(params)

    def arguments(self):
        """What the first call takes."""
        state = jax.tree.map(lambda x: np.stack([x] * len(self.devices)), self.one_replica)
        return *minimal.place(state, self.devices), self.shard, np.int32(0), KEY

    def run(self, num_steps: int):
        """Parameters, optimizer state, losses [num_steps] and examples [num_steps]."""
        (params, opt_state, *_), losses, counts = self.arguments(), [], []
        for first in range(0, num_steps, self.steps):
            params, opt_state, metrics = self.loop(params, opt_state, self.shard, np.int32(first), KEY)
            losses += metrics[0][0].tolist()
            counts += metrics[1][0].tolist()
        return replicas.first_replica(params), replicas.first_replica(opt_state), losses, counts


@pytest.fixture(scope="module")
def minimal_run(train_py, network):
    """minimal_run(optimizer, devices) is a MinimalRun from train.py's parameters, full batch."""

    @functools.cache
    def make(optimizer: str, num_devices: int) -> MinimalRun:
        # One step a call for SGD, whose momentum after the first is the gradient.
        steps = 1 if optimizer == "sgd" else 5
        made = minimal.OPTIMIZERS[optimizer](RATES[optimizer])
        return MinimalRun(network, made, train_py(optimizer).start.params, num_devices, steps=steps)

    return make


def gradient(opt_state):
    """SGD's momentum after a step from rest."""
    return optax.tree.get(opt_state, "trace")


def distance(one, other) -> float:
    """The largest difference of two trees, as a part of the largest entry."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return float(max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(a).max() for a, _ in pairs))


# ---- the data -----------------------------------------------------------------------------------------------


def test_synthetic_images_are_train_pys():
    images, labels = minimal.make_synthetic()
    np.testing.assert_array_equal(images, synthetic(480, 32, 0))
    np.testing.assert_array_equal(labels, synthetic_labels(480))


@pytest.mark.parametrize("count", [10, 57, 480])
def test_the_split_is_train_pys(count):
    expected = split_indices([f"{number:06d}" for number in range(count)], 0)
    for part, rows in zip(minimal.split_indices(count), expected.values(), strict=True):
        np.testing.assert_array_equal(part, rows)


def test_a_zip_is_read_as_by_train_py(tmp_path):
    make_folder(tmp_path / "set" / "2750", {"River": 7, "Forest": 12, "Highway": 5}, suffix=".jpg")
    path = zip_of(tmp_path / "set", tmp_path / "set.zip")
    images, labels = minimal.load_zip(str(path))
    dataset = find_set("mine", path, source="zip")
    in_order = np.argsort(dataset.ids)
    np.testing.assert_array_equal(images, decode_all(dataset)[in_order])
    np.testing.assert_array_equal(labels, dataset.labels[in_order])


def test_the_views_and_their_order_are_train_pys():
    np.testing.assert_array_equal(VIEWS, expand(IMAGES[TRAIN], 8).reshape(VIEWS.shape))
    one = minimal.expand(np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3))
    assert len({view.tobytes() for view in one}) == 8


@pytest.mark.parametrize("num_devices", [1, 7, 8])
@pytest.mark.parametrize("count", [3, 40])
def test_every_example_is_on_one_device_with_weight_one(num_devices, count):
    images = np.arange(count, dtype=np.uint8).reshape(count, 1, 1, 1)
    placed = minimal.shard(images, np.arange(count), jax.devices()[:num_devices])
    assert [shard.device for shard in placed["images"].addressable_shards] == jax.devices()[:num_devices]
    weights = np.asarray(placed["weights"])
    for name in ("images", "labels"):
        kept = np.asarray(placed[name]).reshape(weights.shape)[weights == 1]
        assert sorted(kept.tolist()) == list(range(count))
    assert set(weights.ravel().tolist()) <= {0.0, 1.0}


# ---- the network --------------------------------------------------------------------------------------------


def test_parameters_start_as_train_pys(train_py, network):
    params = jax.jit(network.init)(jax.random.key(0), VIEWS[:1])["params"]
    assert distance(train_py("sgd").start.params, params) < 1e-6


@pytest.mark.parametrize(("size", "dtype"), [(8, "float32"), (11, "float32"), (11, "bfloat16")])
def test_convolutions_of_cpus_are_those_of_accelerators(size, dtype, monkeypatch):
    """And the parameters, their gradient and the logits are of float32."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (4, size * size * 3), np.uint8)
    network = minimal.ConvNet(CLASSES, (size, size, 3), np.full(3, 120.0), np.full(3, 70.0), dtype)
    params = jax.jit(network.init)(KEY, images)

    def logits_and_gradient(platform):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

        def squares(params):
            logits = network.apply(params, images)
            return jnp.sum(logits**2), logits

        return jax.jit(jax.value_and_grad(squares, has_aux=True))(params)

    of_cpu, of_gpu = logits_and_gradient("cpu"), logits_and_gradient("gpu")
    assert {leaf.dtype for leaf in jax.tree.leaves((params, of_cpu))} == {jnp.dtype("float32")}
    assert distance(of_gpu, of_cpu) < (2e-6 if dtype == "float32" else 3e-2)


# ---- the steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 7, 8])
def test_the_gradient_of_the_full_batch_is_train_pys(train_py, minimal_run, num_devices):
    """On 7 devices two have padding; on 7 and 8 micro-batches of 16 do not divide the share."""
    run = minimal_run("sgd", num_devices)
    _, opt_state, _, counts = run.run(1)
    assert counts == [len(VIEWS)]
    found = distance(gradient(train_py("sgd").after(1)[0].opt_state), gradient(opt_state))
    print(f"gradient on {num_devices} devices: {found:.1e} of the largest entry")
    assert found < 2e-6


@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("num_devices", [1, 8])
def test_parameters_after_20_steps_are_train_pys(train_py, minimal_run, optimizer, num_devices):
    params, *_ = minimal_run(optimizer, num_devices).run(STEPS)
    expected = train_py(optimizer).after(STEPS)[0].params
    found = distance(expected, params)
    print(f"{optimizer} on {num_devices} devices: {found:.1e} of the largest entry")
    assert found < TOLERANCES[optimizer]
    assert distance(train_py(optimizer).start.params, expected) > 1e-2  # they moved


def test_the_gradient_of_a_batch_and_micro_batches_that_do_not_divide(train_py, network):
    """A step of 100 examples is rounded up to 13 on each of 8 devices, which are micro-batches of 5, 5 and 3."""
    start = train_py("sgd").start.params
    run = MinimalRun(network, minimal.OPTIMIZERS["sgd"](0.05), start, 8, size=100, micro_batch_size=5)
    _, opt_state, losses, counts = run.run(1)
    weights = visits_of(8, 100, 5, num_steps=1).visits[0]
    assert counts == [weights.sum()] == [104]
    # train.py's loss over the examples that the step visits.
    loss_fn = train_py("sgd").run.programs.step.loss_fn
    batch = Batch(VIEWS, VIEW_LABELS, np.float32(weights / weights.sum())[None])
    (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(start, {}, batch)
    found = distance(jax.tree.map(np.asarray, grads), gradient(opt_state))
    print(f"gradient of 104 examples: {found:.1e} of the largest entry")
    assert found < 2e-6
    np.testing.assert_allclose(losses, [loss], rtol=2e-6)


def visits_of(num_devices: int, size: int, micro_batch_size: int, num_steps: int, steps_of_a_call=1):
    """How often each step visits each view: `visits` [num_steps, views], and the loop's own `counts` [num_steps].

    Each image is its number, and the loss of image i at the parameters zero has the gradient -1/2 for parameter i.
    """
    numbers = np.arange(len(VIEWS))
    images = np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8).reshape(-1, 1, 1, 2)

    def apply(variables, images):
        of_images = variables["params"][images[:, 0].astype(jnp.int32) * 256 + images[:, 1]]
        return jnp.stack([of_images, jnp.zeros_like(of_images)], axis=1)

    def record(grads, state, params=None):
        count, every = state
        return jax.tree.map(jnp.zeros_like, grads), (count + 1, every.at[count].set(grads))

    recorder = optax.GradientTransformation(
        lambda params: (jnp.int32(0), jnp.zeros((num_steps, len(params)))), record
    )
    run = MinimalRun(
        SimpleNamespace(apply=apply),
        recorder,
        np.zeros(len(VIEWS), np.float32),
        num_devices,
        size=size,
        micro_batch_size=micro_batch_size,
        steps=steps_of_a_call,
        data=(images, np.zeros(len(VIEWS), np.int32)),
    )
    _, (_, grads), _, counts = run.run(num_steps)
    return SimpleNamespace(visits=np.rint(-2 * grads * np.array(counts)[:, None]).astype(int), counts=counts)


@pytest.mark.parametrize("num_devices", [1, 7, 8])
@pytest.mark.parametrize(("size", "micro_batch_size"), [(320, 16), (100, 5), (9, 64)])
def test_an_epoch_visits_no_example_twice(num_devices, size, micro_batch_size):
    share, num_rows = -(-size // num_devices), -(-len(VIEWS) // num_devices)
    steps = num_rows // share  # of an epoch
    # Calls of two steps begin in the midst of an epoch where it has an odd number.
    found = visits_of(num_devices, size, micro_batch_size, 2 * steps, steps_of_a_call=2)
    np.testing.assert_array_equal(found.visits.sum(axis=1), found.counts)
    epochs = found.visits[:steps], found.visits[steps:]
    for epoch in epochs:
        assert set(epoch.sum(axis=0).tolist()) <= {0, 1}
    if size == len(VIEWS):
        assert found.visits.min() == 1
        return
    assert (epochs[0][0] != epochs[1][0]).any()  # another order
    for device in range(num_devices):
        of_steps = found.visits[:, device::num_devices].sum(axis=1)
        is_padded = num_rows * num_devices > len(VIEWS) and device >= len(VIEWS) % num_devices
        assert set(of_steps.tolist()) <= {share, share - is_padded}


def executions_of_psum(jaxpr, times=1) -> int:
    """How often a call of a program adds over devices."""
    total = 0
    for equation in jaxpr.eqns:
        if re.match(r"psum|all_|ppermute|reduce_scatter", equation.primitive.name):
            total += times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += executions_of_psum(inner, times * turns)
    return total


def test_one_all_reduce_for_each_step_and_no_other_collective(minimal_run):
    run = minimal_run("lamb", 8)
    text = run.loop.lower(*run.arguments()).compile().as_text()
    calls = re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", text)
    assert calls == ["all-reduce"]
    assert executions_of_psum(jax.make_jaxpr(run.loop)(*run.arguments()).jaxpr) == run.steps == 5


def test_parameters_and_optimizer_state_are_donated(minimal_run):
    run = minimal_run("lamb", 8)
    params, opt_state, *others = run.arguments()
    run.loop(params, opt_state, *others)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, opt_state)))


@pytest.mark.parametrize("num_devices", [1, 7, 8])
@pytest.mark.parametrize("count", [1, 19, 50])
@pytest.mark.parametrize("micro_batch_size", [3, 64])
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


def learned(*arguments, steps: list[int]) -> float:
    """The accuracy at the end of a run of the command, which prints a line for each number in `steps`."""
    # Compiled as users do: the run takes longer than compiling.
    result = run_script("minimal.py", *arguments, env={"XLA_FLAGS": ""})
    assert result.returncode == 0, result.stderr
    first, *lines, last = result.stdout.splitlines()
    assert re.fullmatch(r"3072 examples on 2 devices; compiled in \d+\.\d s", first)
    matches = [re.fullmatch(LINE, line) for line in lines]
    assert [int(match[1]) for match in matches] == steps
    assert last == f"final val accuracy {matches[-1][3]}"
    return float(matches[-1][3])


def test_the_command_learns_the_synthetic_set():
    adam = ["--optimizer", "adam", "--learning_rate", 0.002]
    assert learned(*adam, "--batch_size", 256, "--inner_steps", 25, "--outer_steps", 2, steps=[25, 50]) > 0.9


@pytest.mark.full
def test_the_command_learns_the_synthetic_set_by_default():
    assert learned(steps=[10, 20, 30, 40, 50]) > 0.9


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--batchsize", "3"], ["unrecognized arguments", "--batchsize"], 2),
        (["--path", "no/where.zip"], ["--path", "no/where.zip"], 1),
    ],
)
def test_a_wrong_command_is_one_line(arguments, words, code):
    assert_one_line_error(run_script("minimal.py", *arguments), *words, code=code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "lion"], ["--optimizer", "'lion'", "lamb", "adam", "sgd"]),
        (["--batch_size", "0"], ["--batch_size", "0", "1 to 3072", "full"]),
        (["--batch_size", "all"], ["--batch_size", "all", "1 to 3072", "full"]),
        (["--inner_steps", "0"], ["--inner_steps", "1 or more"]),
        (["--seed"], ["--seed"]),
    ],
)
def test_a_bad_value_is_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minimal.py", *arguments])
    with pytest.raises(SystemExit) as end:
        minimal.main()
    lines = capsys.readouterr().err.splitlines()
    assert (end.value.code, len(lines)) == (2, 1)
    assert all(word in lines[0] for word in words), lines[0]
