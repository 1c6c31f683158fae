"""Files that appear whole or not at all, whoever else writes the same one at the same time."""

import contextlib
import os
import pathlib

import pytest
from etils import epath

from largebatch import util
from largebatch.util import UserError

HEX = "0123456789abcdef" * 2


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


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../up"])
def test_examples_whose_names_lead_outside_are_refused(name, tmp_path):
    assert util.path_within(tmp_path, "a/1.png", "--out") == tmp_path / "a" / "1.png"
    with pytest.raises(UserError, match=r"^--out: the example .* would lie outside; allowed: relative names$"):
        util.path_within(tmp_path, name, "--out")
