"""Files that are not what they seem: one line each, nothing hangs, and links to folders are followed."""

import os
import shutil
import socket
import struct
import zipfile

import numpy as np
import pytest
from conftest import decode_all, make_folder

from largebatch import untrusted
from largebatch.decoding.images import DecodeOptions
from largebatch.optim import traces
from largebatch.sources.file_sets import find_images
from largebatch.sources.find import find_source
from largebatch.studies.space import read_space
from largebatch.util import BadSetting, UserError

pytestmark = pytest.mark.timeout(60)


def make_special(path, kind):
    """What is no regular file, at `path`."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    return path


def load(path):
    return decode_all(find_source("x", path=str(path)))


def find(path):
    return find_images(str(path), ["a", "b"], DecodeOptions((16, 16)))


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path, kind):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    make_special(folder / "a" / "0.png", kind)
    alone = make_special(tmp_path / "alone", kind)
    with pytest.raises(UserError, match=rf"dataset.path: .*a/0.png cannot be read \(a {kind}, no regular file\)"):
        load(folder)
    with pytest.raises(UserError, match=rf"--images: .*a/0.png cannot be read \(a {kind}, no regular file\)"):
        find(folder)
    with pytest.raises(UserError, match=rf"dataset.path: .*alone .*\(a {kind}, no regular file\)"):
        load(alone)
    with pytest.raises(UserError, match=rf"--images: .*alone .*\(a {kind}, no regular file\)"):
        find(alone)
    with pytest.raises(BadSetting, match=rf"batch.trace: .*alone cannot be read \(a {kind}, no regular file\)"):
        traces.digest(str(alone))
    with pytest.raises(UserError, match=r"--space: .*alone is not a file"):
        read_space(alone, {})


def test_a_special_file_that_is_no_image_is_passed_over(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    make_special(folder / "a" / "pipe", "FIFO")
    assert len(load(folder).labels) == 12


def test_class_folders_may_be_links(tmp_path):
    real = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    linked = tmp_path / "linked"
    (linked / "b").mkdir(parents=True)
    (linked / "a").symlink_to(real / "a")
    for path in (real / "b").iterdir():
        (linked / "b" / path.name).symlink_to(path)
    for read in (load, find):
        expected, found = read(real), read(linked)
        assert found.example_ids == expected.example_ids
        assert found.class_names == expected.class_names
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.labels, expected.labels)


@pytest.mark.parametrize("read", [load, find])
def test_a_link_to_a_folder_that_it_lies_in_is_named(tmp_path, read):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    (folder / "a" / "again").symlink_to(folder)
    with pytest.raises(UserError, match=r"a/again is a link to .*images, where it lies itself"):
        read(folder)


@pytest.mark.parametrize("read", [load, find])
def test_links_that_multiply_are_named(tmp_path, read):
    """Two links on each of 40 levels would be 2 ** 40 folders."""
    for level in range(40):
        (tmp_path / f"{level}").mkdir()
        for name in "ab":
            (tmp_path / f"{level}" / name).symlink_to(tmp_path / f"{level + 1}")
    make_folder(tmp_path / "40", {"a": 6, "b": 6})
    with pytest.raises(UserError, match=r"b is a link to .*, which another link leads to as well"):
        read(tmp_path / "0")


@pytest.mark.parametrize("name", ["a/gone.png", "gone"])
@pytest.mark.parametrize("read", [load, find])
def test_a_link_to_nowhere_is_named(tmp_path, read, name):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    (folder / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=rf"images/{name} cannot be read \(No such file or directory\)"):
        read(folder)


def zip_of_two(path, content=b"x", method=zipfile.ZIP_DEFLATED):
    """A zip of a/0.png and b/0.png."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in ("a/0.png", "b/0.png"):
            archive.writestr(name, content)
    return path


def rewrite(path, offset, layout, *values):
    """Overwrites fields of the zip's first entry in its directory."""
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, content.find(b"PK\x01\x02") + offset, *values)
    path.write_bytes(content)
    return path


FLAGS, METHOD, SIZE, VERSION = 8, 10, 24, 6
HOSTILE_ZIPS = {
    "encrypted": ((FLAGS, "<H", 1), r"a/0.png is encrypted"),
    "strongly encrypted": ((FLAGS, "<H", 0x41), r"a/0.png is encrypted"),
    "unknown method": ((METHOD, "<H", 77), r"a/0.png is compressed by method 77; allowed: stored or deflated"),
    "bzip2": ((METHOD, "<H", 12), r"a/0.png is compressed by method 12; allowed: stored or deflated"),
    "larger than it is": ((SIZE, "<L", 2**20), "a/0.png: damaged image"),
    "smaller than it is": ((SIZE, "<L", 3), "a/0.png: damaged image"),
    "huge": ((SIZE, "<L", 2**32 - 2), r"a/0.png: 4,294,967,294 bytes; allowed"),
    "later version": ((VERSION, "<H", 990), "is not a readable zip file"),
}


@pytest.mark.parametrize("name", HOSTILE_ZIPS)
@pytest.mark.parametrize("read", [load, find])
def test_hostile_zips_are_named(tmp_path, read, name):
    field, message = HOSTILE_ZIPS[name]
    path = rewrite(zip_of_two(tmp_path / "set.zip", b"long enough"), *field)
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert len(str(error.value).splitlines()) == 1
    assert read is load or "dataset.path" not in str(error.value)


def test_an_unreadable_name_in_a_zip_is_no_traceback(tmp_path):
    path = rewrite(zip_of_two(tmp_path / "set.zip"), FLAGS, "<H", 0x800)  # names are UTF-8
    path.write_bytes(path.read_bytes().replace(b"a/0.png", b"a/\xff.png"))
    with pytest.raises(UserError, match="is not a readable zip file"):
        load(path)


@pytest.mark.parametrize("name", [b"a\nb.png", b"\xff.png", b"\x1b[2J.png"])
@pytest.mark.parametrize("read", [load, find])
def test_names_that_no_terminal_shows_are_refused(tmp_path, read, name):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    shutil.copy(folder / "a" / "a_0.png", os.fsencode(folder / "a") + b"/" + name)
    with pytest.raises(UserError, match=r"unsafe name 'a/.*\\") as error:
        read(folder)
    assert str(error.value).isprintable()


def test_a_home_that_is_nobodys_is_named():
    with pytest.raises(BadSetting, match=r"batch.trace: ~nobody_at_all/x.csv: there is no home folder"):
        traces.digest("~nobody_at_all/x.csv")


@pytest.mark.parametrize("method", untrusted.METHODS)
def test_an_entry_is_read_as_zipfile_reads_it(tmp_path, method):
    path, long_name = tmp_path / "x.zip", "x" * 999
    contents = {"a/0": b"", "a/1": b"abc" * 1000, "ä/2": bytes(range(256)) * 9, long_name: b"x"}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    path.write_bytes(b"something before the zip" + path.read_bytes())
    entries = untrusted.list_zip(path, "dataset.path")
    with untrusted.ZipReader(path, "dataset.path") as reader:
        assert [reader.read(entry) for entry in entries] == list(contents.values())
        assert [reader._read_plain(entry) for entry in entries[1:]] == list(contents.values())[1:]
        damaged = entries[2]
        damaged.CRC ^= 1
        assert reader._read_plain(damaged) is None
        with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
            reader.read(damaged)
