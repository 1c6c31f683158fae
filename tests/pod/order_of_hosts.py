"""python order_of_hosts.py FILE ORIGINALS SHARDS VIEWS SEED EPOCHS BATCH_SIZE: which examples each step has.

Started on several hosts: every device works out its own part by the compiled order. Host 0 writes FILE, int32
[steps, devices * share] with ids as in numpy_order, and the number of ids where a device has less than its share.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    """Writes the ids."""
    import jax
    import numpy as np
    from jax import lax

    from largebatch.data import batching
    from largebatch.data.batching import DataSharding, Grouping
    from largebatch.hosts import collectives, replicas
    from largebatch.hosts.start import start_jax
    from largebatch.optim.schedules import epoch_and_offset

    path, (originals, shards, views, seed, epochs, batch_size) = sys.argv[1], map(int, sys.argv[2:])
    start_jax()
    sharding = DataSharding(originals, shards, jax.device_count(), views)
    num_steps = epochs * sharding.num_examples // batch_size
    epoch, offset = epoch_and_offset(np.arange(num_steps) * batch_size, sharding.num_examples)
    share = sharding.share_bounds(batch_size)[1]

    def of_device(_):
        def of_update(epoch, offset):
            batch = batching.device_batch(sharding, lax.axis_index(replicas.AXIS), epoch, offset, batch_size)
            return batching.micro_batch(sharding, batch, 0, Grouping(share, share), seed)

        return jax.vmap(of_update)(epoch, offset)

    chosen = replicas.pmap(of_device)(np.zeros(jax.local_device_count()))
    chosen = jax.tree.map(lambda x: np.stack([shard.data[0] for shard in x.addressable_shards]), chosen)
    place_of = np.argsort(np.random.default_rng(0).permutation(originals))
    ids = np.full(chosen.examples.shape, sharding.num_examples, np.int32)  # [local devices, steps, share]
    for row, device in enumerate(replicas.local_indices()):
        places = np.append(place_of[sharding.originals_of(device, 0)], 0)
        original, view = np.divmod(chosen.examples[row], views)
        is_example = chosen.weights[row] == 1
        ids[row][is_example] = (places[original] * views + view)[is_example]
    of_devices = collectives.gather(ids).reshape(jax.device_count(), num_steps, share)
    if collectives.is_primary():
        np.save(path, of_devices.swapaxes(0, 1).reshape(num_steps, -1))


if __name__ == "__main__":
    main()
