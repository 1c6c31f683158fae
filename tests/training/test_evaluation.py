import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from largebatch.data import sharded_split
from largebatch.data.cache import DamagedCache
from largebatch.data.dataset import UNKNOWN, dataset_of_arrays
from largebatch.data.sharded_split import ShardedSplit
from largebatch.hosts import memory, replicas
from largebatch.tasks.task import Classification
from largebatch.training.evaluation import make_predict, predict_split
from largebatch.util import UserError

CLASSES = 7
TASK = Classification(CLASSES)


def logits_of_bytes(params, images):
    """Logits that are the image's bytes, scaled by the parameters: whole numbers, with many ties."""
    return images[:, 0, 0].astype(jnp.float32) * params["scale"]


PREDICT = {size: make_predict(logits_of_bytes, TASK, (1, 1, CLASSES), size) for size in (3, 64)}


def shard(images, labels, num_devices: int, monkeypatch) -> ShardedSplit:
    """A split of images [N, bytes] that does not stay on the first `num_devices` devices."""
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(jax, "local_device_count", lambda: num_devices)
    dataset = dataset_of_arrays(images[:, None, None], labels, [], [""] * len(labels))
    return ShardedSplit(dataset, num_devices)


def make_split(num_examples: int, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 6, (num_examples, CLASSES), np.uint8)
    labels = rng.integers(0, CLASSES, num_examples).astype(np.int32)
    return images, labels


def predict(split, micro_batch_size=3):
    params = replicas.replicate({"scale": np.float32(0.5)})
    return predict_split(PREDICT[micro_batch_size], params, split, micro_batch_size, TASK)


@pytest.mark.parametrize(
    ("num_devices", "num_examples", "micro_batch_size"), [(1, 19, 3), (2, 50, 64), (8, 1, 3), (8, 50, 3)]
)
def test_scores_are_numpys_over_all_examples_on_uneven_shards(
    num_devices, num_examples, micro_batch_size, monkeypatch
):
    images, labels = make_split(num_examples)
    labels[num_examples // 3 : num_examples // 2] = UNKNOWN
    split = shard(images, labels, num_devices, monkeypatch).placed()
    result = predict(split, micro_batch_size)
    logits = 0.5 * images.astype(np.float64)
    np.testing.assert_array_equal(result[:], logits)
    known = labels >= 0
    logits, labels = logits[known], labels[known]
    losses = -scipy.special.log_softmax(logits, axis=1)[np.arange(len(labels)), labels]
    # Largest first, of equal ones the lower class.
    first_five = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    assert result.scores.values == {
        "loss": pytest.approx(losses.mean(), rel=1e-5),
        "accuracy": np.mean(logits.argmax(1) == labels),
        "accuracy_top5": np.mean((first_five == labels[:, None]).any(1)),
        "examples": len(labels),
    }


def test_examples_without_labels_have_no_scores(monkeypatch):
    images, _ = make_split(5)
    split = shard(images, np.full(5, UNKNOWN, np.int32), 2, monkeypatch).placed()
    assert predict(split).scores is None


def test_few_classes_have_no_five_first():
    numbers = {"losses": 1, "hits": 1, "hits_top5": 2, "examples": 2}
    sums = {name: np.array([number], np.int32) for name, number in numbers.items()}
    assert Classification(num_classes=6).scores(sums).values["accuracy_top5"] == 1.0
    assert Classification(num_classes=5).scores(sums).values["accuracy_top5"] is None


def test_a_logit_that_is_not_a_number_is_no_hit():
    logits = np.zeros((2, 6), np.float32)
    logits[0, 0] = logits[1, 5] = np.nan  # of the own class, and of another
    sums, _ = TASK.evaluate(jnp.asarray(logits), jnp.array([0, 0]), jnp.array([True, True]))
    assert [int(sums[name]) for name in ("hits", "hits_top5", "examples")] == [0, 1, 2]
    assert np.isnan(sums["losses"])


def test_a_split_read_in_blocks_gives_bitwise_what_one_that_stays_gives(monkeypatch):
    images, labels = make_split(101)
    streamed = shard(images, labels, 8, monkeypatch)
    monkeypatch.setattr(sharded_split, "BLOCK_BYTES", 6 * CLASSES)  # two micro-batches
    blocks = list(streamed.blocks(3))
    assert len(blocks) == -(-streamed.rows // 6) > 1
    assert {block.images.shape for block in blocks} == {(8, 6, CLASSES)}
    one, other = predict(streamed), predict(streamed.placed())
    assert one.scores == other.scores
    for first, last in ((0, 101), (0, 1), (7, 30), (41, 57), (90, 101)):
        expected = 0.5 * images[first:last]
        np.testing.assert_array_equal(one[first:last], expected)
        np.testing.assert_array_equal(other[first:last], expected)


def test_large_splits_are_read_again_and_small_ones_stay(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 8000)
    images, labels = np.zeros((100, 1, 1, 80), np.uint8), np.zeros(100, np.int32)
    small, large = (dataset_of_arrays(images[:n], labels[:n], [], [""] * n) for n in (96, 100))
    assert sharded_split.shard_split(small, 8).resident is not None  # 960 bytes of 1,000 allowed
    assert sharded_split.shard_split(large, 8).resident is None  # 13 * 80 = 1,040
    monkeypatch.setattr(sharded_split, "BLOCK_BYTES", 160)
    assert sharded_split.bytes_on_device(96, 8, 80) == 960
    assert sharded_split.bytes_on_device(100, 8, 80) == 320
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert sharded_split.stays_on_devices(10**15)


def test_an_image_that_cannot_be_read_again_is_one_line(monkeypatch):
    images, labels = make_split(10)
    split = shard(images, labels, 2, monkeypatch)

    def damaged(*_):
        raise DamagedCache("images-00000.raw ends within its row 7")

    dataset = dataclasses.replace(split.dataset, fill=damaged)
    with pytest.raises(DamagedCache):
        dataclasses.replace(split, dataset=dataset).check()
    with pytest.raises(UserError, match=r"^damaged cache: images-00000.raw ends .*; start again to build"):
        predict(dataclasses.replace(split, dataset=sharded_split.naming_damage(dataset)))
