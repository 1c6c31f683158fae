"""Kernels by their time, from the traces of jax.profiler."""

import jax
import numpy as np
import pytest

from benchmarks import kernels


def event(line, name, begin, length, pid=1, **arguments):
    return {"ph": "X", "pid": pid, "tid": line, "name": name, "ts": begin, "dur": length, "args": arguments}


def line_of(line, name, pid=1):
    return {"ph": "M", "pid": pid, "tid": line, "name": "thread_name", "args": {"name": name}}


def test_kernels_are_those_of_the_streams_without_what_is_within_them():
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        line_of(7, "Stream #13(Compute)"),
        line_of(8, "XLA Modules"),
        line_of(7, "python", pid=2),
        event(7, "conv", 0, 10, hlo_op="conv.1"),
        event(7, "conv", 20, 14, hlo_op="conv.1"),
        event(8, "jit_inner_loop", 0, 100),
        event(7, "launch", 0, 1000, pid=2, hlo_op="conv.1"),
    ]
    assert [one["ts"] for one in kernels.kernel_events(events)] == [0, 20]
    on_cpu = [event(1, "while", 0, 100, hlo_op="while"), event(1, "dot", 10, 30, hlo_op="dot"), event(1, "x", 0, 9)]
    assert kernels.kernel_events(on_cpu) == on_cpu[:2]
    assert [own for _, own in kernels.own_times(on_cpu[:2])] == [70, 30]


def test_a_trace_of_jax_is_read(tmp_path):
    product = jax.jit(lambda x: (x @ x).sum())
    x = np.ones((300, 300), np.float32)
    product(x)
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            jax.block_until_ready(product(x))
    table = kernels.read_trace(str(tmp_path), updates=3)
    assert table["ms_per_update"] == pytest.approx(sum(one["ms"] for one in table["kernels"]))
    assert table["kernels"][0]["ms"] > 0
    assert table["kernels"][0]["launches"] >= 1  # a product may be shared by threads
