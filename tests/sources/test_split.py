"""Which examples are for training, validation and test: published, listed in a file, or split by us."""

import numpy as np
import pytest

from largebatch.sources.split import assign_splits, read_split_file, split_indices
from largebatch.util import BadSetting, UserError

CLASS_NAMES = ["cat", "dog"]


def examples(**counts: int):
    """Ids, labels and splits of so many images of each split, in a random order."""
    names = [(split, i % 2, i) for split, count in counts.items() for i in range(count)]
    order = np.random.default_rng(0).permutation(len(names))
    names = [names[i] for i in order]
    ids = [f"{split}/{CLASS_NAMES[label]}/{i:04d}.png" for split, label, i in names]
    return ids, np.array([label for _, label, _ in names]), [split for split, _, _ in names]


def members(ids, splits) -> dict[str, list[str]]:
    return {split: [ids[row] for row in rows] for split, rows in splits.items()}


def published_members(ids, published, split) -> list[str]:
    return sorted(name for name, of in zip(ids, published, strict=True) if of == split)


def test_published_splits_are_kept_and_sorted_by_id():
    ids, labels, published = examples(train=20, val=6, test=8)
    found = members(ids, assign_splits(ids, labels, CLASS_NAMES, published=published, seed=3))
    assert found == {split: published_members(ids, published, split) for split in ("train", "val", "test")}


@pytest.mark.parametrize(("there", "cut"), [("test", "val"), ("val", "test")])
def test_what_is_missing_is_a_tenth_of_train(there, cut):
    ids, labels, published = examples(train=57, **{there: 8})

    def split(seed, ids=ids, labels=labels, published=published):
        return members(ids, assign_splits(ids, labels, CLASS_NAMES, published=published, seed=seed))

    found = split(0)
    assert {name: len(part) for name, part in found.items()} == {"train": 52, cut: 5, there: 8}
    assert found[there] == published_members(ids, published, there)
    assert sorted(found["train"] + found[cut]) == published_members(ids, published, "train")
    assert all(part == sorted(part) for part in found.values())
    # The seeded permutation of the training images sorted by id, whose last tenth is cut.
    train = published_members(ids, published, "train")
    expected = np.random.default_rng(0).permutation(57)[-5:]
    assert found[cut] == sorted(train[i] for i in expected)
    assert split(1)[cut] != found[cut]
    again = np.random.default_rng(1).permutation(len(ids))
    assert found == split(0, [ids[i] for i in again], labels[again], [published[i] for i in again])


def test_own_ignores_published_splits_and_auto_needs_none():
    ids, labels, published = examples(train=40, test=20)
    own = split_indices(ids, 5)
    for options in ({"published": published, "choice": "own"}, {"published": None, "choice": "auto"}):
        splits = assign_splits(ids, labels, CLASS_NAMES, seed=5, **options)
        for name, rows in own.items():
            np.testing.assert_array_equal(splits[name], rows)
    assert any(ids[row].startswith("test/") for row in own["train"])


def test_a_split_file_goes_before_published_splits(tmp_path):
    ids, labels, published = examples(train=4, test=6)
    path = tmp_path / "split.csv"
    rows = [f"{name},{['train', 'train', 'val', 'test'][i % 4]}" for i, name in enumerate(sorted(ids))]
    path.write_text("\n".join(["id,split", *rows]))
    listed = read_split_file(str(path))
    for choice in ("auto", "published"):
        splits = assign_splits(ids, labels, CLASS_NAMES, published=published, choice=choice, split_file=listed)
        by_id = sorted(ids)
        assert members(ids, splits) == {
            "train": [by_id[i] for i in (0, 1, 4, 5, 8, 9)],
            "val": [by_id[2], by_id[6]],
            "test": [by_id[3], by_id[7]],
        }


def test_published_refuses_a_set_without_splits():
    ids, labels, _ = examples(train=20)
    with pytest.raises(BadSetting) as error:
        assign_splits(ids, labels, CLASS_NAMES, choice="published")
    assert str(error.value) == (
        "dataset.splits: 'published', but this data set has no splits of its own; allowed: auto | own, or give "
        "them by dataset.split_file"
    )


def test_an_id_twice_is_refused():
    ids, labels, published = examples(train=12, test=4)
    message = r"two images have the id '{}', in {} and in {}; allowed: each id once"
    with pytest.raises(UserError, match=message.format(ids[0], published[0], published[0])):
        assign_splits([*ids, ids[0]], [*labels, 0], CLASS_NAMES, published=[*published, published[0]])
    other = "test" if published[0] == "train" else "train"
    with pytest.raises(UserError, match=message.format(ids[0], published[0], other)):
        assign_splits([*ids, ids[0]], [*labels, 0], CLASS_NAMES, published=[*published, other])
    with pytest.raises(UserError, match=r"two images have the id '\S+'; allowed"):
        assign_splits([*ids, ids[0]], [*labels, 0], CLASS_NAMES)


def test_too_few_training_images_to_cut_from_are_refused():
    ids, labels, published = examples(train=9, test=4)
    with pytest.raises(UserError, match="dataset: 9 training images; allowed: at least 10, to cut val from"):
        assign_splits(ids, labels, CLASS_NAMES, published=published)


def test_a_class_without_training_images_is_refused():
    ids, labels, published = examples(train=12, val=4, test=4)
    labels = np.array(
        [2 if split != "train" and label else label for label, split in zip(labels, published, strict=True)]
    )
    with pytest.raises(UserError) as error:
        assign_splits(ids, labels, [*CLASS_NAMES, "newt"], published=published)
    assert str(error.value) == "dataset: no training image is left for class newt; add images or change the split"


def test_a_class_that_is_not_measured_is_told_in_one_line(caplog):
    ids, labels, published = examples(train=12, val=4, test=4)
    labels = np.array([0 if split == "val" else label for label, split in zip(labels, published, strict=True)])
    labels[[i for i, split in enumerate(published) if split == "test"]] = 1
    with caplog.at_level("WARNING", "largebatch"):
        assign_splits(ids, labels, CLASS_NAMES, published=published)
    assert caplog.messages == ["dataset: no validation image of class dog; no test image of class cat"]
    caplog.clear()
    ids, labels, published = examples(train=12, val=4, test=4)
    assign_splits(ids, labels, CLASS_NAMES, published=published)
    assert caplog.messages == []
