"""Files that appear whole or not at all, whoever else writes the same one at the same time."""

import contextlib
import fcntl
import hashlib
import os
import pathlib

import numpy as np
import pytest
from etils import epath

import report
from largebatch import util
from largebatch.data.dataset import dataset_of_arrays
from largebatch.data.sources import find
from largebatch.predictions.tables import write_csv
from largebatch.runs.folder import InUse, RunFolder
from largebatch.util import UserError

HEX = "0123456789abcdef" * 2


def write_json(folder):
    RunFolder(folder).write_json("a.json", {"a": 1})


def write_page(folder):
    report.write(folder / "page.html", b"<html>", "--out")


def write_predictions(folder):
    dataset = dataset_of_arrays(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1]), ["a", "b"], ["1", "2"])
    write_csv(str(folder / "x.csv"), dataset, [np.eye(2)])


def fetch(folder):
    find.download_eurosat(epath.Path(folder))


@pytest.fixture
def mirror(monkeypatch):
    """Downloads without a network."""

    def arrive(_, target):
        target.write_bytes(b"zip")
        return hashlib.sha256(b"zip").hexdigest()

    monkeypatch.setattr(find, "_download", arrive)
    monkeypatch.setattr(find, "EUROSAT_MIRRORS", {"http://nowhere": hashlib.sha256(b"zip").hexdigest()})


def once_before(monkeypatch, owner, name: str, act) -> None:
    """Runs `act` at the first call of a method, before it."""
    method, calls = getattr(owner, name), []

    def late(*arguments, **options):
        calls.append(name)
        if len(calls) == 1:
            act()
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, late)


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("write", [write_json, write_page, write_predictions, fetch])
def test_two_containers_of_one_host_name_and_pid_write_the_same_file(write, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    for owner in (pathlib.Path, type(epath.Path(tmp_path))):
        once_before(monkeypatch, owner, "replace", lambda: write(tmp_path))
    write(tmp_path)
    (left,) = tmp_path.iterdir()
    assert not left.name.startswith(".")


def test_what_is_not_written_to_the_end_takes_no_ones_place(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with contextlib.suppress(KeyboardInterrupt), util.replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a", "before")]
    with util.replacing(path) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a", "after")]


@pytest.mark.parametrize(("path", "named"), [(".", "'.'"), ("no/such/file", "no/such/.file")])
def test_a_place_for_no_file_is_an_oserror(path, named, tmp_path, monkeypatch):
    """Which every writer turns into one line."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=named), util.replacing(pathlib.Path(path)) as temporary:
        temporary.write_text("")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make_path", [pathlib.Path, epath.Path])
def test_only_what_is_stale_and_of_this_name_is_removed(tmp_path, make_path):
    stale = [f".EuroSAT.zip.{HEX}.tmp"]
    kept = [f".EuroSAT-zip.{HEX}.tmp", f".b.EuroSAT.zip.{HEX}.tmp", ".EuroSAT.zip.tmp", "EuroSAT.zip"]
    for name in (*stale, *kept):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    written = tmp_path / f".EuroSAT.zip.{HEX[::-1]}.tmp"
    written.write_text("")
    util.remove_stale(make_path(tmp_path / "EuroSAT.zip"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, written.name])
    util.remove_stale(make_path(tmp_path / "no" / "such"))


def test_a_folder_of_an_owner_without_a_name_can_be_stale(tmp_path, monkeypatch):
    """As in a container that runs under a number of its own."""
    import pwd

    def nameless(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    left = tmp_path / f".cache.{HEX}.tmp"
    left.mkdir()
    os.utime(left, (0, 0))
    monkeypatch.setattr(pwd, "getpwuid", nameless)
    util.remove_stale(epath.Path(tmp_path / "cache"))
    assert not left.exists()


# ---- run folders ------------------------------------------------------------------------------------


def test_whoever_trains_in_a_folder_removes_what_killed_processes_left_there(tmp_path):
    for name in (f".summary.json.{HEX}.tmp", ".summary.json.4711.tmp"):
        (tmp_path / name).write_text("")
    with RunFolder(tmp_path) as run:
        run.lock()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_two_processes_try_a_folder_at_the_same_time(tmp_path, monkeypatch):
    """The one that comes second is told so, not that the disk is bad."""
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    once_before(monkeypatch, fcntl, "flock", first.lock)
    with pytest.raises(InUse):
        second.lock()
    first.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up"])
def test_examples_whose_names_lead_outside_are_refused(name, tmp_path):
    assert util.path_within(tmp_path, "a/1.png", "--out") == tmp_path / "a" / "1.png"
    with pytest.raises(UserError, match=r"^--out: the example .* would lie outside; allowed: relative names$"):
        util.path_within(tmp_path, name, "--out")
