"""What plans keep for later plans: found again as it was, or computed; never wrong, never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layout_runs import run_with
from phalanx.cost import shelf as module
from phalanx.cost.family import Setting
from phalanx.cost.parts import _needed, _trace_now
from phalanx.cost.second_process import SharedMemo
from phalanx.cost.shelf import Shelf, open_shelf, shelf

KEYS = [("a", 1), ("b", 2)]
RESULTS = {key: [key[0] * key[1], key] for key in KEYS}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "traces-now"


def test_another_process_finds_what_was_kept(place: Path) -> None:
    assert Shelf(place).find(KEYS) == {}
    Shelf(place).keep(RESULTS)
    assert Shelf(place).find([*KEYS, ("c", 3)]) == RESULTS
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_as_good_as_none(place: Path, damage: str) -> None:
    Shelf(place).keep(RESULTS)
    for file in place.iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes({"cut": content[:-9], "changed": content, "empty": b""}[damage])
    assert Shelf(place).find(KEYS) == {}
    Shelf(place).keep(RESULTS)
    assert Shelf(place).find(KEYS) == RESULTS


def test_nothing_is_read_where_others_may_write(place: Path) -> None:
    Shelf(place).keep(RESULTS)
    place.chmod(0o777)
    assert Shelf(place).find(KEYS) == {}
    place.chmod(0o700)
    assert Shelf(place).find(KEYS) == RESULTS


def test_no_room_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = Shelf(tmp_path / "file" / "traces-now")
    kept.keep(RESULTS)
    assert kept.find(KEYS) == {}


def test_results_of_older_code_and_too_many_go(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, other = place.with_name("traces-before"), place.with_name("attention.json")
    older.mkdir()
    (older / "result").touch()
    other.touch()
    monkeypatch.setattr(module, "MOST", 4)
    for number in range(4):
        Shelf(place).keep({number: number})
        (file,) = [file for file in place.iterdir() if file.stat().st_mtime > 100]
        os.utime(file, (number, number))
    assert not older.exists() and other.exists()
    Shelf(place).keep({4: 4})
    assert Shelf(place).find(range(5)) == {2: 2, 3: 3, 4: 4}


def test_a_memo_computes_what_no_open_shelf_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []

    def square(task: int) -> int:
        calls.append(task)
        return task * task

    def memo() -> SharedMemo[int, int]:
        return SharedMemo(square, lambda task: None, lambda task, first: 1)

    assert open_shelf() is None and memo()(3) == 9 and not (tmp_path / "phalanx").exists()
    with shelf():
        assert memo()(3) == 9 and memo()(3) == 9
        assert calls == [3, 3]
    assert memo()(3) == 9 and calls == [3, 3, 3]


@pytest.mark.parametrize("streamed", [1, 4])
def test_traces_come_back_as_they_were(place: Path, streamed: int) -> None:
    trace = _needed("block", Setting(run_with({}).model, 64, tp=2, compile=streamed == 1, streamed=streamed), 1)
    fresh = _trace_now(trace)
    Shelf(place).keep({trace: fresh})
    (found,) = Shelf(place).find([trace]).values()
    assert found is not fresh and found == fresh
