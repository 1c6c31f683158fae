"""train.py with a network that counts: parameter [original, view] sinks by 1 at every visit of that example.

    python visits.py FOLDER train.py's flags...

Its loss is the sum over a batch of the examples' parameters, so the mean gradient has 1 / batch size for each of
them, and plain SGD at a rate of the batch size, a power of two, takes off exactly 1. FOLDER gets the images, if it
has none: each carries its number in one marked corner, and a mark beside it that tells the view.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NUM_IMAGES, SIZE, VIEWS = 80, 8, 8
BATCH_SIZE, NUM_TRAIN = 32, 64
CORNER, BESIDE = 255, 128  # of blue
LAST = SIZE - 1
CORNERS = [(0, 0), (0, LAST), (LAST, 0), (LAST, LAST)]


def write_images(folder: Path) -> None:
    """Images in one class folder; a second class has as many."""
    for number in range(NUM_IMAGES):
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        image[0, 0] = number, 0, CORNER
        image[0, 1] = 0, 0, BESIDE
        path = folder / f"class_{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def number_and_view(images):
    """Return the number of each of uint8 images [M, SIZE * SIZE * 3], and which of 8 views it is; int32 [M]."""
    images = images.reshape(-1, SIZE, SIZE, 3).astype(jnp.int32)
    number, view = 0, 0
    for index, (y, x) in enumerate(CORNERS):
        is_here = images[:, y, x, 2] == CORNER
        beside = images[:, y, abs(x - 1), 2] == BESIDE  # in the same row, or else in the same column
        number += is_here * images[:, y, x, 0]
        view += is_here * (2 * index + beside)
    return number, view


class Visits(nn.Module):
    """A network without an answer, and one parameter per example."""

    num_classes: int
    dtype: jnp.dtype
    conv: str

    @nn.compact
    def __call__(self, images, weights=None):
        """Logits that are all 0."""
        self.param("visits", nn.initializers.zeros, (NUM_IMAGES, VIEWS))
        return jnp.zeros((len(images), self.num_classes))


def make_loss_fn(*_):
    """The sum over a micro-batch of the parameters of its examples."""
    from largebatch.training.loss import BatchSums

    def loss_fn(params, model_state, batch):
        number, view = number_and_view(batch.images)
        loss = jnp.sum(params["visits"][number, view] * batch.weights)
        return loss, BatchSums({"accuracy": jnp.zeros(())}, {})

    return loss_fn


def main() -> None:
    """Trains."""
    folder = Path(sys.argv.pop(1))
    import build
    import model
    import train
    from largebatch import cli

    if not folder.exists():
        temporary = folder.with_name(f"{folder.name}.{np.random.default_rng().integers(1 << 60)}")
        write_images(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            pass  # another host was first
    model.MODELS["visits"] = model.Architecture(Visits, frozenset())
    build.make_loss_fn = make_loss_fn
    train.define_flags()
    cli.run_script(train.main, model.MODELS)


if __name__ == "__main__":
    main()
