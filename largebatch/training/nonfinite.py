"""Where an update stops being finite."""

from flax import traverse_util

from largebatch.nn.normalisation import STATISTICS
from largebatch.training.loss import make_normalise


def make_layer_outputs(network, image_shape, mean, std):
    """(params, model state, batch) -> {"000 Conv_0": output, ...} of every layer, numbered from input to output."""
    normalise = make_normalise(network, image_shape, mean, std)

    def layer_outputs(params, model_state, batch):
        _, kept = network.apply(
            {"params": params, **model_state},
            normalise(batch.images),
            batch.weights,
            capture_intermediates=True,
            mutable=["intermediates", STATISTICS],
        )
        flat = traverse_util.flatten_dict(kept["intermediates"])
        names = ["/".join(path[:-1]) or "logits" for path in flat]
        return {
            f"{i:03d} {name}": outputs[0]
            for i, (name, outputs) in enumerate(zip(names, flat.values(), strict=True))
        }

    return layer_outputs
