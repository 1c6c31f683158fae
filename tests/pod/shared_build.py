"""What each host of a pod does in tests/pod/test_build_together.py, as a script: it builds caches.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/shared_build.py FOLDER

One goes to a folder that both hosts share, the next to a folder of each host. Each host writes FOLDER/HOST.json.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from largebatch.data import cache, cache_build
from largebatch.data.cache_build import CachePlan, build_together
from largebatch.data.dataset import dataset_of_files
from largebatch.hosts.start import start_jax
from largebatch.util import UserError

IMAGES = 200


def plan_of(folder: Path, decoded: set, damaged: int | None = None) -> CachePlan:
    """The plan of images that are noted when they are decoded, of which one may be damaged."""

    def decode(examples):
        for example in examples:
            if example == damaged:
                raise UserError(f"{damaged}: damaged image")
            decoded.add(int(example))
            yield np.full((8, 8, 3), example, np.uint8)

    ids, parts = [f"{number:06d}" for number in range(IMAGES)], np.split(np.arange(IMAGES), [160, 180])
    dataset = dataset_of_files("numbers", ids, np.arange(IMAGES) % 2, ["a", "b"], decode)
    return CachePlan(folder, dataset, dict(zip(("train", "val", "test"), parts, strict=True)))


def main() -> None:
    """Build, and write what was decoded."""
    start_jax()
    folder, host = Path(sys.argv[1]), jax.process_index()
    cache.MIN_FILE_BYTES = cache_build.BLOCK_BYTES = 4 * 8 * 8 * 3
    found = {"shared": set(), "own": set(), "one needs it": set()}
    for name in ("shared", "own"):
        plan = plan_of(folder / (f"own-{host}" if name == "own" else name) / "x-0", found[name])
        build_together(plan)
        cache.open_cache(plan.folder).verify()
    # A cache that host 0 has already, and host 1 has not.
    build_together(plan_of(folder / f"own-{host}" / "y-0", found["one needs it"]) if host == 1 else None)
    found = {name: sorted(decoded) for name, decoded in found.items()}
    try:
        build_together(plan_of(folder / "shared" / "z-0", set(), damaged=77))
    except UserError as error:
        found["error"] = str(error)
    (folder / f"{host}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
