import functools
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax

from largebatch.hardware import chips
from largebatch.hosts import replicas
from largebatch.hosts.replicas import AXIS
from largebatch.util import UserError

KNOWN = {"xla_cpu_enable_fast_math": "True"}  # to this platform's compiler


def add_sum(state, data, count):
    """Take and return every kind of argument and result: mapped, donated, replicated, whole."""
    total = lax.psum(data["x"].sum(), AXIS) * count
    return jax.tree.map(lambda leaf: leaf + total, state), total


def arguments():
    rows = [np.full((1, 3), number, np.float32) for number in range(jax.local_device_count())]
    placed = [jax.device_put({"w": row}, device) for row, device in zip(rows, jax.local_devices(), strict=True)]
    return replicas.stack(placed), {"x": np.ones((len(rows), 2), np.float32)}, np.int32(5)


@pytest.fixture
def with_options(monkeypatch):
    """(options) -> the function above, pmapped, as if this platform had these options."""

    def make(options):
        monkeypatch.setattr(replicas, "options_for", lambda platform: options)
        return replicas.pmap(add_sum, in_axes=(0, 0, None), out_axes=(0, None), donate_argnums=(0,))

    return make


def test_programs_with_options_do_as_without(with_options):
    plain = with_options({})(*arguments())
    loop = with_options(KNOWN)
    state, *rest = arguments()
    found = loop(state, *rest)
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert state["w"].is_deleted()  # given away
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), found, plain))

    longer = {"x": np.ones((jax.local_device_count(), 3), np.float32)}
    assert float(loop(found[0], longer, np.int32(1))[1]) == 3 * jax.device_count()


@pytest.mark.parametrize("options", [{}, KNOWN])
def test_what_is_compiled_ahead_is_neither_run_nor_compiled_again(with_options, options):
    loop = with_options(options)
    state, *rest = arguments()
    replicas.compile_side_by_side([(loop, (state, *rest))])
    assert not state["w"].is_deleted()  # given away by a call alone
    with jax.no_tracing():
        found, total = loop(state, *rest)
        again, _ = loop(found, *rest)
    plain, plain_total = with_options({})(*arguments())
    assert total == plain_total
    np.testing.assert_array_equal(again["w"], np.asarray(plain["w"]) + np.asarray(plain_total))


@pytest.fixture
def that_fails(with_options, monkeypatch):
    """Make the function above, pmapped, whose program with options fails with a message after its work."""

    def make(message):
        loop = with_options(KNOWN)
        lower = loop.lower

        def compile_to_fail(lowered, compiler_options=None):
            program = lowered.compile()

            def fails(*arguments):
                jax.block_until_ready(program(*arguments))  # takes what it was given
                raise jax.errors.JaxRuntimeError(message)

            return fails if compiler_options else program

        def lower_to_fail(*arguments):
            return SimpleNamespace(compile=functools.partial(compile_to_fail, lower(*arguments)))

        monkeypatch.setattr(loop, "lower", lower_to_fail)
        return loop

    return make


def test_a_program_that_fails_with_options_runs_without(with_options, that_fails, caplog):
    plain = with_options({})(*arguments())
    loop = that_fails("INTERNAL: operation not permitted when stream is capturing\nmore")
    with caplog.at_level(logging.WARNING):
        found = loop(*arguments())
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert [record.getMessage() for record in caplog.records] == [
        "compiled again, as with XLA_FLAGS=--xla_cpu_enable_fast_math=, for a program fails here: "
        "INTERNAL: operation not permitted when stream is capturing"
    ]


def test_a_users_flag_goes_first(monkeypatch):
    name = "xla_gpu_enable_command_buffer"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert chips.options_for("gpu") == chips.GPU_OPTIONS
    assert {"WHILE", "CONVOLUTION"} < set(chips.options_for("cuda")[name].split(","))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=true --{name}=")
    assert name not in chips.options_for("gpu")
    assert chips.options_for("cpu") == chips.options_for("tpu") == {}


def test_one_of_several_hosts_does_not_go_on_with_another_program(that_fails, monkeypatch):
    loop, given = that_fails("INTERNAL: no\nmore"), arguments()
    monkeypatch.setattr(replicas.jax, "process_count", lambda: 2)
    monkeypatch.setattr(replicas.PmappedFunction, "_run", lambda self, program, arguments: program(*arguments))
    with pytest.raises(UserError, match=r"fails here \(INTERNAL: no\); set XLA_FLAGS=.* on all hosts$"):
        loop(*given)


def test_a_program_that_does_not_fit_is_not_compiled_again(that_fails, caplog):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^RESOURCE_EXHAUSTED"):
        that_fails("RESOURCE_EXHAUSTED: out of memory")(*arguments())
    assert not caplog.records
