"""python options_of_hosts.py FILE: a pmapped function with options of the compiler and without, on several hosts.

Started on several hosts. Host 0 writes FILE: two updates by each way, "plain/NAME" and "with_options/NAME".
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    """Writes the results."""
    import jax
    import numpy as np
    from jax import lax

    from largebatch.hosts import collectives, replicas
    from largebatch.hosts.start import start_jax

    start_jax()

    def add_sum(state, data, count):
        total = lax.psum(data["x"].sum(), replicas.AXIS) * count
        place = lax.axis_index(replicas.AXIS).astype(np.float32)
        return jax.tree.map(lambda leaf: leaf + total + place, state), {"total": total}

    numbers = np.array(replicas.local_indices(), np.float32)
    results = {}
    for name, options in (("plain", {}), ("with_options", {"xla_cpu_enable_fast_math": "True"})):
        replicas.options_for = lambda platform, options=options: options
        loop = replicas.pmap(add_sum, in_axes=(0, 0, None), out_axes=(0, None), donate_argnums=(0,))
        state = replicas.replicate({"w": np.arange(3, dtype=np.float32)})
        for count in (1, 2):
            given = state
            state, metrics = loop(given, {"x": numbers[:, None]}, np.int32(count))
            assert given["w"].is_deleted()
        assert bool(loop._programs) == bool(options)
        results[f"{name}/w"] = replicas.all_replicas(state)["w"]
        results[f"{name}/total"] = np.asarray(metrics["total"])
        results[f"{name}/shape"] = np.array(state["w"].shape)
    if collectives.is_primary():
        np.savez(sys.argv[1], **results)


if __name__ == "__main__":
    main()
