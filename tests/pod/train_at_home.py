"""A command of the root, on hosts with a home of their own, as a script of tests/pod/test_build_together.py.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/train_at_home.py FOLDER SCRIPT [FLAGS]

"{host}" in FOLDER becomes the number of the host. Each writes FOLDER/HOST.json: which examples it decoded for its
cache, and whether it listed the source.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from largebatch.cache import build
from largebatch.cache import plan as planning
from largebatch.sources import find

planning.FIRST_ROWS = 20  # before others take it over


def main() -> None:
    host = os.environ["LARGEBATCH_HOST_INDEX"]
    home = Path(sys.argv[1].format(host=host))
    home.mkdir(exist_ok=True)
    os.environ["HOME"] = str(home)
    found = {"decoded": set(), "listed": False}
    decode_block, find_source = build.decode_block, find.find_source

    def noted(plan, layout, examples, read):
        found["decoded"].update(examples.tolist())
        return decode_block(plan, layout, examples, read)

    def listed(*args, **options):
        found["listed"] = True
        return find_source(*args, **options)

    build.decode_block, find.find_source = noted, listed
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        (home / f"{host}.json").write_text(json.dumps({**found, "decoded": sorted(found["decoded"])}))


if __name__ == "__main__":
    main()
