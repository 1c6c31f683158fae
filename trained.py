"""A trained network, taken from a run folder at its best checkpoint or from a folder that export.py wrote."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from ml_collections import config_dict

import model
from configs import default
from largebatch import cli
from largebatch.config.validate import validate
from largebatch.errors import UserError
from largebatch.exports import contents
from largebatch.exports.folder import is_export
from largebatch.hosts import collectives
from largebatch.runs import checkpoints, provenance
from largebatch.runs.best import BestCheckpoint, arrays_of, best_checkpoint
from largebatch.tasks.planes import PixelTargets


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The best checkpoint of a run.

    Attributes:
      path: the folder.
      config: of the run, with the user's own limits and overrides.
      data: what it was trained on; see `Cache.identity`.
      step: updates before the checkpoint.
      arrays: the state by name, on host 0; {} on the others.
      exported: whether the folder is an export, which has one set of parameters.
      description: checkpoint.json or model.json.
    """

    path: Path
    config: config_dict.ConfigDict
    data: dict
    step: int
    arrays: dict[str, np.ndarray]
    exported: bool = False
    description: dict = dataclasses.field(default_factory=dict)

    @property
    def is_average(self) -> bool:
        """Whether the parameters of an export are a moving average."""
        return self.exported and self.description["ema"]

    @property
    def targets(self) -> PixelTargets:
        """What it predicts of each pixel."""
        try:
            return PixelTargets.recorded_in(self.data)
        except ValueError as error:
            raise UserError(f"{self.path}: {error}") from error

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network sees."""
        height, width, stored = self.data["image_shape"]
        return height, width, stored - self.targets.planes

    @property
    def scale(self) -> tuple[list[float], list[float]]:
        """Mean and deviation of the channels that the network sees."""
        channels = self.image_shape[-1]
        return self.data["mean"][:channels], self.data["std"][:channels]


def load_run(path: Path, overrides: dict[str, str | int] | None = None) -> TrainedRun:
    """A run or an export, read by the primary host; `overrides` take the place of fields of its config.

    Raises:
      UserError: there is none, or its checkpoints, files or config cannot be used; on every host.
    """
    exported = collectives.json_from_primary(is_export(path))
    read = contents.read if exported else best_checkpoint
    best = collectives.agreed(lambda: read(path), collectives.is_primary()) or BestCheckpoint({}, {})
    about = collectives.json_from_primary(best.description)
    provenance.refuse_other_network(about["data"], model.NETWORK_VERSION, path)
    config = default.get_config()
    try:
        with config.unlocked():
            config.update(config_dict.ConfigDict(about["config"]))
        # How the batch changed is over, and its file may be gone.
        config.batch.update({"trace": None, "per_device_batch_size": None, "hold_last": False})
        # The user's own limit: a run may come from someone else.
        config.dataset.max_image_pixels = default.get_config().dataset.max_image_pixels
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: its config cannot be read ({reason})") from error
    config.update_from_flattened_dict(overrides or {})
    validate(config, model.MODELS)
    config = cli.settle_dtype(config)  # it is in every run; but a folder may come from someone else
    return TrainedRun(path, config, about["data"], about["step"], best.arrays, exported, about)


def read_variables(run: TrainedRun, network, image_shape: tuple[int, ...], *, ema: bool) -> dict:
    """What the network is applied to, on every host.

    Raises:
      UserError: the run keeps no moving average, or its arrays are not those of the network.
    """
    if ema and run.exported:
        kept = "the moving average" if run.is_average else "no moving average"
        raise UserError(f"--ema: {run.path} is an export of {kept}; allowed: with a run folder")
    params, model_state = jax.eval_shape(lambda: model.init_variables(network, image_shape, 0))
    expected = {"params": params, "model_state": model_state}
    if ema:
        expected = {"ema": expected}
    expected = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), expected)

    def fill():
        arrays = arrays_of(expected, run.arrays)
        if ema and not arrays:
            raise UserError(f"--ema: {run.path} keeps no moving average; train with --config.train.ema_decay")
        return checkpoints.fill(expected, arrays, str(run.path))

    state = collectives.from_primary(collectives.agreed(fill, collectives.is_primary()) or expected)
    if ema:
        state = state["ema"]
    return {"params": state["params"], **state["model_state"]}
