"""python updates_on_devices.py FILE STARTS CACHE ZIP: 20 updates on EuroSAT, on the devices here.

FILE gets for each of OPTIMIZERS "<name>_params", the parameters before each update and after the last, [21, size],
and "<name>_grads", [20, size]: the gradient of each update when it starts from the parameters in STARTS, which is
another such file, or where that is "-" from its own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

NUM_UPDATES = 20
OPTIMIZERS = {"sgd": 0.05, "muon": 0.02, "lamb": 0.01}  # with their rates


def make_config(cache_dir: str, path: str, optimizer: str):
    """EuroSAT at 32 pixels, float32, without normalisation."""
    from configs import default

    config = default.get_config()
    config.dataset.name, config.dataset.path, config.dataset.image_size = "eurosat", path, 32
    config.augment.cache_dir, config.augment.storage = cache_dir, "on_device"
    config.model.norm, config.model.dtype = "none", "float32"
    config.optimizer.name, config.optimizer.learning_rate = optimizer, OPTIMIZERS[optimizer]
    config.batch.size = 512
    config.train.inner_steps, config.train.outer_steps = NUM_UPDATES, 1
    return config


class Training:
    """One optimizer's updates."""

    def __init__(self, config, programs):
        from build import prepare
        from largebatch.config import rules
        from largebatch.hosts import replicas
        from largebatch.hosts.clock import Clock
        from model import MODELS

        self._prepared = prepare(rules.check(config.to_dict(), MODELS), Clock(), programs)
        # In host memory: an update takes its state's memory.
        self.start = replicas.first_replica(self._prepared.state)

    def update(self, state, number: int):
        """The state after update `number`."""
        import numpy as np

        run = self._prepared
        inputs = run.plan.schedule.inputs(number, run.plan.inputs_length)
        return run.programs.inner_loop(state, run.data.train.arrays, inputs, np.int32(1))[0]

    def params(self):
        """All parameters before each update and after the last."""
        import numpy as np

        from largebatch.hosts import replicas

        state, rows = replicas.replicate(self.start), [flat(self.start.params)]
        for number in range(NUM_UPDATES):
            state = self.update(state, number)
            rows.append(flat(replicas.first_replica(state).params))
        return np.array(rows)

    def grads(self, params):
        """The gradient of each update from the given parameters; only of SGD."""
        import numpy as np
        import optax
        from jax import flatten_util

        from largebatch.hosts import replicas

        _, unravel = flatten_util.ravel_pytree(self.start.params)
        rows = []
        for number in range(NUM_UPDATES):
            # From rest, so that the momentum after it is the gradient.
            at_rest = self.start.replace(params=unravel(params[number]))
            after = replicas.first_replica(self.update(replicas.replicate(at_rest), number))
            rows.append(flat(optax.tree.get(after.opt_state, "trace")))
        return np.array(rows)


def flat(tree):
    """All entries of a tree in one row."""
    import jax
    import numpy as np
    from jax import flatten_util

    return np.asarray(flatten_util.ravel_pytree(jax.tree.map(np.asarray, tree))[0])


def main() -> None:
    """Do the updates."""
    import numpy as np

    import model
    from build import ProgramCache
    from largebatch import cli

    out, starts_path, cache_dir, path = sys.argv[1:]
    configs = {name: make_config(cache_dir, path, name) for name in OPTIMIZERS}
    cli.start(configs["sgd"], model.MODELS)
    programs = ProgramCache()
    training = {name: Training(config, programs) for name, config in configs.items()}
    found = {f"{name}_params": training[name].params() for name in OPTIMIZERS}
    starts = found if starts_path == "-" else np.load(starts_path)
    found |= {f"{name}_grads": training["sgd"].grads(starts[f"{name}_params"]) for name in OPTIMIZERS}
    np.savez(out, **found)


if __name__ == "__main__":
    main()
