"""Studies in PostgreSQL, for real: a server of our own on loopback, which goes away while a sweep is running."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import pytest
from conftest import ROOT, on_devices, small_flags
from optuna.trial import TrialState

from largebatch.studies.database import open_storage


def find_program(name: str) -> str | None:
    """On PATH, or where Debian puts it."""
    of_debian = sorted(str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (of_debian[-1] if of_debian else None)


class Server:
    """A PostgreSQL server on a free port of 127.0.0.1, in a temporary folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        # It refuses to run as root, so it gets the user that its package made.
        self.user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
        if self.user:
            shutil.chown(folder, "postgres", "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run("initdb", "--auth=trust", "--username=sweep", "--no-sync", "-D", str(folder / "data"))

    def _run(self, program: str, *arguments: str) -> None:
        path = find_program(program)
        subprocess.run(
            [path, *arguments], cwd=self.folder, check=True, stdout=subprocess.DEVNULL, timeout=60, **self.user
        )

    def start(self) -> None:
        """Returns once it answers."""
        options = f"-h 127.0.0.1 -p {self.port} -k {self.folder}"
        log = str(self.folder / "log")
        self._run("pg_ctl", "start", "-w", "-D", str(self.folder / "data"), "-l", log, "-o", options)

    def stop(self) -> None:
        """At once, as in a crash."""
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self.folder / "data"))

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://sweep@127.0.0.1:{self.port}/postgres"


@pytest.fixture
def server():
    if not find_program("initdb"):
        pytest.skip("PostgreSQL is not installed here; `make test-postgres` installs it")
    folder = Path(tempfile.mkdtemp(prefix="largebatch-postgres-"))
    server = Server(folder)
    server.start()
    yield server
    with contextlib.suppress(subprocess.CalledProcessError):
        server.stop()
    shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_processes_share_a_study_and_wait_for_a_database_that_went_away(server, tmp_path, session_cache):
    space = 'def suggest(trial):\n    trial.suggest_categorical("optimizer.learning_rate", [0.003, 0.01, 0.03])\n'
    (tmp_path / "space.py").write_text(space)
    command = [sys.executable, "sweep.py", f"--study={tmp_path / 'study'}", f"--space={tmp_path / 'space.py'}"]
    command += [f"--storage={server.url}", "--heartbeat_sec=2", "--seeds=2"]
    command += small_flags(session_cache, **{"train.outer_steps": 2})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, cwd=ROOT, env=on_devices(1), **pipes) for _ in range(2)]
    deadline = time.monotonic() + 240
    while not list((tmp_path / "study" / "trials").glob("*/summary.json")):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in both), [process.communicate() for process in both]
        time.sleep(0.1)
    server.stop()
    time.sleep(8)
    assert all(process.poll() is None for process in both)
    server.start()
    shown = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], shown
    messages = "".join(err for _, err in shown)
    assert re.search(r"database does not answer \(.*\); trying again in \d+ s", messages), messages
    assert re.search(r"database answers again after \d+ s", messages), messages
    assert "Traceback" not in messages
    assert sum(out.count("  done  ") for out, _ in shown) >= 6, shown
    assert len(list((tmp_path / "study" / "trials").iterdir())) == 6
    study = optuna.load_study(study_name="study", storage=open_storage(server.url, 2))
    # A heartbeat that came late while the database was away has failed a trial, whose run then went on. Both
    # processes may have enqueued a run at once: its second row waits forever.
    trials = study.get_trials(states=(TrialState.COMPLETE, TrialState.RUNNING))
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    runs = [(trial.user_attrs["index"], trial.user_attrs["seed"]) for trial in trials]
    assert sorted(runs) == [(index, seed) for index in range(3) for seed in range(2)]  # none doubled
