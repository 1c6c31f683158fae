"""Run folders in a bucket: whole wherever a copy ends, and never written by two."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from conftest import ROOT, make_small_config, on_devices, run_script, small_flags
from emulators import gcs, s3, s3_files
from test_resume import assert_same_run, rows_of

import train
from largebatch.buckets import bucket
from largebatch.buckets.bucket import Bucket, Unreachable
from largebatch.hosts import preemption
from largebatch.runs import checkpoints, folder, reader
from largebatch.runs.checkpoints import DESCRIPTION
from largebatch.runs.display import Reporter
from largebatch.runs.load import best_checkpoint
from largebatch.util import UserError

URL = "memory://bucket/run"
MEMORY = type(fsspec.filesystem("memory"))


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Put this machine's copies into a folder of the test, and empty memory://.

    Each reader opens a file of its own there, as in any bucket: fsspec's have one position in it for all.
    """
    open_shared = MEMORY._open

    def open_own(files, path, mode="rb", **options):
        opened = open_shared(files, path, mode, **options)
        return io.BytesIO(opened.getvalue()) if mode == "rb" else opened

    monkeypatch.setattr(MEMORY, "_open", open_own)
    monkeypatch.setattr(bucket, "LOCAL_FOLDERS", str(tmp_path / "here"))
    bucket._copy_for_reading.cache_clear()
    fsspec.filesystem("memory").store.clear()


def make_config(cache_dir):
    config = make_small_config(cache_dir)
    config.train.outer_steps, config.checkpoint.keep = 4, 2
    config.log.tensorboard = False
    return config


@pytest.fixture
def config(session_cache):
    return make_config(session_cache)


def write_checkpoint(run: Path, step: int, content: str) -> None:
    """Write three equal files, and before them the rows that go with them, as a run does."""
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(f"{step}\n")
    target = run / "checkpoints" / f"{step:08d}"
    temporary = target.with_suffix(".tmp")
    for name in ("arrays/.one", "arrays/.two", DESCRIPTION):
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_text(content)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def steps_in(run: Path) -> list[int]:
    """Return the steps of the checkpoints; every file and the rows have to be there."""
    paths = sorted((run / "checkpoints").glob("[0-9]*"))
    for path in paths:
        contents = [file.read_text() for file in path.rglob("*") if file.is_file()]
        assert len(contents) == 3
        assert len(set(contents)) == 1
        assert str(int(path.name)) in (run / "metrics.jsonl").read_text().split()
    return [int(path.name) for path in paths]


def bucket_at(run: Path) -> Bucket:
    """Begin a process on the machine with this folder."""
    run.mkdir(exist_ok=True)
    found = Bucket(URL, run)
    found.pull()
    return found


def elsewhere(tmp_path: Path) -> Path:
    """Pull the run into a new folder, as another machine would."""
    return bucket_at(tmp_path / f"elsewhere{len(list(tmp_path.iterdir()))}").folder


def once_before(monkeypatch, operation: str, act) -> None:
    """Call `act` with the arguments of the first `operation` on memory://, before it."""
    method, calls = getattr(MEMORY, operation), []

    def late(files, *arguments, **options):
        calls.append(operation)
        if len(calls) == 1:
            act(files, *arguments)
        return method(files, *arguments, **options)

    monkeypatch.setattr(MEMORY, operation, late)


class Killed(BaseException):
    """Raised in place of the end of a process."""


# ---- copies that end anywhere ---------------------------------------------------------------------------


def older_ones_go(run: Path) -> None:
    write_checkpoint(run, 20, "c")
    shutil.rmtree(run / "checkpoints" / "00000000")
    shutil.rmtree(run / "checkpoints" / "00000010")
    (run / "summary.json").write_text("{}")


def same_step_again(run: Path) -> None:
    write_checkpoint(run, 10, "d")


def rollback(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "00000010")
    (run / "metrics.jsonl").write_text("0\n")
    write_checkpoint(run, 5, "e")


