import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from largebatch.data import validation
from largebatch.data.validation import DealtSplit
from largebatch.hosts import replicas
from largebatch.tasks.task import Classification
from largebatch.training.evaluation import make_predict, predict_split

CLASSES = 7
TASK = Classification(CLASSES)


def logits_of_bytes(params, images):
    """Logits that are the image's bytes, scaled by the parameters: whole numbers, with many ties."""
    return images[:, 0, 0].astype(jnp.float32) * params["scale"]


PREDICT = {size: make_predict(logits_of_bytes, TASK, (1, 1, CLASSES), size) for size in (3, 64)}


def deal(images, labels, num_devices: int, monkeypatch) -> DealtSplit:
    """A split of images [N, bytes] that does not stay on the first `num_devices` devices."""
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)

    def read(examples, out):
        out[:] = images[examples]

    return DealtSplit(labels, read, images.shape[1], images.dtype, num_devices, list(range(num_devices)))


def make_split(num_examples: int, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 6, (num_examples, CLASSES), np.uint8)
    labels = rng.integers(0, CLASSES, num_examples).astype(np.int32)
    return images, labels


def predict(split, micro_batch_size=3):
    params = replicas.replicate({"scale": np.float32(0.5)})
    return predict_split(PREDICT[micro_batch_size], params, split, micro_batch_size, TASK)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("num_examples", [1, 19, 50])
@pytest.mark.parametrize("micro_batch_size", [3, 64])
def test_scores_are_numpys_over_all_examples_on_uneven_shards(
    num_devices, num_examples, micro_batch_size, monkeypatch
):
    images, labels = make_split(num_examples)
    labels[num_examples // 3 : num_examples // 2] = validation.UNKNOWN
    split = deal(images, labels, num_devices, monkeypatch).placed()
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
    split = deal(images, np.full(5, validation.UNKNOWN, np.int32), 2, monkeypatch).placed()
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


@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_split_read_in_blocks_gives_bitwise_what_one_that_stays_gives(num_devices, monkeypatch):
    images, labels = make_split(101)
    streamed = deal(images, labels, num_devices, monkeypatch)
    monkeypatch.setattr(validation, "BLOCK_BYTES", 6 * CLASSES)  # two micro-batches
    blocks = list(streamed.blocks(3))
    assert len(blocks) == -(-streamed.rows // 6) > 1
    assert {block.images.shape for block in blocks} == {(num_devices, 6, CLASSES)}
    one, other = predict(streamed), predict(streamed.placed())
    assert one.scores == other.scores
    np.testing.assert_array_equal(one[:], other[:])
    for first, last in ((0, 1), (7, 30), (41, 57), (90, 101)):
        expected = 0.5 * images[first:last]
        np.testing.assert_array_equal(one[first:last], expected)
        np.testing.assert_array_equal(other[first:last], expected)


def test_large_splits_are_read_again_and_small_ones_stay(monkeypatch):
    monkeypatch.setattr(validation.memory, "available_bytes", lambda: 8000)
    images, labels = np.zeros((100, 1, 1, 80), np.uint8), np.zeros(100, np.int32)
    assert validation.split_of_images(images[:96], labels[:96]).resident is not None  # 960 bytes of 1,000 allowed
    assert validation.split_of_images(images, labels).resident is None  # 13 * 80 = 1,040
    monkeypatch.setattr(validation, "BLOCK_BYTES", 160)
    assert validation.bytes_on_device(96, 8, 80) == 960
    assert validation.bytes_on_device(100, 8, 80) == 320
    monkeypatch.setattr(validation.memory, "available_bytes", lambda: None)
    assert validation.stays_on_devices(10**15)


def test_an_image_that_cannot_be_read_again_is_one_line(monkeypatch):
    images, labels = make_split(10)
    split = deal(images, labels, 2, monkeypatch)

    def damaged(examples, out):
        raise validation.DamagedCache("val_images-00000.npy ends within its row 7")

    object.__setattr__(split, "read", damaged)
    with pytest.raises(
        validation.UserError, match=r"^damaged cache: val_images-00000.npy ends .*; start again to build"
    ):
        predict(split)
    with pytest.raises(validation.DamagedCache):
        split.check()
