"""Splits that a file lists. Expected indices are counted by hand."""

import os

import pytest

from largebatch import untrusted
from largebatch.sources.split import read_split_file
from largebatch.util import BadSetting

IDS = ["cat/1.tif", "cat/2.tif", "dog/1.tif", "dog/3.tif", "dog/4.tif"]


def write(path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def match(path: str, ids=IDS) -> dict[str, list[int]]:
    return read_split_file(path).match(ids)


def refusal(path: str, ids=IDS) -> str:
    with pytest.raises(BadSetting) as error:
        match(path, ids)
    return str(error.value)


# ---- one file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["id", "path", "Filename", "IMAGE"])
def test_a_row_has_an_id_and_a_split_and_other_columns_do_not_matter(tmp_path, column):
    path = write(
        tmp_path / "split.csv",
        f"label,Split,{column}",
        "9,test,dog/3.tif",
        '"a, b",Validation,"dog/1.tif"',
        "",
        "9, train ,cat/2.tif",
        "9,dev,cat/1.tif",
        "9,TRAIN,dog/4.tif",
    )
    assert match(path) == {"train": [1, 4], "val": [2, 0], "test": [3]}


def test_an_id_may_be_the_file_name_and_lack_its_suffix_or_have_another(tmp_path):
    path = write(
        tmp_path / "s.csv", "id,split", "cat/1.jpg,train", "2.tif,train", "dog/1,val", "3.jpg,test", "4,test"
    )
    assert match(path) == {"train": [0, 1], "val": [2], "test": [3, 4]}


def test_what_stands_before_a_point_is_only_left_off_if_it_is_a_suffix(tmp_path):
    ids = ["a/x.1.png", "a/x.2.png", "b/y.3.png"]
    path = write(tmp_path / "s.csv", "id,split", "x.1,train", "x.2.jpg,val", "b/y.3,test")
    assert match(path, ids) == {"train": [0], "val": [1], "test": [2]}


def test_a_name_is_taken_whole_first(tmp_path):
    ids = ["a/1.png", "a/1.tif", "b/2.png"]
    path = write(tmp_path / "s.csv", "id,split", "a/1.tif,train", "1.png,val", "2,test")
    assert match(path, ids) == {"train": [1], "val": [0], "test": [2]}


def test_images_that_are_not_named_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "s.csv", "id,split", "cat/1.tif,train", "dog/1.tif,val", "dog/3.tif,test")
    with caplog.at_level("WARNING", "largebatch"):
        assert match(path) == {"train": [0], "val": [2], "test": [3]}
    assert caplog.messages == [f"{path}: left out 2 of 5 images, which it does not name"]