@pytest.mark.parametrize("change", [older_ones_go, same_step_again, rollback])
def test_wherever_a_copy_ends_the_bucket_has_a_whole_checkpoint(tmp_path, monkeypatch, change):
    run, places, has_ended = tmp_path / "run", 0, False
    while not has_ended:
        shutil.rmtree(run, ignore_errors=True)
        fsspec.filesystem("memory").store.clear()
        mine = bucket_at(run)
        for step, content in ((0, "a"), (10, "b")):
            write_checkpoint(run, step, content)
            mine.push()
        change(run)
        left = [places]

        def count(operation, left=left):
            def counted(*arguments, **options):
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return operation(*arguments, **options)

            return counted

        with monkeypatch.context() as patch:
            for name in ("pipe_file", "put_file", "rm_file"):
                patch.setattr(MEMORY, name, count(getattr(MEMORY, name)))
            try:
                mine.push()
                has_ended = True
            except Killed:
                places += 1
        other = elsewhere(tmp_path)
        assert steps_in(other), f"killed at change {places} of the bucket"
        assert not (other / "summary.json").exists() or 20 in steps_in(other)
        bucket_at(run)  # the same machine again resumes from what it has
        bucket_at(run).push()
        assert steps_in(elsewhere(tmp_path)) == steps_in(run)
    assert places > 5
    objects = {path.rpartition("/run/")[2] for path in fsspec.filesystem("memory").find("/bucket/run")}
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    names = {name.partition("/")[2] or name for name in objects}
    assert names == files - {bucket.STATE} | {bucket.POINTER}


@pytest.fixture
def mine(tmp_path) -> Bucket:
    """A run of this machine with one checkpoint, which was copied."""
    mine = bucket_at(tmp_path / "run")
    write_checkpoint(mine.folder, 0, "a")
    mine.push()
    return mine


def test_what_is_in_the_bucket_counts_unless_the_folder_goes_on_from_it(mine, tmp_path, caplog):
    run = mine.folder
    write_checkpoint(run, 10, "b")  # and then this process is killed
    bucket_at(run)
    assert steps_in(run) == [0, 10]
    other = elsewhere(tmp_path)
    write_checkpoint(other, 30, "c")
    bucket_at(other).push()
    with pytest.raises(UserError, match="another process trains in memory://bucket/run"):
        mine.push()
    assert not caplog.records
    bucket_at(run)
    assert steps_in(run) == [0, 30]
    assert "something else than was copied there from this machine, which is put aside in" in caplog.text
    (aside,) = tmp_path.glob("run.aside-*")
    assert steps_in(aside) == [0, 10]  # nothing is lost


def test_two_that_copy_at_once_do_not_mix(mine, tmp_path, monkeypatch):
    theirs = bucket_at(elsewhere(tmp_path))
    write_checkpoint(mine.folder, 10, "b")
    write_checkpoint(theirs.folder, 10, "c")
    once_before(monkeypatch, "put", lambda *_: mine.push())
    with pytest.raises(UserError, match="another process trains"):
        theirs.push()
    assert steps_in(elsewhere(tmp_path)) == [0, 10]


def test_a_pointer_whose_answer_was_lost_is_ones_own(mine, tmp_path, monkeypatch):
    pipe_file = MEMORY.pipe_file

    def pipe(files, path, content, **options):
        pipe_file(files, path, content, **options)
        monkeypatch.setattr(MEMORY, "pipe_file", pipe_file)
        raise OSError("Connection reset by peer")

    write_checkpoint(mine.folder, 10, "b")
    monkeypatch.setattr(MEMORY, "pipe_file", pipe)  # the pointer is all that is written by it
    with pytest.raises(Unreachable, match="Connection reset by peer"):
        mine.push()
    write_checkpoint(mine.folder, 20, "c")
    mine.push()
    assert steps_in(elsewhere(tmp_path)) == [0, 10, 20]


def test_a_run_that_is_copied_while_it_is_read_is_read_as_a_whole(mine, tmp_path, monkeypatch):
    def copy_meanwhile(files, sources, targets):
        files.get(sources[:2], targets[:2])
        same_step_again(mine.folder)
        shutil.rmtree(mine.folder / "checkpoints" / "00000000")
        mine.push()

    once_before(monkeypatch, "get", copy_meanwhile)
    assert steps_in(elsewhere(tmp_path)) == [10]


