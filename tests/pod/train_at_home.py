"""A command of the root, on hosts with a home of their own, as a script of tests/pod/test_build_together.py.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/train_at_home.py FOLDER SCRIPT [FLAGS]

"{host}" in FOLDER becomes the number of the host. Each writes FOLDER/HOST.json: how many images it decoded.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from largebatch.data import cache_build


def main() -> None:
    """Run the script, and count what it decodes."""
    host = os.environ["LARGEBATCH_HOST_INDEX"]
    home = Path(sys.argv[1].format(host=host))
    home.mkdir(exist_ok=True)
    os.environ["HOME"] = str(home)
    counts, decode_block = [], cache_build.decode_block

    def counted(plan, rows):
        counts.append(len(rows))
        return decode_block(plan, rows)

    cache_build.decode_block = counted
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        (home / f"{host}.json").write_text(json.dumps(sum(counts)))


if __name__ == "__main__":
    main()
