"""Evenness of `batching.shuffled`: chi-square tests over many keys, which are those that training makes.

    python tests/data/evenness.py [--rounds 4 8 12 16 24 32] [--lengths 8 45] [--keys 1000000]

prints, for each length and number of rounds, the largest share of its bound that any test reaches.
"""

import argparse
import itertools
import math
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from largebatch.data import batching

FEW = 8  # of so many elements every whole order is counted
MOST_CELLS = 150_000  # of a test of two places; more elements are put into BINS
BINS = 100
CHANCE = 1e-6  # of a test of an even shuffle to be above its bound
# What training makes keys of, with one of the parts running.
KEYS = {
    "epochs": lambda number: batching.shuffle_key(0, number, 0, 0),
    "passes": lambda number: batching.shuffle_key(0, number // 8, 0, number % 8),
    "shards": lambda number: batching.shuffle_key(0, number // 480, number % 480, 0),
    "views": lambda number: batching.shuffle_key(0, number // 45, 0, 8 + number % 45),
    "seeds": lambda number: batching.shuffle_key(number, 0, 0, 0),
    "bare": lambda number: number.astype(jnp.uint32),
}


def shares_of_bound(length: int, keys: str, count: int, rounds: int = batching.SHUFFLE_ROUNDS) -> dict[str, float]:
    """Chi-square of each test, as a share of its bound: above 1 is uneven.

    Args:
      length: elements that are shuffled.
      keys: one of KEYS.
      count: keys.
      rounds: of the shuffle.
    """
    middle, last = length // 2, length - 1
    places = range(length) if length <= FEW else sorted({0, 1, middle - 1, middle, last - 1, last})
    orders = np.asarray(_elements_at(tuple(places), length, rounds, KEYS[keys](jnp.arange(count))))
    element = dict(zip(places, orders.T, strict=True))
    # (place, place, keys from the one to the other): of one key, or of a key and the next.
    pairs = [(one, other, 0) for one, other in {(0, 1), (0, last), (middle - 1, middle), (last - 1, last)}]
    pairs = [pair for pair in pairs if 0 <= pair[0] < pair[1]] + [(0, 0, 1), (0, 1, 1), (last, last, 1)]
    shares = {}
    if length <= FEW:
        shares["whole orders"] = _share(_counts_of_orders(orders, length))
    for first, second, later in pairs:
        one, other = element[first][: count - later], element[second][later:]
        name = f"place {first}, and {second} of {'the next' if later else 'the same'} key"
        shares[name] = _share_of_two(one, other, length, differ=not later)
        distances = np.bincount((other - one) % length, minlength=length)[0 if later else 1 :]
        if len(distances) > 1:
            shares[f"distance of {name}"] = _share(distances)
    return shares


@partial(jax.jit, static_argnums=(0, 1, 2))
def _elements_at(places: tuple, length: int, rounds: int, keys):
    """Return the elements at some places of the orders of keys: int32 [keys, places]."""
    usual, batching.SHUFFLE_ROUNDS = batching.SHUFFLE_ROUNDS, rounds
    try:
        return batching.shuffled(jnp.array(places), length, keys[:, None])
    finally:
        batching.SHUFFLE_ROUNDS = usual


def _counts_of_orders(orders: np.ndarray, length: int) -> np.ndarray:
    """Count how often each of the length! orders came."""
    _, counts = np.unique(orders @ length ** np.arange(length), return_counts=True)
    return np.pad(counts, (0, math.factorial(length) - len(counts)))


def _share_of_two(one: np.ndarray, other: np.ndarray, length: int, differ: bool) -> float:
    """Test the two elements of each key, which can or cannot be the same one."""
    bins = length if length**2 <= MOST_CELLS else BINS
    bin_of = np.arange(length) * bins // length
    sizes = np.bincount(bin_of)
    cases = np.outer(sizes, sizes) - differ * np.diag(sizes)
    counts = np.bincount(bin_of[one] * bins + bin_of[other], minlength=bins**2)
    assert counts[cases.ravel() == 0].sum() == 0
    return _share(counts[cases.ravel() > 0], cases[cases > 0])


def _share(counts: np.ndarray, cases=1) -> float:
    """Return the chi-square of counts as a share of its bound; cells hold so many equally probable cases."""
    cases = np.broadcast_to(cases, counts.shape)
    expected = cases * (counts.sum() / cases.sum())
    return float(((counts - expected) ** 2 / expected).sum() / stats.chi2.isf(CHANCE, len(counts) - 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[4, 8, 12, 16, 24, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 3, 5, 8, 45, 46, 334, 21_600])
    parser.add_argument("--keys", type=int, default=1_000_000)
    given = parser.parse_args()
    for length, rounds in itertools.product(given.lengths, given.rounds):
        shares = {
            f"{name}, {keys}": share
            for keys in KEYS
            for name, share in shares_of_bound(length, keys, given.keys, rounds).items()
        }
        worst = max(shares, key=shares.get)
        above = sum(share > 1 for share in shares.values())
        line = f"{length:6} {rounds:3} rounds: {shares[worst]:8.2f} ({worst}); {above} of {len(shares)} above 1"
        print(line, flush=True)


if __name__ == "__main__":
    main()
