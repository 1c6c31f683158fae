"""Sizes of sets that many know, for programs that are compiled without the images."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PublishedSize:
    """A set as the sources here give it out, with its own splits or ours."""

    counts: dict[str, int]
    image_shape: tuple[int, int, int]  # height, width, channels; of sets of many sizes the most usual
    dtype: str
    num_classes: int


_EUROSAT = {"train": 21_600, "val": 2_700, "test": 2_700}
_CIFAR10 = {"train": 45_000, "val": 5_000, "test": 10_000}
SIZES = {
    "eurosat": PublishedSize(_EUROSAT, (64, 64, 3), "uint8", 10),
    "eurosat_ms": PublishedSize(_EUROSAT, (64, 64, 13), "uint16", 10),
    "cifar10": PublishedSize(_CIFAR10, (32, 32, 3), "uint8", 10),
    # The labels of its test images are not published: our test images are cut from those to train on.
    "imagenet2012": PublishedSize(
        {"train": 1_231_167, "val": 50_000, "test": 50_000}, (375, 500, 3), "uint8", 1000
    ),
}
