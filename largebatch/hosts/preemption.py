"""SIGTERM and SIGINT: the running call ends, all hosts agree, the run saves and leaves.

Schedulers send SIGTERM some seconds before they take a machine back. Python would act on a signal only
after the running call, and a KeyboardInterrupt would be raised at any line; so a thread reads signals as
they come, and training asks for them where it can stop.
"""

import os
import signal
import sys
import threading

import numpy as np

from largebatch.hosts import collectives

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_first_signal = 0


class Stopped(Exception):
    """All hosts agreed to stop since one of them got a signal."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number, self.exit_code = number, 128 + number


def answer_signals() -> None:
    """From here on the first SIGTERM or SIGINT is noted, and a second ends the process at once."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write)  # which C code writes to, whatever the interpreter is waiting for
    threading.Thread(target=_watch, args=(read,), daemon=True).start()


def _watch(read: int) -> None:
    global _first_signal
    while True:
        number = os.read(read, 1)[0]
        if number not in SIGNALS:
            continue
        if _first_signal:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # the cursor, which the progress bar hides
            os._exit(128 + number)
        _first_signal = number
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving after the running call; a second signal leaves at once\n".encode())


def first_signal() -> int:
    """The first signal that this host got, or 0."""
    return _first_signal


def agree(vote: int = 0) -> tuple[int, int]:
    """Called by all hosts together: the first signal that any of them got (0 if none), and host 0's `vote`."""
    gathered = collectives.gather(np.array([_first_signal, vote], np.int32))
    signals = gathered[:, 0][gathered[:, 0] > 0]
    return int(signals[0]) if len(signals) else 0, int(gathered[0, 1])
