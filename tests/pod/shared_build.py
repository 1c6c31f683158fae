"""What each host of a pod does in tests/pod/test_build_together.py, as a script: it builds two caches.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/shared_build.py FOLDER

One goes to a folder that both hosts share, the other to a folder of each host, whole and then as the host's part.
Each host writes FOLDER/HOST.json.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from etils import epath

from largebatch.cache import build
from largebatch.cache import plan as planning
from largebatch.cache.cache import open_cache
from largebatch.hosts.start import start_jax
from largebatch.sources.source import Source
from largebatch.sources.split import split_indices
from largebatch.util import UserError

IMAGES = 200


class Numbers:
    """A source that counts what is decoded, of which one image may be damaged."""

    def __init__(self, damaged: int | None = None):
        self.decoded, self.damaged = set(), damaged

    @contextlib.contextmanager
    def open(self):
        """See `Source`."""

        def read(indices, out=None):
            if self.damaged in indices:
                raise UserError(f"{self.damaged}: damaged image")
            self.decoded.update(indices)
            return [np.full((8, 8, 3), index, np.uint8) for index in indices]

        yield read

    def plan(self, folder: Path) -> planning.CachePlan:
        """The plan of a cache in `folder`."""
        ids = [f"{number:06d}" for number in range(IMAGES)]
        labels = np.arange(IMAGES, dtype=np.int32) % 2
        source = Source("numbers", "numbers 1", ids, labels, ["a", "b"], self.open)
        return planning.CachePlan(epath.Path(folder), source, split_indices(ids, 0))


def build_missing(plan: planning.CachePlan, missing: bool = True) -> None:
    """Builds a cache together with the hosts that share its folder."""
    build.build_together(plan, build.hosts_sharing(plan.folder.parent), missing)


def main() -> None:
    start_jax()
    folder, host = Path(sys.argv[1]), jax.process_index()
    planning.MIN_FILE_BYTES = build.BLOCK_BYTES = 4 * 8 * 8 * 3
    found = {}
    for name, place in (("shared", folder / "shared"), ("own", folder / f"own-{host}")):
        numbers = Numbers()
        plan = numbers.plan(place / "x-0")
        build_missing(plan)
        open_cache(plan.folder).verify()
        found[name] = sorted(map(int, numbers.decoded))
    # Parts, of every second training image; then host 1 alone builds again.
    found["part"] = []
    whole, planning.FIRST_ROWS = plan, 10
    plan = whole.part(np.arange(host, len(whole.splits["train"]), 2))
    for missing in (True, host == 1):
        if missing and plan.folder.exists():
            shutil.rmtree(plan.folder)
        numbers = Numbers()
        build_missing(dataclasses.replace(plan, source=numbers.plan(folder).source), missing)
        found["part"].append(sorted(map(int, numbers.decoded)))
        cache, of_whole = open_cache(plan.folder), open_cache(whole.folder)
        cache.verify()
        assert cache.identity() == of_whole.identity()
        assert cache.is_part
        assert not of_whole.is_part
        rows = cache.rows_here("train")[::-1]
        np.testing.assert_array_equal(cache.read_rows("train", rows), of_whole.read_rows("train", rows))
        with contextlib.suppress(IndexError):
            cache.read_rows("train", np.array([0, 11 - host]))
            raise AssertionError("a row of the other host was read")
    found["folder of part"] = plan.folder.name
    # A cache that host 0 has already, and host 1 has not.
    numbers = Numbers()
    plan = numbers.plan(folder / f"own-{host}" / "y-0")
    build_missing(plan, missing=host == 1)
    found["one needs it"] = sorted(map(int, numbers.decoded))
    numbers = Numbers(damaged=77)
    try:
        build_missing(numbers.plan(folder / "shared" / "z-0"))
    except UserError as error:
        found["error"] = str(error)
    (folder / f"{host}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
