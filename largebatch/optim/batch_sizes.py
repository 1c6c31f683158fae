"""The batch size of every update: one size, a trace, or sizes that only training finds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from largebatch.errors import BadSetting
from largebatch.optim import traces
from largebatch.optim.piecewise import PiecewiseConstant

if TYPE_CHECKING:  # bench.py measures cards where ml_collections is missing
    from ml_collections import config_dict


def read_trace(fields: "config_dict.ConfigDict", largest: int = traces.LARGEST) -> traces.Trace:
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
            f"{field}: {size}; allowed: an integer from 1 to {num_examples} (all views of the training images), or "
            "'full'"
        )
    return size


def follows_devices(fields: Mapping) -> bool:
    """Whether a config's `batch` gives every device so many examples, however many devices there are."""
    return fields["trace"] is None and fields["per_device_batch_size"] is not None


def are_found_in_training(fields: Mapping) -> bool:
    """Whether batch sizes follow from the noise or from the devices that are there, and not from the config."""
    return fields["auto"] or follows_devices(fields)


def batch_sizes_of_devices(
    fields: "config_dict.ConfigDict", num_devices: int, num_examples: int
) -> PiecewiseConstant | None:
    """The batch sizes of a run on so many devices, where they follow the devices; else None.

    Raises:
      BadSetting: a batch is larger than the training set.
    """
    if not follows_devices(fields):
        return None
    batch_size = fields.per_device_batch_size * num_devices
    if batch_size > num_examples:
        raise BadSetting(
            f"batch.per_device_batch_size: {fields.per_device_batch_size} on {num_devices} devices; allowed: "
            f"{num_examples} examples in all (all views of the training images)"
        )
    return PiecewiseConstant.constant(batch_size)


def planned_batch_sizes(fields: "config_dict.ConfigDict", num_examples: int) -> PiecewiseConstant:
    """The batch sizes that a config's `batch` asks for, before the schedule or training changes them.

    Args:
      num_examples: of an epoch, which no batch exceeds.
    Raises:
      BadSetting: a size is too large, or the trace is bad.
    """
    if fields.trace is not None:
        return read_trace(fields, num_examples).batch_sizes
    return PiecewiseConstant.constant(resolve_batch_size(fields.size, num_examples))
