"""Run folders in a bucket: whole wherever a copy ends, and never written by two."""

import hashlib
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
from conftest import ROOT, assert_one_line_error, on_devices, run_script
from emulators import gcs, open_files, s3
from test_resume import assert_same_run

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


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Put this machine's copies into a folder of the test, and empty memory://.

    Each reader opens a file of its own there, as in any bucket: fsspec's have one position in it for all.
    """
    memory = type(fsspec.filesystem("memory"))
    open_shared = memory._open

    def open_own(files, path, mode="rb", **options):
        opened = open_shared(files, path, mode, **options)
        return io.BytesIO(opened.getvalue()) if mode == "rb" else opened

    monkeypatch.setattr(memory, "_open", open_own)
    monkeypatch.setattr(bucket, "LOCAL_FOLDERS", str(tmp_path / "here"))
    bucket._copy_for_reading.cache_clear()
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def config(small_config):
    small_config.batch.size = 128
    small_config.train.outer_steps = 4
    small_config.log.tensorboard = False
    small_config.checkpoint.keep = 2
    return small_config


def write_checkpoint(run: Path, step: int, content: str) -> None:
    """A small one; the rows that go with it are written before, as in a run."""
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(f"{step}\n")
    temporary = run / "checkpoints" / f".{step:08d}.tmp"
    (temporary / "arrays").mkdir(parents=True)
    (temporary / "description").mkdir()
    for part in range(3):
        (temporary / "arrays" / f".part{part}").write_text(content * (part + 1))
    names = sorted(path for path in temporary.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(temporary)}" for path in names]
    (temporary / DESCRIPTION).write_text("\n".join(sums))
    target = run / "checkpoints" / f"{step:08d}"
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def check_whole(run: Path) -> list[int]:
    """Steps of the checkpoints, of which every file and the rows have to be there."""
    steps = []
    for sums in sorted(run.glob(f"checkpoints/{'[0-9]' * 8}/{DESCRIPTION}")):
        listed = [line.split("  ") for line in sums.read_text().splitlines()]
        for digest, name in listed:
            assert hashlib.sha256((sums.parents[1] / name).read_bytes()).hexdigest() == digest
        assert len(listed) == 3
        steps.append(int(sums.parents[1].name))
    rows = (run / "metrics.jsonl").read_text().split() if steps else []
    assert {str(step) for step in steps} <= set(rows)
    return steps


def elsewhere(tmp_path: Path, url: str = URL) -> Path:
    """What another machine gets."""
    other = tmp_path / f"elsewhere{len(list(tmp_path.iterdir()))}"
    other.mkdir()
    Bucket(url, other).pull()
    return other


class Killed(BaseException):
    """In place of the end of a process."""


# ---- copies that end anywhere ---------------------------------------------------------------------------


def next_checkpoint(run: Path) -> None:
    write_checkpoint(run, 20, "c")


def older_one_goes(run: Path) -> None:
    write_checkpoint(run, 20, "c")
    shutil.rmtree(run / "checkpoints" / "00000000")
    shutil.rmtree(run / "checkpoints" / "00000010")


def same_step_again(run: Path) -> None:
    write_checkpoint(run, 10, "d")


def the_end(run: Path) -> None:
    write_checkpoint(run, 20, "c")
    (run / "summary.json").write_text("{}")


def rollback(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "00000010")
    (run / "metrics.jsonl").write_text("0\n")
    write_checkpoint(run, 5, "e")


@pytest.mark.parametrize("change", [next_checkpoint, older_one_goes, same_step_again, the_end, rollback])
def test_wherever_a_copy_ends_the_bucket_has_a_whole_checkpoint(tmp_path, monkeypatch, change):
    memory = type(fsspec.filesystem("memory"))
    places = 0
    while True:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        fsspec.filesystem("memory").store.clear()
        run = tmp_path / "run"
        run.mkdir()
        mine = Bucket(URL, run)
        mine.pull()
        for step, content in ((0, "a"), (10, "b")):
            write_checkpoint(run, step, content)
            mine.push()
        change(run)
        left = places

        def count(operation, *arguments, **options):
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return operation(*arguments, **options)

        with monkeypatch.context() as patch:
            for name in ("pipe_file", "put_file", "rm_file"):
                operation = getattr(memory, name)
                patch.setattr(
                    memory, name, lambda *a, operation=operation, count=count, **o: count(operation, *a, **o)
                )
            try:
                mine.push()
                break
            except Killed:
                pass
        other = elsewhere(tmp_path)
        found = check_whole(other)
        assert found, f"killed at change {places} of the bucket"
        assert Bucket(URL, other).read("summary.json") is None or 20 in found
        Bucket(URL, run).pull()  # the same machine again goes on from what it has
        again = Bucket(URL, run)
        again.pull()
        again.push()
        assert check_whole(elsewhere(tmp_path)) == check_whole(run)
        places += 1
    assert places > 5
    assert check_whole(elsewhere(tmp_path)) == check_whole(run)
    objects = {path.rpartition("/run/")[2] for path in fsspec.filesystem("memory").find("/bucket/run")}
    assert {name.partition("/")[2] or name for name in objects} == {
        path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file() and path.name != bucket.STATE
    } | {bucket.POINTER}


@pytest.fixture
def mine(tmp_path) -> Bucket:
    """A run of this machine with one checkpoint, which was copied."""
    run = tmp_path / "run"
    run.mkdir()
    mine = Bucket(URL, run)
    mine.pull()
    write_checkpoint(run, 0, "a")
    mine.push()
    return mine


def test_what_is_in_the_bucket_counts_unless_the_folder_goes_on_from_it(mine, tmp_path, caplog):
    run = mine.folder
    write_checkpoint(run, 10, "b")  # and then this process is killed
    Bucket(URL, run).pull()
    assert check_whole(run) == [0, 10]
    other = elsewhere(tmp_path)
    write_checkpoint(other, 30, "c")
    theirs = Bucket(URL, other)
    theirs.pull()
    theirs.push()
    with pytest.raises(UserError, match="another process trains in memory://bucket/run"):
        mine.push()
    assert not caplog.records
    Bucket(URL, run).pull()
    assert check_whole(run) == [0, 30]
    assert "something else than was copied there from this machine, which is put aside in" in caplog.text
    (aside,) = tmp_path.glob("run.aside-*")
    assert check_whole(aside) == [0, 10]  # nothing is lost


def test_two_that_copy_at_once_do_not_mix(mine, tmp_path, monkeypatch):
    other = elsewhere(tmp_path)
    theirs = Bucket(URL, other)
    theirs.pull()
    write_checkpoint(mine.folder, 10, "b")
    write_checkpoint(other, 10, "c")
    put, is_first = type(theirs._files).put, True

    def put_after_the_other(*arguments):
        nonlocal is_first
        if is_first:
            is_first = False
            mine.push()
        put(*arguments)

    monkeypatch.setattr(type(theirs._files), "put", put_after_the_other)
    with pytest.raises(UserError, match="another process trains"):
        theirs.push()
    assert check_whole(elsewhere(tmp_path)) == [0, 10]


def test_a_pointer_whose_answer_was_lost_is_ones_own(mine, tmp_path, monkeypatch):
    memory = type(fsspec.filesystem("memory"))
    pipe_file, lost = memory.pipe_file, []

    def pipe(files, path, content, **options):
        pipe_file(files, path, content, **options)
        if path.endswith(bucket.POINTER) and not lost:
            lost.append(path)
            raise OSError("Connection reset by peer")

    monkeypatch.setattr(memory, "pipe_file", pipe)
    write_checkpoint(mine.folder, 10, "b")
    with pytest.raises(Unreachable, match="Connection reset by peer"):
        mine.push()
    write_checkpoint(mine.folder, 20, "c")
    mine.push()
    assert check_whole(elsewhere(tmp_path)) == [0, 10, 20]


def test_names_in_a_bucket_do_not_lead_outside(mine, tmp_path):
    pointer = mine.read_pointer()
    pointer["files"]["../../out"] = next(iter(pointer["files"].values()))
    fsspec.filesystem("memory").pipe_file("/bucket/run/pointer.json", json.dumps(pointer).encode())
    with pytest.raises(UserError, match="would lie outside"):
        elsewhere(tmp_path)


def test_a_damaged_pointer_is_named(tmp_path):
    fsspec.filesystem("memory").pipe_file("/bucket/run/pointer.json", b'{"id": "a", "fi')
    with pytest.raises(UserError, match=r"memory://bucket/run/pointer.json is damaged"):
        elsewhere(tmp_path)


def test_a_run_that_is_copied_while_it_is_read_is_read_as_a_whole(mine, tmp_path, monkeypatch):
    memory = type(fsspec.filesystem("memory"))
    get, is_first = memory.get, True

    def get_while_it_goes(files, sources, targets):
        nonlocal is_first
        if is_first:
            is_first = False
            get(files, sources[:2], targets[:2])
            same_step_again(mine.folder)
            shutil.rmtree(mine.folder / "checkpoints" / "00000000")
            mine.push()
        get(files, sources, targets)

    monkeypatch.setattr(memory, "get", get_while_it_goes)
    assert check_whole(elsewhere(tmp_path)) == [10]


def test_files_that_are_replaced_while_they_are_copied_are_copied_with_the_next(mine, tmp_path, monkeypatch):
    parts = mine.folder / "predictions"
    parts.mkdir()
    (parts / "part-1").write_text("old")
    (mine.folder / "tensorboard").mkdir()
    (mine.folder / "tensorboard" / "events").write_text("of TensorBoard")
    memory = type(fsspec.filesystem("memory"))
    put, is_first = memory.put, True

    def put_while_it_goes(files, sources, targets):
        nonlocal is_first
        if is_first:
            is_first = False
            (parts / "part-1").rename(parts / "part-2")
        put(files, sources, targets)

    monkeypatch.setattr(memory, "put", put_while_it_goes)
    with pytest.raises(Unreachable, match="part-1"):
        mine.push()
    assert check_whole(elsewhere(tmp_path)) == [0]
    mine.push()
    assert [path.name for path in (elsewhere(tmp_path) / "predictions").iterdir()] == ["part-2"]
    assert fsspec.filesystem("memory").cat("/bucket/run/tensorboard/events") == b"of TensorBoard"


@pytest.mark.parametrize("url", ["gs://", "s3://bucket", "s3://bucket//run", "S3://bucket/run"])
def test_what_is_no_folder_in_a_bucket_is_refused(url):
    with pytest.raises(UserError, match="allowed: a folder, or gs://BUCKET/FOLDER or s3://BUCKET/FOLDER"):
        Bucket(url)


def test_readers_get_what_is_there_now(mine):
    first = bucket.local_copy(URL)
    assert first.name == "run"
    assert bucket.local_copy(URL + "/") == first
    write_checkpoint(mine.folder, 10, "b")
    mine.push()
    assert check_whole(bucket.local_copy(URL)) == [0, 10]
    assert check_whole(first) == [0]  # another process may read it
    with pytest.raises(UserError, match="memory://bucket/none: no run is there"):
        bucket.local_copy("memory://bucket/none")


def test_a_copy_to_read_from_is_as_old_as_what_is_there(mine):
    """A report says by its files when a run last gave a sign of life."""
    for path in mine.folder.rglob("*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    mine.push()
    copy = bucket.local_copy(URL)
    assert reader.last_sign_of_life(copy) == "last sign of life 2.0 h ago"
    assert check_whole(copy) == [0]


# ---- runs -----------------------------------------------------------------------------------------------


class Stops(Reporter):
    """Ends the run after the second validation, as SIGTERM would."""

    def row(self, row, outer_steps):
        if row["outer"] == 2:
            raise preemption.Stopped(signal.SIGTERM)


def lose_this_machine(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "here")


def test_a_run_goes_on_on_another_machine_with_the_same_bits(config, tmp_path):
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, URL, report=Stops(enabled=False))
    lose_this_machine(tmp_path)
    train.train_and_evaluate(config, URL)
    train.train_and_evaluate(config, str(tmp_path / "whole"))
    copy = bucket.local_copy(URL)
    assert_same_run(copy, tmp_path / "whole")
    events = [json.loads(line)["event"] for line in (copy / "events.jsonl").read_text().splitlines()]
    assert events == ["start", "interrupted", "start", "done"]
    assert bucket.local_copy(URL) == copy
    assert train.train_and_evaluate(config, URL)["status"] == "done"  # and nothing is trained


@pytest.mark.full
def test_a_checkpoint_that_was_damaged_in_the_bucket_is_not_used(config, tmp_path, caplog):
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, URL, report=Stops(enabled=False))
    lose_this_machine(tmp_path)
    store = fsspec.filesystem("memory").store
    newest = max((name for name in store if name.endswith(DESCRIPTION)), key=lambda name: name.split("/")[-3])
    store[newest] = type(store[newest])(None, newest, store[newest].getvalue().replace(b"step", b"stop", 1))
    train.train_and_evaluate(config, URL)
    assert "damaged checkpoint: " in caplog.text
    train.train_and_evaluate(config, str(tmp_path / "whole"))
    assert_same_run(bucket.local_copy(URL), tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("away", ["pipe_file", "put"])
def test_a_run_bears_a_bucket_that_is_away_and_is_copied_later(config, tmp_path, monkeypatch, caplog, away):
    monkeypatch.setattr(folder, "LAST_COPY_SEC", 0.2)
    monkeypatch.setattr(folder, "RETRY_SEC", 0.1)
    memory = type(fsspec.filesystem("memory"))
    operation, is_away = getattr(memory, away), True

    def operate(files, path, *arguments, **options):
        if is_away and bucket.PROBE not in path:
            raise OSError("Connection reset by peer")
        return operation(files, path, *arguments, **options)

    monkeypatch.setattr(memory, away, operate)
    with pytest.raises(UserError) as raised:
        train.train_and_evaluate(config, URL)
    assert "memory://bucket/run cannot be read or written (Connection reset by peer); the whole run is in" in str(
        raised.value
    )
    assert "the run goes on, and the next checkpoint is copied with this one" in caplog.text
    is_away = False
    config.seed += 1
    with pytest.raises(UserError, match="holds a run of another config: seed"):
        train.train_and_evaluate(config, URL)
    config.seed -= 1
    assert train.train_and_evaluate(config, URL)["status"] == "done"
    train.train_and_evaluate(config, str(tmp_path / "whole"))
    lose_this_machine(tmp_path)
    assert_same_run(bucket.local_copy(URL), tmp_path / "whole")


@pytest.mark.full
def test_a_run_starts_from_one_in_a_bucket(config, tmp_path):
    train.train_and_evaluate(config, URL)
    config.train.init_from = URL
    config.train.outer_steps = 1
    train.train_and_evaluate(config, str(tmp_path / "next"))
    learned = best_checkpoint(bucket.local_copy(URL)).arrays
    taken, _ = checkpoints.read_arrays(tmp_path / "next" / "checkpoints" / "00000000")
    names = [name for name in learned if name.startswith("state.params.")]
    assert names
    assert all(np.array_equal(learned[name], taken[name]) for name in names)


# ---- real processes, emulated buckets -------------------------------------------------------------------

ARGUMENTS = {
    "dataset.num_examples": 100,
    "dataset.image_size": 16,
    "train.inner_steps": 2,
    "checkpoint.keep": 2,
}


def arguments(cache, workdir, outer_steps: int = 6) -> list[str]:
    fields = {**ARGUMENTS, "train.outer_steps": outer_steps}
    return [
        f"--config.augment.cache_dir={cache}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
        f"--workdir={workdir}",
    ]


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    """A machine of its own, with nothing on it and no account."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home")}


