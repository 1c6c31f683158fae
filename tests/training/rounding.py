"""How far rounding in the gradients can take the parameters: first-order bounds, of the gradients themselves.

Two runs make the same updates with gradients g_t and g_t + e_t. The bounds add up what the errors e_t do to the
updates of Muon and LAMB. They leave out what the differences do to later gradients: over a few updates at a small
rate that is less than the slack that every bound here has.
"""

import dataclasses
import math

import numpy as np

B1, B2, EPSILON = 0.9, 0.999, 1e-8
# Muon puts singular values five times through p(x) = 3.4445 x - 4.7750 x^3 + 2.0315 x^5. The steepest place of the
# result in [0, 1] is 0. A function of the singular values is, in the Frobenius norm, as steep as the function.
NEWTON_SCHULZ_SLOPE = 3.4445**5


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the parameters over T updates, flattened to n entries."""

    shape: tuple[int, ...]
    weights: np.ndarray  # float64 [T, n]
    grads: np.ndarray  # float64 [T, n]
    errors: np.ndarray  # float64 [T, n], of the gradients, at least 0


def moving_average(values: np.ndarray, decay: float) -> np.ndarray:
    """Of [T, n] the average up to each update, as Adam has it: without a bias to the 0 before the first."""
    average, rows = np.zeros(values.shape[1]), []
    for count, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        rows.append(average / (1 - decay**count))
    return np.array(rows)


def adam_directions(leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
    """Adam's directions m / sqrt(v), and a bound of what the errors change in them; both [T, n].

    m changes by the average |e|, and sqrt(v) by the root of the average e^2, for it is a norm of the gradients. So
    the quotient changes by (|dm| + |quotient| |d sqrt(v)|) / sqrt(v), and never by more than twice its greatest
    value, which for T updates is at most sqrt(sum(a^2 / b)), where a and b are the weights of the averages.
    """
    first = moving_average(leaf.grads, B1)
    root = np.sqrt(moving_average(leaf.grads**2, B2))
    quotient = first / np.maximum(root, 1e-300)
    change = moving_average(leaf.errors, B1) + np.abs(quotient) * np.sqrt(moving_average(leaf.errors**2, B2))
    ages = np.arange(len(leaf.grads))
    a, b = B1**ages / (B1**ages).sum(), B2**ages / (B2**ages).sum()
    return quotient, np.minimum(change / np.maximum(root, 1e-300), 2 * math.sqrt((a**2 / b).sum()))


def lamb_bound(leaf: Leaf, rate: float) -> float:
    """The most that LAMB's parameters differ in the end, as the norm of an array.

    An update of a kernel is rate |w| u / |u|, which changes by at most rate |w| |du| / |u|, and by rate times what
    |w| changes; that of a bias is rate u.
    """
    directions, changes = adam_directions(leaf)
    distance = 0.0
    for weights, direction, change in zip(leaf.weights, directions, changes, strict=True):
        if len(leaf.shape) > 1:
            ratio = np.linalg.norm(weights) / np.linalg.norm(direction)
            distance += rate * (ratio * np.linalg.norm(change) + distance)
        else:
            distance += rate * np.linalg.norm(change)
    return float(distance)


def muon_bound(leaf: Leaf, rate: float) -> float:
    """The most that Muon's parameters differ in the end, as the norm of an array.

    The momentum M is divided by its norm, orthogonalised and multiplied by sqrt(max(1, outputs / inputs)). Its
    change dM counts for |dM| / |M| before Newton-Schulz. Biases and the head have Adam's update.
    """
    if len(leaf.shape) != 4:
        return float(rate * np.linalg.norm(adam_directions(leaf)[1], axis=1).sum())
    outputs, inputs = leaf.shape[-1], math.prod(leaf.shape[:-1])
    scale = math.sqrt(max(1.0, outputs / inputs))
    momentum = np.linalg.norm(moving_average(leaf.grads, B1), axis=1)
    change = np.linalg.norm(moving_average(leaf.errors, B1), axis=1)
    return float((rate * scale * NEWTON_SCHULZ_SLOPE * change / momentum).sum())