def test_files_that_are_replaced_while_they_are_copied_are_copied_with_the_next(mine, tmp_path, monkeypatch):
    for name in ("predictions/part-1", "tensorboard/events"):
        (mine.folder / name).parent.mkdir()
        (mine.folder / name).write_text("content")
    parts = mine.folder / "predictions"
    once_before(monkeypatch, "put", lambda *_: (parts / "part-1").rename(parts / "part-2"))
    with pytest.raises(Unreachable, match="part-1"):
        mine.push()
    assert steps_in(elsewhere(tmp_path)) == [0]
    mine.push()
    assert [path.name for path in (elsewhere(tmp_path) / "predictions").iterdir()] == ["part-2"]
    assert fsspec.filesystem("memory").cat("/bucket/run/tensorboard/events") == b"content"  # in its place


def test_readers_get_what_is_there_now(mine):
    for path in mine.folder.rglob("*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    mine.push()
    first = bucket.local_copy(URL)
    assert first.name == "run"
    assert reader.last_sign_of_life(first) == "last sign of life 2.0 h ago"  # a report says so
    assert bucket.local_copy(URL + "/") == first
    write_checkpoint(mine.folder, 10, "b")
    mine.push()
    assert steps_in(bucket.local_copy(URL)) == [0, 10]
    assert steps_in(first) == [0]  # another process may read it
    with pytest.raises(UserError, match="memory://bucket/none: no run is there"):
        bucket.local_copy("memory://bucket/none")


@pytest.mark.parametrize("content", [b"[1", b"[]", b"{}"])
def test_a_damaged_pointer_is_named(mine, content):
    fsspec.filesystem("memory").pipe_file("/bucket/run/pointer.json", content)
    with pytest.raises(UserError, match=r"^--workdir: memory://bucket/run/pointer\.json is damaged \("):
        bucket.local_copy(URL)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        *(
            (url, "allowed: a folder, or gs://BUCKET/FOLDER")
            for url in ("gs://", "s3://bucket", "s3://bucket//run")
        ),
        (
            "nothing://bucket/run",
            "nothing://bucket/run .*Protocol not known: nothing.*; allowed: gs://... or s3://",
        ),
        ("s3://bucket/run", "s3://bucket/run cannot be read or written .Unable to locate credentials"),
    ],
)
def test_what_is_no_folder_in_a_bucket_of_ours_is_refused_before_the_run(
    url, message, config, tmp_path, monkeypatch
):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=f"^--workdir: .*{message}"):
        train.train_and_evaluate(config, url)
    assert not list(tmp_path.rglob("config.json"))


# ---- runs -----------------------------------------------------------------------------------------------


class Stops(Reporter):
    """Reporter that ends the run after the second validation, as SIGTERM would."""

    def row(self, row, outer_steps):
        if row["outer"] == 2:
            raise preemption.Stopped(signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(session_cache, tmp_path_factory):
    """The run of `config` in a folder of this machine."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    train.train_and_evaluate(make_config(session_cache), str(path))
    return path


def test_a_run_resumes_on_another_machine_with_the_same_bits(config, tmp_path, whole, caplog):
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, URL, report=Stops(enabled=False))
    shutil.rmtree(tmp_path / "here")  # the machine is lost, and the newest checkpoint damaged
    store = fsspec.filesystem("memory").store
    newest = max((name for name in store if name.endswith(DESCRIPTION)), key=lambda name: name.split("/")[-3])
    changed = store[newest].getvalue().replace(b"step", b"stop", 1)
    store[newest] = type(store[newest])(None, newest, changed)
    train.train_and_evaluate(config, URL)
    assert "damaged checkpoint: " in caplog.text
    copy = bucket.local_copy(URL)
    assert_same_run(copy, whole)
    events = [json.loads(line)["event"] for line in (copy / "events.jsonl").read_text().splitlines()]
    assert events == ["start", "interrupted", "start", "done"]
    assert bucket.local_copy(URL) == copy
    assert train.train_and_evaluate(config, URL)["status"] == "done"  # and nothing is trained

    config.train.init_from, config.train.outer_steps = URL, 1
    train.train_and_evaluate(config, str(tmp_path / "next"))
    learned = best_checkpoint(copy).arrays
    taken, _ = checkpoints.read_arrays(tmp_path / "next" / "checkpoints" / "00000000")
    names = [name for name in learned if name.startswith("state.params.")]
    assert names
    assert all(np.array_equal(learned[name], taken[name]) for name in names)


def test_a_run_bears_a_bucket_that_is_away_and_is_copied_later(config, tmp_path, whole, monkeypatch, caplog):
    monkeypatch.setattr(folder, "LAST_COPY_SEC", 0.2)
    monkeypatch.setattr(folder, "RETRY_SEC", 0.1)
    put = MEMORY.put

    def fail(*arguments, **options):
        raise OSError("Connection reset by peer")

    monkeypatch.setattr(MEMORY, "put", fail)
    text = r"run cannot be read or written \(Connection reset by peer\); the whole run is in"
    with pytest.raises(UserError, match=text):
        train.train_and_evaluate(config, URL)
    assert "the run goes on, and the next checkpoint is copied with this one" in caplog.text
    monkeypatch.setattr(MEMORY, "put", put)
    config.seed += 1
    with pytest.raises(UserError, match="holds a run of another config: seed"):
        train.train_and_evaluate(config, URL)
    config.seed -= 1
    assert train.train_and_evaluate(config, URL)["status"] == "done"
    shutil.rmtree(tmp_path / "here")
    assert_same_run(bucket.local_copy(URL), whole)


# ---- real processes, emulated buckets -------------------------------------------------------------------


def arguments(cache, workdir, outer_steps: int = 6) -> list[str]:
    fields = {"train.inner_steps": 2, "train.outer_steps": outer_steps, "checkpoint.keep": 2}
    return [*small_flags(cache, **fields), f"--workdir={workdir}"]


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    """A machine of its own, with nothing on it and no account."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home")}