def kill_while_copying(command: list[str], environment: dict, files, count: int) -> bool:
    """Runs train.py, and kills it when `count` files of a checkpoint are there that the pointer does not name."""
    process = subprocess.Popen(
        [sys.executable, "train.py", *command],
        cwd=ROOT, env=on_devices(2) | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    named: set[str] = set()
    begin = time.time()
    try:
        while process.poll() is None:
            found = files.find("bucket/run", detail=True)
            objects = {
                name.removeprefix("bucket/run/"): info for name, info in found.items() if info["type"] == "file"
            }
            names = [name for name, info in objects.items() if info["LastModified"].timestamp() > begin]
            if bucket.POINTER in names:
                files_named = json.loads(files.cat_file("bucket/run/pointer.json"))["files"]
                named = {entry[0] for entry in files_named.values()}
            copies = [name.split("/")[0] for name in names if "/checkpoints/" in name]
            unnamed = [copy for copy in copies if named and copy not in named]
            if len(unnamed) >= count:
                process.kill()
                return True
    finally:
        process.kill()
        process.wait()
    return False


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_process_that_is_killed_again_and_again_while_it_copies(tmp_path, session_cache, home):
    whole, outer_steps = tmp_path / "whole", 12  # each start goes on where a copy ended, some steps later
    assert run_script("train.py", *arguments(session_cache, whole, outer_steps)).returncode == 0
    with s3() as environment:
        files = open_files("s3", environment)
        command, environment = arguments(session_cache, "s3://bucket/run", outer_steps), environment | home
        for count in (1, 2, 4, 6):
            assert kill_while_copying(command, environment, files, count), "it ended before it was killed"
            named = json.loads(files.cat_file("bucket/run/pointer.json"))["files"]
            assert any(name.endswith(DESCRIPTION) for name in named)
            shutil.rmtree(home["HOME"])  # the machine is gone
        last = run_script("train.py", *command, env=environment)
        assert last.returncode == 0, last.stderr
        assert "resuming at update" in last.stderr
        shutil.rmtree(home["HOME"])
        result = run_script("evaluate.py", "s3://bucket/run", env=environment)
        assert result.returncode == 0, result.stderr
        assert (
            run_script("report.py", "s3://bucket/run", f"--out={tmp_path}/r.html", env=environment).returncode == 0
        )
        pull = "import sys, pathlib; from largebatch.buckets import bucket; bucket.Bucket(*sys.argv[1:2], "
        pull += "pathlib.Path(sys.argv[2])).pull()"
        subprocess.run(
            [sys.executable, "-c", pull, "s3://bucket/run", tmp_path / "copy"],
            cwd=ROOT, env=os.environ | environment, check=True,
        )  # fmt: skip
        assert_same_run(tmp_path / "copy", whole)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_pod_that_is_stopped_goes_on_on_other_machines(tmp_path, session_cache, home):
    pod = ["-m", "largebatch.pod", "--hosts=2", "--devices=1", "--", sys.executable, "train.py"]
    whole = run_script(*pod, *arguments(session_cache, tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    with s3() as environment:
        files = open_files("s3", environment)
        command, environment = [*pod, *arguments(session_cache, "s3://bucket/run")], environment | home
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=os.environ | environment)
        try:
            while process.poll() is None:
                if any(name.endswith(f"00000002/{DESCRIPTION}") for name in files.find("bucket/run")):
                    process.terminate()
                    break
            assert process.wait(120) == 128 + signal.SIGTERM
        finally:
            process.kill()
        shutil.rmtree(home["HOME"])
        last = run_script(*command, env=environment)
        assert last.returncode == 0, last.stderr
        assert "resuming at update" in last.stderr
        (copy,) = Path(home["HOME"]).glob(".cache/largebatch/runs/run-*")
        assert_same_run(copy, tmp_path / "whole")


@pytest.mark.full
def test_google_cloud_storage(tmp_path, session_cache, home):
    with gcs() as environment:
        environment |= home
        command = arguments(session_cache, "gs://bucket/run")
        first = run_script("train.py", *command, "--config.train.target_accuracy=1e-9", env=environment)
        assert first.returncode == 0, first.stderr
        assert "a bucket has no locks: start one run in it only" in first.stderr
        shutil.rmtree(home["HOME"])
        again = run_script("train.py", *command, "--config.train.target_accuracy=1e-9", env=environment)
        assert "gs://bucket/run is a finished run of this config" in again.stderr
        assert run_script("evaluate.py", "gs://bucket/run", env=environment).returncode == 0


@pytest.mark.parametrize(
    ("workdir", "environment", "words"),
    [
        ("s3://bucket/run", {"AWS_EC2_METADATA_DISABLED": "true"}, ["Unable to locate credentials"]),
        pytest.param(
            "s3://bucket/run",
            {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            ["127.0.0.1:9"],
            marks=pytest.mark.full,  # s3fs tries for 10 s
        ),
        ("nothing://bucket/run", {}, ["Protocol not known: nothing", "allowed: gs://... or s3://..."]),
    ],
    ids=["no credentials", "no network", "unknown"],
)
def test_a_bucket_that_cannot_be_used_is_named_before_the_run(session_cache, home, workdir, environment, words):
    result = run_script("train.py", *arguments(session_cache, workdir), env=environment | home)
    assert_one_line_error(result, "train.py: error: --workdir: ", workdir, *words)
    assert not list(Path(home["HOME"]).rglob("config.json"))


def test_a_bucket_that_is_not_there_is_named(session_cache, home):
    with s3() as environment:
        command = arguments(session_cache, "s3://none/run")
        result = run_script("train.py", *command, env=environment | home)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert (
        "train.py: error: --workdir: s3://none/run cannot be read or written (The specified bucket does"
        in result.stderr
    )
    assert not list(Path(home["HOME"]).rglob("config.json"))


def test_a_study_in_a_bucket_is_refused():
    result = run_script("sweep.py", "--study=gs://bucket/study", "--space=configs/sweeps/adascale.py")
    assert_one_line_error(result, "--study: gs://bucket/study", "allowed: a folder of this machine")
