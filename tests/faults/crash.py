"""python crash.py NUMBER FOLDER -- SCRIPT ARGUMENTS...: SIGKILL just before the NUMBER-th change under FOLDER.

A change is what Python's audit events tell of: a file opened for writing, renamed, cut or removed, a
folder made or removed, in any thread. Writes how many there were to FOLDER/../changes, if it survives.
"""

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def main() -> None:
    number, folder, _, *arguments = sys.argv[1:]
    number, folder = int(number), str(Path(folder).resolve())
    seen = 0

    def hook(event: str, details: tuple) -> None:
        nonlocal seen
        if event == "open":
            if not isinstance(details[2], int) or not details[2] & WRITING:
                return
        elif event not in CHANGES:
            return
        if str(details[0]).startswith(folder):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    atexit.register(lambda: Path(f"{folder}/../changes").write_text(str(seen)))
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
