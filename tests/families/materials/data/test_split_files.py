"""Splits that files give: structures go where they are listed, others stay out, and lists that cannot be are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_files import graph_data, write_set
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_shards import SPLITS, open_prepared, read_manifest, settings_of
from phalanx.families.materials.data.prepare_structures import prepare_graphs

TRAIN, VALIDATION, TEST = [25, 0, 7, 3, 28], [29, 12], [1, 11, 2]


def listed_data(folder: Path, lists: dict[str, str], **changes: Any) -> GraphData:
    """Two files of 10 and 20 structures, and lists of these by the split and ending that name a file."""
    write_set(folder / "part-a.npz", 10)
    write_set(folder / "part-b.npz", 20, seed=1)
    for name, text in lists.items():
        (folder / name).write_text(text)
    split = {name.partition(".")[0]: str(folder / name) for name in lists}
    source = {"name": "a", "path": str(folder / "part-*.npz"), "labels": {"energy": "eV"}, "split": split, **changes}
    return graph_data(folder / "prepared", [source])


def text_of(numbers: list[int]) -> str:
    return "".join(f"{number}\n" for number in numbers)


def test_structures_go_where_they_are_listed(tmp_path: Path) -> None:
    lists = {
        "train.csv": text_of(TRAIN),
        "validation.json": json.dumps(VALIDATION),
        "test.txt": "".join(f"{number:.18e}\n" for number in TEST),
    }
    data = listed_data(tmp_path, lists)
    # Left out, a structure need not even be sound.
    broken = np.load(tmp_path / "part-a.npz")["energy"]
    broken[5] = np.inf
    write_set(tmp_path / "part-a.npz", 10, energy=broken)
    manifest = prepare_graphs(data, workers=1, piece_structures=4)["a"]
    assert manifest.left_out == 20 and manifest.totals.structures == 10
    # Of eight pieces three have no structure that is listed: from 8, 14 and 18 on.
    assert len(manifest.shards) == 5
    energies = np.concatenate([np.load(tmp_path / f"part-{part}.npz")["energy"] for part in "ab"])
    for split, numbers in zip(SPLITS, (TRAIN, VALIDATION, TEST), strict=True):
        (source,) = open_prepared(data, split)
        places = zip(*source.locate(np.arange(len(source))), strict=True)
        found = [float(source.shard(int(shard))["energy"][row]) for shard, row in places]
        assert found == energies[sorted(numbers)].tolist()
    assert manifest.statistics.labels["energy"].numbers == len(TRAIN)


def test_train_alone_holds_nothing_out(tmp_path: Path) -> None:
    manifest = prepare_graphs(listed_data(tmp_path, {"train.txt": text_of(TRAIN)}), workers=1)["a"]
    assert [manifest.splits[split].structures for split in SPLITS] == [len(TRAIN), 0, 0]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"train": "0 1 30"}, r"train: it lists structure 30, and the source has 0 to 29"),
        ({"train": "0 -1"}, r"train: it lists structure -1, and the source has 0 to 29"),
        ({"train": "0 1 0"}, r"train: it lists structure 0 twice"),
        ({"train": "0 1 2", "test": "[4, 2, 1]"}, r"test: it lists structure 1, as .*train does \(2 in both\)"),
        ({"train": "0 1.5"}, r"train: it lists 1\.5, which is no whole number"),
        ({"train": "0 nan"}, r"train: it lists nan, which is no whole number"),
        ({"train": "index\n0\n"}, r"train: it is no list of whole numbers .*index"),
        ({"train": "", "test": "1"}, r"train: it lists no structure, so there is nothing to train on"),
    ],
)
def test_lists_that_cannot_be_are_refused(tmp_path: Path, lists: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_graphs(listed_data(tmp_path, lists), workers=1)


def test_lists_that_part_a_group_are_refused(tmp_path: Path) -> None:
    # Families of three: 0 to 2, 3 to 5, ... in both files.
    whole = {"train": "0 1 2 10 11 12", "test": "[3, 4, 13]"}
    assert prepare_graphs(listed_data(tmp_path, whole, group_by="family"), workers=1)["a"].left_out == 21
    (tmp_path / "parted").mkdir()
    parted = listed_data(tmp_path / "parted", {"train": "0 1 2 3", "test": "14 6 12"}, group_by="family")
    with pytest.raises(DataError, match=r"train and .*test part structures of the same family \(2 of 3 groups\)"):
        prepare_graphs(parted, workers=1, piece_structures=5)


def test_other_lists_are_another_preparation(tmp_path: Path) -> None:
    data = listed_data(tmp_path, {"train": "0 1 2", "test": "3"})
    prepare_graphs(data, workers=1)
    listed_data(tmp_path, {"train": "0 1 4", "test": "3"})
    with pytest.raises(DataError, match="was prepared from other files"):
        prepare_graphs(data, workers=1)
    drawn = listed_data(tmp_path, {}, split=None)
    with pytest.raises(DataError, match=r"was prepared with split=.*, source a now asks for null"):
        open_prepared(drawn, "train")
    # Folders that were prepared before there were lists say nothing of them.
    assert "split" not in settings_of(drawn.sources[0], drawn)
    assert read_manifest(tmp_path / "prepared/a").settings["split"]["test"] == str(tmp_path / "test")
    (tmp_path / "train").unlink()
    with pytest.raises(DataError, match=r"train: no such file; split of a source names files"):
        prepare_graphs(data, workers=1)
