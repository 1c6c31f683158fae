"""Classifiers behind inner layers, which help to train them and are left out of everything else."""

import flax.linen as nn
import jax.numpy as jnp

SIDE_LOGITS = "side_logits"  # the collection that their logits are sown into, where the loss asks for it


class SideHead(nn.Module):
    """A linear classifier of the mean over all pixels: Lee et al. 2015, "Deeply-Supervised Nets"."""

    num_classes: int
    dtype: jnp.dtype
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x) -> None:
        head = nn.Dense(self.num_classes, dtype=self.dtype, kernel_init=self.kernel_init)
        self.sow(SIDE_LOGITS, "logits", head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32))
