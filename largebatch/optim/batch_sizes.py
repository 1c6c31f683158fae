"""The batch size of every update, as a piecewise constant function of the update."""

from ml_collections import config_dict

from largebatch.errors import BadSetting
from largebatch.optim import traces


def read_trace(fields: config_dict.ConfigDict, largest: int = traces.LARGEST) -> traces.Trace:
    """The trace that a config's `batch` names, of batches of at most `largest` examples.

    Raises:
      BadSetting: it is bad.
    """
    if isinstance(fields.trace, str):
        return traces.read_once(fields.trace, fields.per_device_batch_size, fields.time_per_update, largest)
    return traces.from_list(tuple(fields.trace), largest)


def resolve_batch_size(size, num_examples: int, field: str = "batch.size") -> int:
    """The number of examples that `field` means for a training set of `num_examples` views."""
    if size == "full":
        return num_examples
    if size > num_examples:
        raise BadSetting(
            f"{field}: {size}; allowed: an integer from 1 to {num_examples} (the training images x 8), or 'full'"
        )
    return size
