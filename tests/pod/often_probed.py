"""A command of the root whose hosts are probed after every call, as a script of tests/pod/test_slow_host.py.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/pod/often_probed.py SCRIPT [FLAGS]

In a share of the time that users would not spend, so that a run of seconds is enough.
"""

import runpy
import sys

from largebatch.hosts import watch

watch.PROBE_SHARE = 0.2

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
