"""Preemption by SIGTERM or SIGINT: the running call ends, all hosts stop, the run is saved, the process exits.

Schedulers send SIGTERM some seconds before they take a machine back. Python would act on a signal only after the
running call, and would raise KeyboardInterrupt at any line. So a thread reads the signals as they come, and
training checks for them where it can stop. Before training there is nothing to save: the process ends at once.
"""

import os
import signal
import sys
import threading

import numpy as np

from largebatch.hosts import collectives

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_first_signal = 0
_has_begun = False  # True if there may be something to save


class Stopped(Exception):
    """Raised when all hosts agree to stop, because one of them got a signal.

    number: number of the signal.
    exit_code: exit code of the process.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number


def answer_signals() -> None:
    """Start a thread that handles SIGTERM and SIGINT; until training begins, it ends the process at once."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write)  # C code writes the number there, even while the interpreter waits
    threading.Thread(target=_watch, args=(read,), daemon=True).start()


def training_begins() -> None:
    """Mark the begin of training: the first signal is now only recorded, a second ends the process at once."""
    global _has_begun
    _has_begun = True


def _watch(read: int) -> None:
    global _first_signal
    while True:
        number = os.read(read, 1)[0]
        if number not in SIGNALS:
            continue
        name = signal.Signals(number).name
        if not _has_begun:
            os.write(2, f"{name}: leaving; training had not begun\n".encode())
            os._exit(128 + number)
        if _first_signal:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # the cursor, which the progress bar hides
            os._exit(128 + number)
        _first_signal = number
        os.write(2, f"{name}: saving after the running call; a second signal leaves at once\n".encode())


def first_signal() -> int:
    """Return the number of the first signal that this host got, or 0."""
    return _first_signal


def agree(vote: int = 0) -> tuple[int, int]:
    """Agree on the first signal that any host received. Collective.

    Args:
      vote: any int32; only host 0's vote counts.
    Returns:
      The signal of the first host that got one, 0 if none did; and host 0's vote.
    """
    gathered = collectives.gather(np.array([_first_signal, vote], np.int32))  # [hosts, 2]
    signals, votes = gathered[:, 0], gathered[:, 1]
    first_host = np.argmax(signals > 0)  # host 0 if none got a signal
    return int(signals[first_host]), int(votes[0])
