"""Predictions, loss and accuracy over ALL examples of a split, across all hosts."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.hosts.replicas import AXIS, pmap


@dataclasses.dataclass(frozen=True)
class Scores:
    """Over `num_examples` examples."""

    loss: float  # mean cross-entropy, in nats
    accuracy: float  # 0..1
    num_examples: int


def make_predict(logits_fn: Callable, micro_batch_size: int, *, packed: bool = False):
    """Logits of a sharded split, pmapped.

    Args:
      logits_fn: (params, integer images [M, ...]) -> float32 logits [M, num_classes].
      micro_batch_size: images per forward pass, per device.
      packed: each device has a run of its own; its logits stay where they are.
    Returns:
      (params, images [n, ...]) with a leading local-device axis each -> logits
      [num_devices, n', num_classes] of all devices, n' >= n, on every host.
    """

    def predict(params, images):
        num_images = images.shape[0]
        size = min(micro_batch_size, num_images)
        starts = jnp.arange(-(-num_images // size)) * size

        def some(start):
            # The last slice may run over the end: indices are clipped, the rows beyond are dropped later.
            rows = jnp.minimum(start + jnp.arange(size), num_images - 1)
            return logits_fn(params, images[rows])

        logits = lax.map(some, starts)
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if packed else lax.all_gather(logits, AXIS)

    return pmap(predict, in_axes=(0, 0), out_axes=0 if packed else None)


def in_split_order(gathered: np.ndarray, num_examples: int) -> np.ndarray:
    """[num_devices, n', ...] as gathered by `make_predict` -> [num_examples, ...] in the split's order."""
    per_device = -(-num_examples // gathered.shape[0])
    return gathered[:, :per_device].swapaxes(0, 1).reshape(-1, *gathered.shape[2:])[:num_examples]


def score(logits: np.ndarray, labels: np.ndarray) -> Scores:
    """Loss and accuracy of logits [N, num_classes] against int labels [N]."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -log_probs[np.arange(len(labels)), labels].mean()
    return Scores(float(loss), float((logits.argmax(axis=1) == labels).mean()), len(labels))