GOOD = ("cat/1.tif,train", "dog/1.tif,val", "dog/3.tif,test")
BAD_FILES = {
    ", line 1: the columns cat/1.tif, train; allowed: split, and one of id, path, filename, image": GOOD,
    ", line 1: the columns id, part; allowed: split, and one of id, path, filename, image": ("id,part", *GOOD),
    ", line 5: unknown ids: 2, first 'cat/7.tif', 'emu'; allowed: those of the data set, as 'cat/1.tif'": (
        "id,split",
        *GOOD,
        "cat/7.tif,train",
        "emu,val",
    ),
    ", line 6: 'cat/1.tif' is in train, and in train by FILE, line 2; allowed: each image once": (
        "id,split",
        *GOOD,
        "",
        "cat/1.tif,train",
    ),
    ", line 5: '3.jpg' is in val, and in test by FILE, line 4; allowed: each image once": (
        "id,split",
        *GOOD,
        "3.jpg,val",
    ),
    ", line 2: '1.tif' names 2 images, as 'cat/1.tif' and 'dog/1.tif'; allowed: whole ids": (
        "id,split",
        "1.tif,train",
        *GOOD,
    ),
    ", line 3: split 'holdout'; allowed: train | val | validation | valid | dev | test": (
        "id,split",
        GOOD[0],
        "dog/1.tif,holdout",
    ),
    ", line 3: 1 values; allowed: 2, as in the header": ("id,split", GOOD[0], "dog/1.tif"),
    ", line 3: no id; allowed: one in every row": ("id,split", GOOD[0], ",val"),
    ": no train images; allowed: some in each of train, val, test": ("id,split", *GOOD[1:]),
    ": no val images; allowed: some in each of train, val, test": ("id,split", GOOD[0], GOOD[2]),
    ": no test images; allowed: some in each of train, val, test": ("id,split", *GOOD[:2]),
    " is empty; allowed: a file that lists images": ("", " "),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(tmp_path, message):
    path = write(tmp_path / "split.csv", *BAD_FILES[message])
    assert refusal(path) == f"dataset.split_file: {path}{message.replace('FILE', path)}"


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    where = f"dataset.split_file: {tmp_path}"
    assert refusal(f"{tmp_path}/none.csv") == f"{where}/none.csv cannot be read (No such file or directory)"
    (tmp_path / "folder").mkdir()
    assert refusal(f"{tmp_path}/folder") == f"{where}/folder cannot be read (a folder, no regular file)"
    os.mkfifo(tmp_path / "fifo")
    assert refusal(f"{tmp_path}/fifo") == f"{where}/fifo cannot be read (a FIFO, no regular file)"
    (tmp_path / "image.csv").write_bytes(b"\xff\xd8\xff\xe0")
    assert refusal(f"{tmp_path}/image.csv") == f"{where}/image.csv cannot be read (it is no text)"
    path = write(tmp_path / "quote.csv", "id,split", '"cat/1.tif,train')
    assert refusal(path).startswith(f"{where}/quote.csv, line 2: no CSV (")
    path = write(tmp_path / "large.csv", "id,split", *GOOD)
    monkeypatch.setattr(untrusted, "MAX_TEXT_BYTES", 20)
    assert refusal(path) == f"{where}/large.csv is too large; allowed: up to 20 bytes of text"


# ---- one file per split -----------------------------------------------------------------------------


def write_three(folder, train, val, test) -> str:
    for split, lines in (("train", train), ("val", val), ("test", test)):
        write(folder / f"eurosat-{split}.txt", *lines)
    return str(folder / "eurosat-{split}.txt")


@pytest.mark.parametrize(
    "lines",
    [
        (["2.tif", "4.tif"], ["cat/1.tif"], ["3.tif"]),
        (["2.jpg", "4.jpg"], ["cat/1.jpg"], ["3.jpg"]),  # as TorchGeo
        (["cat/2.tif,cat", "dog/4.tif,dog"], ["cat/1.tif,cat"], ["dog/3.tif,dog"]),  # as AiTLAS
        (["2.tif,image", "4.tif,image"], ["cat/1.tif,image"], ["3.tif,path"]),
        (["file,label", "2.tif,0", "4.tif,1"], ["file,label", "cat/1.tif,0"], ["file,label", "3.tif,1"]),
        ([",Filename,Label", "0,2.tif,7", "1,4.tif,8"], [",Filename", "0,cat/1.tif"], [",Filename", "0,3.tif"]),
    ],
)
def test_a_file_per_split_lists_ids_in_its_first_column_or_a_named_one(tmp_path, lines):
    assert match(write_three(tmp_path, *lines)) == {"train": [1, 4], "val": [0], "test": [3]}


def test_a_bad_line_is_that_of_its_file(tmp_path):
    path = write_three(tmp_path, ["2.tif", "4.tif"], ["cat/1.tif"], ["3.tif", "2.tif"])
    assert refusal(path) == (
        f"dataset.split_file: {tmp_path}/eurosat-test.txt, line 2: '2.tif' is in test, and in train by "
        f"{tmp_path}/eurosat-train.txt, line 1; allowed: each image once"
    )
    path = write_three(tmp_path, ["2.tif", "4.tif"], ["9.tif", "cat/1.tif"], ["3.tif"])
    assert refusal(path).startswith(
        f"dataset.split_file: {tmp_path}/eurosat-val.txt, line 1: unknown ids: 1, first '9."
    )
    path = write_three(tmp_path, ["2.tif", "emu"], ["cat/1.tif"], ["3.tif"])
    assert refusal(path).startswith(
        f"dataset.split_file: {tmp_path}/eurosat-train.txt, line 2: unknown ids: 1, first "
    )
    (tmp_path / "eurosat-val.txt").unlink()
    assert "eurosat-val.txt cannot be read (No such file" in refusal(path)


def test_the_digest_is_of_what_is_in_all_files(tmp_path):
    contents = (["2.tif", "4.tif"], ["cat/1.tif"], ["3.tif"])
    path = write_three(tmp_path, *contents)
    before = read_split_file(path).digest
    assert read_split_file(path).digest == before
    write_three(tmp_path, contents[0], contents[2], contents[1])
    assert read_split_file(path).digest != before
