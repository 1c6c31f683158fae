"""A depth for each pixel, 0 to 1: losses by name, and errors over all pixels."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from largebatch.tasks import planes
from largebatch.tasks.kinds import KINDS
from largebatch.tasks.pixel_losses import DEPTH_LOSSES, PIXELS

NEAR = 1.25  # a depth is right within this factor: Eigen et al. 2014, "Depth Map Prediction", section 4.2


@dataclasses.dataclass(frozen=True)
class DepthScores:
    """Scores over all pixels of a split; see `task.Scores`."""

    loss: float
    rmse: float
    relative_error: float | None  # mean of |error| / depth; None where no depth is above 0
    near: float | None  # share of the pixels with a depth above 0 that are right within a factor of NEAR
    num_examples: int

    @property
    def score(self) -> float:
        """The root mean square of the errors."""
        return self.rmse

    def row_fields(self) -> dict:
        """Return the columns of metrics.jsonl; see `task.Scores`."""
        return {
            "val_loss": self.loss,
            "val_depth_rmse": self.rmse,
            "val_depth_relative_error": self.relative_error,
            "val_depth_near": self.near,
            "val_examples": self.num_examples,
        }


@struct.dataclass
class DepthSums:
    """Sums over the known examples of a micro-batch, and over their pixels."""

    losses: jax.Array  # float32
    count: jax.Array  # int32, examples
    pixels: jax.Array  # int32
    square_errors: jax.Array  # float32
    relative_errors: jax.Array  # float32: |error| / depth, of pixels with a depth above 0
    near: jax.Array  # int32: pixels with a depth that are right within a factor of NEAR
    with_depth: jax.Array  # int32: pixels with a depth above 0


@dataclasses.dataclass(frozen=True)
class Depth:
    """The task of outputs [M, H, W, 1] for depths float32 [M, H, W], 0 to 1; see `task.Task`."""

    depth_loss: str  # a key of DEPTH_LOSSES
    kind: ClassVar = KINDS["depth"]
    outputs: ClassVar = (1,)
    target_planes: ClassVar = planes.DEPTH_PLANES
    metric_names: ClassVar = ("depth_error",)
    kept_names: ClassVar = ("loss", "depth_rmse")

    def targets(self, labels, target_planes) -> jax.Array:
        """Return the depths; see `task.Task`."""
        return planes.depths_of(target_planes)

    def losses(self, outputs, targets) -> jax.Array:
        """Compute the loss of each example; see `task.Task`."""
        return DEPTH_LOSSES[self.depth_loss](outputs[..., 0], targets)

    def metrics(self, outputs, targets) -> dict[str, jax.Array]:
        """Return the mean absolute error of each image."""
        return {"depth_error": jnp.abs(predicted_depths(outputs) - targets).mean(PIXELS)}

    def sums(self, outputs, targets, is_known) -> DepthSums:
        """Sum losses and errors; see `task.Task`."""
        depths = predicted_depths(outputs)
        errors, known = jnp.abs(depths - targets), jnp.broadcast_to(is_known[:, None, None], targets.shape)
        has_depth = known & (targets > 0)
        is_near = (depths < NEAR * targets) & (targets < NEAR * depths)
        return DepthSums(
            losses=jnp.sum(jnp.where(is_known, self.losses(outputs, targets), 0.0)),
            count=jnp.sum(is_known, dtype=jnp.int32),
            pixels=jnp.sum(known, dtype=jnp.int32),
            square_errors=jnp.sum(jnp.where(known, errors**2, 0.0)),
            relative_errors=jnp.sum(jnp.where(has_depth, errors / jnp.where(has_depth, targets, 1.0), 0.0)),
            near=jnp.sum(has_depth & is_near, dtype=jnp.int32),
            with_depth=jnp.sum(has_depth, dtype=jnp.int32),
        )

    def kept(self, outputs, targets) -> jax.Array:
        """Return the loss and the RMSE."""
        rmse = jnp.sqrt(jnp.square(predicted_depths(outputs) - targets).mean(PIXELS))
        return jnp.stack([self.losses(outputs, targets), rmse], axis=-1)

    def predictions(self, outputs) -> jax.Array:
        """Return the depth of each pixel, as planes of uint8: [M, H, W, 2]."""
        return jnp.stack(planes.two_bytes(predicted_depths(outputs)), axis=-1)

    def scores(self, sums: DepthSums) -> DepthScores | None:
        """Return the scores of a split; see `task.Task`."""
        count = int(sums.count.sum())
        if not count:
            return None
        losses, square_errors, relative_errors = (
            math.fsum(errors.astype(float)) for errors in (sums.losses, sums.square_errors, sums.relative_errors)
        )
        with_depth = int(sums.with_depth.sum())
        return DepthScores(
            loss=losses / count,
            rmse=math.sqrt(square_errors / int(sums.pixels.sum())),
            relative_error=relative_errors / with_depth if with_depth else None,
            near=int(sums.near.sum()) / with_depth if with_depth else None,
            num_examples=count,
        )


def predicted_depths(outputs: jax.Array) -> jax.Array:
    """Return the depths [M, H, W] of outputs [M, H, W, 1], cut off at 0 and 1."""
    return jnp.clip(outputs[..., 0], 0.0, 1.0)
