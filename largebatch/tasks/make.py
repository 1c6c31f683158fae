"""The task of a config."""

from largebatch.config.fields import TaskConfig
from largebatch.tasks.classification import Classification
from largebatch.tasks.depth import Depth
from largebatch.tasks.mask_depth import MaskDepth
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.segmentation import Segmentation
from largebatch.tasks.task import Task


def make_task(config: TaskConfig, num_classes: int, targets: PixelTargets, label_smoothing: float = 0.0) -> Task:
    """Make the task of a config for a data set.

    Args:
      num_classes: number of classes of images.
      targets: dense targets of the data set.
    """
    mask, depth = Segmentation(targets.classes, config.mask_loss), Depth(config.depth_loss)
    tasks = {
        "classification": Classification(num_classes, label_smoothing),
        "segmentation": mask,
        "depth": depth,
        "mask_depth": MaskDepth(mask, depth, config.depth_weight),
    }
    return tasks[config.name]
