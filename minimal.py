"""The whole idea in one file: all views of all images stay on the devices; one all-reduce per step.

    python minimal.py                                                   synthetic images, half a minute on a CPU
    python minimal.py --path EuroSAT.zip --batch_size 512 --inner_steps 50 --outer_steps 20     1,000 steps

Without any other file of the project it does on one host what `train.py` does by default: the same images, split,
network, initial parameters and gradients. Below the whole set batches differ: each device orders its own examples.
"""

import argparse
import os
import time
import zipfile
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image


def load_zip(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Load a zip of .../Class/image.jpg, all of one size, as images uint8 [n, H, W, 3] and labels int32 [n]."""
    if not zipfile.is_zipfile(path):
        raise SystemExit(f"minimal.py: --path {path}: there is no such zip file")
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        images = [np.asarray(Image.open(archive.open(name)).convert("RGB")) for name in names]
    _, labels = np.unique([name.split("/")[-2] for name in names], return_inverse=True)
    return np.stack(images), labels.astype(np.int32)


def make_synthetic(count: int = 480, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Draw textures of five kinds, the classes, in random colours; returns what `load_zip` does."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size].astype(np.float32)
    images, labels = np.empty((count, size, size, 3), np.uint8), np.arange(count, dtype=np.int32) % 5
    for index, label in enumerate(labels):
        period = rng.uniform(6, 10)
        columns, rows = (np.sin(2 * np.pi * axis / period + rng.uniform(0, 2 * np.pi)) for axis in (x, y))
        radius = np.hypot(x - rng.uniform(0.3, 0.7) * size, y - rng.uniform(0.3, 0.7) * size)
        if label == 0:  # checks
            wave = columns * rows
        elif label == 1:  # a disk
            wave = rng.uniform(0.15, 0.3) * size - radius
        elif label == 2:  # noise
            wave = rng.standard_normal((size, size))
        elif label == 3:  # rings
            wave = np.sin(2 * np.pi * radius / period + rng.uniform(0, 2 * np.pi))
        else:  # stripes
            wave = columns if rng.random() < 0.5 else rows
        texture = np.where(wave > 0, 1.0, -1.0)
        mean, contrast = rng.uniform(90, 165, 3), rng.uniform(15, 50, 3) * rng.choice((-1, 1))
        pixels = mean + contrast * (texture - texture.mean())[..., None] + rng.normal(0, 12, (size, size, 3))
        images[index] = np.clip(pixels, 0, 255)
    return images, labels


def split_indices(count: int) -> list[np.ndarray]:
    """Split `count` examples with a fixed seed into 80% training, 10% validation and 10% test."""
    tenth = count // 10
    return np.split(np.random.default_rng(0).permutation(count), [count - 2 * tenth, count - tenth])


def expand(images: np.ndarray) -> np.ndarray:
    """Make the 8 views of each image, four rotations with and without a flip: [n, H, H, C] -> [8n, H, H, C]."""
    mirrored = [images, images[:, :, ::-1], images[:, ::-1], images[:, ::-1, ::-1]]
    views = mirrored + [view.swapaxes(1, 2) for view in mirrored]
    return np.stack(views, axis=1).reshape(-1, *images.shape[1:])


def place(tree, devices: list):
    """Put element d of the leading axis of every array on device d."""
    return jax.device_put(tree, NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices")))


def shard(images: np.ndarray, labels: np.ndarray, devices: list) -> dict[str, jax.Array]:
    """Deal examples to devices round-robin, padded to equal shares by repeats of the first with weight 0."""
    count = len(images)
    slots = np.arange(count + -count % len(devices)).reshape(-1, len(devices)).T  # [devices, rows]
    examples, weights = slots % count, np.float32(slots < count)
    flat_images = images.reshape(count, -1)[examples]  # flat, as a TPU would pad a last dimension of 3 to 128
    return place({"images": flat_images, "labels": labels[examples], "weights": weights}, devices)


def convolve(x, kernel, strides, padding, **options):
    """Convolve 3x3 with stride 2 by `lax.conv_general_dilated`; on a CPU by one matrix product for all patches.

    XLA's convolutions are many times slower in a loop on a CPU (github.com/jax-ml/jax/issues/12868).
    """
    if jax.default_backend() != "cpu":
        return lax.conv_general_dilated(x, kernel, strides, padding, **options)
    _, height, width, _ = x.shape
    x = jnp.pad(x, [(0, 0), *padding, (0, 0)])
    patches = [x[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


class ConvNet(nn.Module):
    """Four convolutions, global mean and two dense layers: uint8 [n, H * W * C] -> float32 logits [n, classes]."""

    num_classes: int
    image_shape: tuple[int, int, int]
    mean: np.ndarray  # of the training images, by channel
    std: np.ndarray
    dtype: str = "float32"  # of the arithmetic; parameters are always float32

    @nn.compact
    def __call__(self, images):
        x = images.reshape(-1, *self.image_shape).astype(jnp.float32)
        x = ((x - np.float32(self.mean)) * np.float32(1 / self.std)).astype(self.dtype)
        for features in (32, 64, 128, 256):
            conv = nn.Conv(features, (3, 3), 2, padding=1, dtype=self.dtype, conv_general_dilated=convolve)
            x = nn.gelu(conv(x))
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        x = nn.gelu(nn.Dense(128, dtype=self.dtype)(x))
        return nn.Dense(self.num_classes, dtype=jnp.float32, precision="highest", name="head")(x)


def lamb(learning_rate: float) -> optax.GradientTransformation:
    """Make `optax.lamb` with no trust ratio for biases: they start at zero, so theirs would stay near zero."""
    trust = optax.masked(optax.scale_by_trust_ratio(), lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    return optax.chain(optax.scale_by_adam(eps=1e-6), trust, optax.scale_by_learning_rate(learning_rate))


OPTIMIZERS = {"lamb": lamb, "adam": optax.adam, "sgd": partial(optax.sgd, momentum=0.9)}


def sum_micro_batches(function, zeros, data, rows, size: int):
    """Accumulate `function(images, labels, weights)`, a pytree like `zeros`, over rows of data by micro-batches."""

    def add(sums, micro_batch):
        rows, weights = micro_batch
        return jax.tree.map(jnp.add, sums, function(data["images"][rows], data["labels"][rows], weights)), None

    size = min(size, len(rows))
    padding = (0, -len(rows) % size)  # of the last micro-batch: row 0 with weight 0
    micro_batches = [jnp.pad(array, padding).reshape(-1, size) for array in (rows, data["weights"][rows])]
    return lax.scan(add, zeros, micro_batches)[0]


def make_inner_loop(network, optimizer, devices, batch_size: int, micro_batch_size: int, inner_steps: int):
    """Make the pmapped function that does `inner_steps` steps in one call; params and opt_state are donated."""

    def loss_fn(params, images, labels, weights):
        losses = optax.softmax_cross_entropy_with_integer_labels(network.apply({"params": params}, images), labels)
        return jnp.sum(weights * losses), jnp.sum(weights)

    def inner_loop(params, opt_state, data, first_step, key):
        # A step takes an equal share of every device's rows, which it orders anew every epoch; a rest is dropped.
        num_rows, share = len(data["labels"]), -(-batch_size // len(devices))
        steps_per_epoch = num_rows // share
        key = jax.random.fold_in(key, lax.axis_index("devices"))

        def order_of(epoch):
            return jax.random.permutation(jax.random.fold_in(key, epoch), num_rows)

        def train_step(carry, step):
            params, opt_state, order = carry
            epoch, number = jnp.divmod(step, steps_per_epoch)
            order = lax.cond(number == 0, lambda: order_of(epoch), lambda: order)
            rows = lax.dynamic_slice_in_dim(order, number * share, share)
            sums_of = partial(jax.value_and_grad(loss_fn, has_aux=True), params)
            zeros = (jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, params)  # (loss, count), gradients
            sums = sum_micro_batches(sums_of, zeros, data, rows, micro_batch_size)
            # The only communication of a step. As a vector it is one all-reduce, whatever the compiler combines.
            vector, unravel = ravel_pytree(sums)
            (loss, count), grads = unravel(lax.psum(vector, "devices"))
            grads = jax.tree.map(lambda g: g / count, grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state, order), (loss / count, count)

        carry = params, opt_state, order_of(first_step // steps_per_epoch)
        (params, opt_state, _), metrics = lax.scan(train_step, carry, first_step + jnp.arange(inner_steps))
        return params, opt_state, metrics

    return jax.pmap(inner_loop, "devices", in_axes=(0, 0, 0, None, None), donate_argnums=(0, 1), devices=devices)


def make_count_correct(network, devices, micro_batch_size: int):
    """Make the pmapped function that counts, over all devices, the examples that are classified correctly."""

    def count_correct(params, data):
        def correct(images, labels, weights):
            return jnp.sum(weights * (network.apply({"params": params}, images).argmax(axis=-1) == labels))

        rows = jnp.arange(len(data["labels"]))
        return lax.psum(sum_micro_batches(correct, jnp.zeros(()), data, rows, micro_batch_size), "devices")

    return jax.pmap(count_correct, "devices", out_axes=None, devices=devices)


def main() -> None:
    """Train and validate as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"minimal.py: {message}\n")  # without the usage
    parser.add_argument("--path", help="zip of class folders of JPEGs; synthetic images where it is not given")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lamb")
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--batch_size", default="full", help="views per step, rounded up to equal shares; or full")
    parser.add_argument("--micro_batch_size", type=int, default=64, help="of a device; thousands suit a GPU")
    parser.add_argument("--inner_steps", type=int, default=10, help="steps per call")
    parser.add_argument("--outer_steps", type=int, default=5, help="calls, each with a validation")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order")
    args = parser.parse_args()
    if min(args.micro_batch_size, args.inner_steps, args.outer_steps) < 1:
        parser.error("--micro_batch_size, --inner_steps and --outer_steps: give 1 or more")
    if jax.config.jax_num_cpu_devices == -1:
        jax.config.update("jax_num_cpu_devices", os.cpu_count())  # a device per core
    devices = jax.local_devices()
    images, labels = load_zip(args.path) if args.path else make_synthetic()
    train, val, _ = split_indices(len(images))
    num_examples = 8 * len(train)
    if args.batch_size != "full" and not (args.batch_size.isdecimal() and 0 < int(args.batch_size) <= num_examples):
        parser.error(f"--batch_size {args.batch_size}: give 1 to {num_examples}, or full")
    batch_size = num_examples if args.batch_size == "full" else int(args.batch_size)
    train_shards = shard(expand(images[train]), np.repeat(labels[train], 8), devices)
    val_shards = shard(images[val], labels[val], devices)
    mean, std = images[train].mean((0, 1, 2), np.float64), images[train].std((0, 1, 2), np.float64)
    network = ConvNet(labels.max() + 1, images.shape[1:], mean, np.maximum(std, 1), args.dtype)
    optimizer, key = OPTIMIZERS[args.optimizer](args.learning_rate), jax.random.key(args.seed)
    params = jax.jit(network.init)(key, images[:1])["params"]
    state = jax.tree.map(lambda x: np.stack([x] * len(devices)), (params, optimizer.init(params)))
    params, opt_state = place(state, devices)

    start = time.perf_counter()
    inner_loop = make_inner_loop(network, optimizer, devices, batch_size, args.micro_batch_size, args.inner_steps)
    inner_loop = inner_loop.lower(params, opt_state, train_shards, np.int32(0), key).compile()
    count_correct = make_count_correct(network, devices, args.micro_batch_size)
    print(f"{num_examples} examples on {len(devices)} devices; compiled in {time.perf_counter() - start:.1f} s")
    for step in range(0, args.inner_steps * args.outer_steps, args.inner_steps):
        start = time.perf_counter()
        params, opt_state, metrics = inner_loop(params, opt_state, train_shards, np.int32(step), key)
        losses, counts = (values[0] for values in jax.device_get(metrics))  # waits; equal on all devices
        seconds = time.perf_counter() - start
        accuracy = float(count_correct(params, val_shards)) / len(val)
        speed = f"{counts.sum() / seconds:.0f} images/s  {1000 * seconds / len(losses):.1f} ms/step"
        done = f"step {step + len(losses)}  train loss {losses.mean():.4f}  val accuracy {accuracy:.4f}"
        print(done, speed, sep="  ", flush=True)
    print(f"final val accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
