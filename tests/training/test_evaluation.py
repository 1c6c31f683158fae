import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from largebatch.data.placement import rows_of_device
from largebatch.hosts import replicas
from largebatch.training.evaluation import in_split_order, make_predict, score


def identity_logits(params, images):
    """Logits that name the image: its first two bytes, scaled by the parameters."""
    return images[:, 0, 0, :2].astype(jnp.float32) * params["scale"]


@pytest.mark.parametrize("num_devices", [1, 3, 8])
@pytest.mark.parametrize("num_examples", [1, 7, 8, 19])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 64])
def test_every_example_is_predicted_once_on_uneven_shards(num_devices, num_examples, micro_batch_size):
    images = np.zeros((num_examples, 2, 2, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(num_examples) + 1
    images[:, 0, 0, 1] = np.random.default_rng(0).integers(0, 40, num_examples)
    shards = []
    for index, device in enumerate(jax.local_devices()[:num_devices]):
        rows = rows_of_device(num_examples, num_devices, index)
        shards.append(jax.device_put(images[rows][None], device))
    params = replicas.replicate({"scale": np.float32(2)}, jax.local_devices()[:num_devices])
    gathered = make_predict(identity_logits, micro_batch_size)(params, replicas.stack(shards))
    logits = in_split_order(np.asarray(gathered), num_examples)
    np.testing.assert_array_equal(logits, 2.0 * images[:, 0, 0, :2])


def test_score_is_cross_entropy_and_accuracy():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((50, 4)).astype(np.float32) * 5, rng.integers(0, 4, 50)
    scores = score(logits, labels)
    expected = -scipy.special.log_softmax(logits.astype(np.float64), axis=1)[np.arange(50), labels].mean()
    assert scores.loss == pytest.approx(expected)
    assert scores.accuracy == np.mean([row.argmax() == label for row, label in zip(logits, labels, strict=True)])
    assert scores.num_examples == 50
    assert score(logits + 1000, labels).loss == pytest.approx(expected, rel=1e-4)
