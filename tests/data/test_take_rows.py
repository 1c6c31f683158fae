import jax
import numpy as np
import pytest

from largebatch.data import placement


@pytest.mark.parametrize("take", [placement.take_rows, placement._take_in_turn], ids=["chosen", "in turn"])
@pytest.mark.parametrize("width", [3, placement.WIDEST_GATHERED + 1])
def test_rows_are_those_of_numpy(take, width):
    array = np.random.default_rng(0).integers(0, 256, (7, width), np.uint8)
    index = np.int32([6, 0, 3, 3])
    np.testing.assert_array_equal(jax.jit(take)(array, index), array[index])