def kill_while_copying(command: list[str], environment: dict, files, count: int) -> bool:
    """Run train.py, and kill it when `count` files of a checkpoint are there that the pointer does not name."""
    process = subprocess.Popen(
        [sys.executable, "train.py", *command],
        cwd=ROOT,
        env=on_devices(2) | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    named = set()
    try:
        while process.poll() is None:
            names = [name.removeprefix("bucket/run/") for name in files.find("bucket/run")]
            if bucket.POINTER in names:
                files_named = json.loads(files.cat_file("bucket/run/pointer.json"))["files"]
                named = {entry[0] for entry in files_named.values()}
            copies = [name.split("/")[0] for name in names if "/checkpoints/" in name]
            if named and sum(copy not in named for copy in copies) >= count:
                return True
    finally:
        process.kill()
        process.wait()
    return False


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_process_that_is_killed_while_it_copies_resumes_on_a_pod_of_other_machines(tmp_path, session_cache, home):
    whole = tmp_path / "whole"
    assert run_script("train.py", *arguments(session_cache, whole)).returncode == 0
    with s3() as environment:
        files = s3_files(environment)
        command, environment = arguments(session_cache, "s3://bucket/run"), environment | home
        assert kill_while_copying(command, environment, files, 4), "it ended before it was killed"
        named = json.loads(files.cat_file("bucket/run/pointer.json"))["files"]
        assert any(name.endswith(DESCRIPTION) for name in named)
        shutil.rmtree(home["HOME"])  # the machine is gone
        pod = ["-m", "largebatch.pod", "--hosts=2", "--devices=1", "--", sys.executable, "train.py"]
        last = run_script(*pod, *command, env=environment)
        assert last.returncode == 0, last.stderr
        assert "resuming at step" in last.stderr
        (copy,) = Path(home["HOME"]).glob(".cache/largebatch/runs/run-*")
        for one, other in zip(rows_of(copy), rows_of(whole), strict=True):
            assert one["step"] == other["step"]
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
        shutil.rmtree(home["HOME"])
        report = run_script("report.py", "s3://bucket/run", f"--out={tmp_path}/r.html", env=environment)
        assert report.returncode == 0, report.stderr


@pytest.mark.full
def test_google_cloud_storage(session_cache, home):
    with gcs() as environment:
        environment |= home
        command = arguments(session_cache, "gs://bucket/run", 1)
        first = run_script("train.py", *command, env=environment)
        assert first.returncode == 0, first.stderr
        assert "a bucket has no locks: start one run in it only" in first.stderr
        shutil.rmtree(home["HOME"])
        again = run_script("train.py", *command, env=environment)
        assert "gs://bucket/run is a finished run of this config" in again.stderr
        assert run_script("evaluate.py", "gs://bucket/run", env=environment).returncode == 0
