"""Script of each host in tests/pod/test_build_together.py, which builds caches.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/shared_build.py FOLDER

One goes to a folder that both hosts share, where host 0 is slow, the next to a folder of each host. Each host
writes FOLDER/HOST.json.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from numbered import plan_of

from largebatch.data import cache, cache_build
from largebatch.data.cache_build import build_together
from largebatch.hosts import collectives
from largebatch.hosts.start import start_jax
from largebatch.util import UserError


def compiled_by_gathers(calls: int) -> int:
    """Return how many programs `calls` gathers of one shape compile, after a first one."""
    compiled = []

    def note(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    collectives.gather(np.arange(7))
    collectives.gather_text("")
    jax.monitoring.register_event_duration_secs_listener(note)
    for call in range(calls):
        rows = collectives.gather(np.arange(7) + call + jax.process_index())
        assert rows[:, 0].tolist() == [call, call + 1]
        assert collectives.gather_text(f"{jax.process_index()}" * call) == ["0" * call, "1" * call]
    gathered = len(compiled)
    collectives.gather(np.arange(8))
    assert len(compiled) > gathered, "the listener hears nothing"
    return gathered


def main() -> None:
    """Build, and write what was decoded."""
    start_jax()
    folder, host = Path(sys.argv[1]), jax.process_index()
    cache.MIN_FILE_BYTES = cache_build.BLOCK_BYTES = 4 * 8 * 8 * 3
    found = {"shared": set(), "own": set(), "one needs it": set()}

    def slowly(number: int) -> None:
        time.sleep(0.02 * (host == 0))
        found["shared"].add(number)

    def damaged(number: int) -> None:
        if number == 77:
            raise UserError("77: damaged image")

    for name, note in (("shared", slowly), ("own", found["own"].add)):
        plan = plan_of(folder / (f"own-{host}" if name == "own" else name) / "x-0", 200, 8, note)
        build_together(plan)
        cache.open_cache(plan.folder).verify()
    # A cache that host 0 has already, and host 1 has not.
    plan = plan_of(folder / f"own-{host}" / "y-0", 200, 8, found["one needs it"].add) if host == 1 else None
    build_together(plan)
    found = {name: sorted(decoded) for name, decoded in found.items()}
    try:
        build_together(plan_of(folder / "shared" / "z-0", 200, 8, damaged))
    except UserError as error:
        found["error"] = str(error)
    texts = collectives.gather_text(f"host {host} é\0" + "x" * (8 << 20) * host)
    found["texts"] = [[text[:9], len(text)] for text in texts]
    found["compiled by 20 gathers"] = compiled_by_gathers(20)
    (folder / f"{host}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
