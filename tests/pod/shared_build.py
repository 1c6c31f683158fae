"""What each host of a pod does in tests/pod/test_build_together.py, as a script: it builds caches.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/shared_build.py FOLDER

One goes to a folder that both hosts share, the next to a folder of each host. Each host writes FOLDER/HOST.json.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from etils import epath

from largebatch.data import cache, cache_images
from largebatch.data.cache_build import build_together
from largebatch.data.cache_images import CachePlan
from largebatch.data.dataset import dataset_of_files
from largebatch.hosts.start import start_jax
from largebatch.util import UserError

IMAGES = 200


class Numbers:
    """Images that are counted when they are decoded, of which one may be damaged."""

    def __init__(self, damaged: int | None = None):
        self.decoded, self.damaged = set(), damaged

    def decode(self, examples, out) -> list[np.ndarray]:
        """See `dataset.Decode`."""
        if self.damaged in examples:
            raise UserError(f"{self.damaged}: damaged image")
        self.decoded.update(examples)
        return [np.full((8, 8, 3), example, np.uint8) for example in examples]

    def plan(self, folder: Path) -> CachePlan:
        """Return the plan of a cache in `folder`."""
        ids, parts = [f"{number:06d}" for number in range(IMAGES)], np.split(np.arange(IMAGES), [160, 180])
        dataset = dataset_of_files("numbers", ids, np.arange(IMAGES) % 2, ["a", "b"], self.decode)
        return CachePlan(epath.Path(folder), dataset, dict(zip(("train", "val", "test"), parts, strict=True)))


def main() -> None:
    """Build, and write what was decoded."""
    start_jax()
    folder, host = Path(sys.argv[1]), jax.process_index()
    cache.MIN_FILE_BYTES = cache_images.BLOCK_BYTES = 4 * 8 * 8 * 3
    found = {}
    for name, place in (("shared", folder / "shared"), ("own", folder / f"own-{host}")):
        numbers = Numbers()
        plan = numbers.plan(place / "x-0")
        build_together(plan)
        cache.open_cache(plan.folder).verify()
        found[name] = sorted(map(int, numbers.decoded))
    # A cache that host 0 has already, and host 1 has not.
    numbers = Numbers()
    plan = numbers.plan(folder / f"own-{host}" / "y-0") if host == 1 else None
    build_together(plan)
    found["one needs it"] = sorted(map(int, numbers.decoded))
    try:
        build_together(Numbers(damaged=77).plan(folder / "shared" / "z-0"))
    except UserError as error:
        found["error"] = str(error)
    (folder / f"{host}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
