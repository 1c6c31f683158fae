"""Bytes that a program moves: by hand, and as XLA's own analysis counts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from largebatch.hardware.compiled import parse

BY_HAND = """HloModule jit_f

%takes_rows (p.0: f32[100,8], p.1: s32[], p.2: f32[4,8]) -> f32[4,8] {
  %p.0 = f32[100,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %p.2 = f32[4,8]{1,0} parameter(2)
  %same.1 = f32[100,8]{1,0} bitcast(%p.0)
  %rows.1 = f32[4,8]{1,0} dynamic-slice(%same.1, %p.1, %p.1), dynamic_slice_sizes={4,8}
  ROOT %sum.1 = f32[4,8]{1,0} add(%rows.1, %p.2)
}

%writes_a_row (p.3: f32[100,8], p.4: f32[1,8], p.5: s32[]) -> f32[100,8] {
  %p.3 = f32[100,8]{1,0} parameter(0)
  %p.4 = f32[1,8]{1,0} parameter(1)
  %p.5 = s32[] parameter(2)
  ROOT %written.1 = f32[100,8]{1,0} dynamic-update-slice(%p.3, %p.4, %p.5, %p.5)
}

ENTRY %main (a: f32[100,8], i: s32[], b: f32[4,8], row: f32[1,8]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[4,8]{1,0:S(1)} parameter(2)
  %row = f32[1,8]{1,0} parameter(3)
  %taken = f32[4,8]{1,0} fusion(%a, %i, %b), kind=kLoop, calls=%takes_rows
  %start = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[]) copy-start(%taken)
  %done = f32[4,8]{1,0} copy-done(%start)
  ROOT %put = f32[100,8]{1,0} fusion(%a, %row, %i), kind=kLoop, calls=%writes_a_row
}
"""


def test_parts_count_as_parts_and_what_is_on_the_chip_not_at_all():
    program = parse(BY_HAND)
    moved = {one.name: program.moved_by(one) for one in program.instructions()}
    rows, row, index = 4 * 8 * 4, 8 * 4, 4
    assert moved["taken"] == rows + index + rows  # of `a` its slice, of `b` nothing
    assert (moved["start"], moved["done"]) == (2 * rows, 0)
    assert moved["put"] == row + index + row
    assert moved["a"] == 0


def gradient(x, kernel):
    return jax.grad(lambda kernel: jnp.sum(jnp.tanh(x @ kernel)))(kernel)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, kernel: jnp.tanh(x @ kernel) + 1,
        gradient,
        lambda x, kernel: jnp.sum(x[64:] * 2, axis=0) @ kernel,
        lambda x, kernel: jax.lax.dynamic_slice_in_dim(x, x[0, 0].astype(int), 8) * 2,
    ],
    ids=["forward", "gradient", "slice", "dynamic slice"],
)
def test_bytes_are_those_of_xla(function):
    x, kernel = np.ones((128, 96), np.float32), np.ones((96, 80), np.float32)
    compiled = jax.jit(function).lower(x, kernel).compile()
    program = parse(compiled.as_text())
    ours = sum(times * program.moved_by(one) for one, times in program.executions(lambda loop: 1))
    assert ours == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.02)
