"""Files that claim far more than they hold: refused by name before any room is made for it."""

from __future__ import annotations

import io
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.lib.format as npy
import pytest

from graph_files import write_set
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data import structure_files
from phalanx.families.materials.data.formats import ase_files
from phalanx.families.materials.data.structure_files import open_structures

HYDROGEN = "1\n{comment}\nH 0.0 0.0 0.0\n"


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A few hundred MB more than the process has: what makes room for what a file claims fails at once."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read_all(path: Path, **changes: Any) -> int:
    source = GraphSource.model_validate({"name": "s", "path": str(path), "labels": {"energy": "eV"}} | changes)
    opened = open_structures(path, source)
    return sum(1 for _ in opened.read(0, len(opened)))


def npy_bytes(shape: tuple[int, ...], content: bytes = b"", dtype: str = "<f8") -> bytes:
    """An array that declares `shape` and holds `content`."""
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": dtype, "fortran_order": False, "shape": shape})
    return head.getvalue() + content


def replace_member(path: Path, name: str, content: bytes) -> None:
    """Put another array into a sound file, packed."""
    sound = dict(np.load(path))
    sound.pop(name)
    np.savez(path, **sound)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{name}.npy", content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "pos",
            npy_bytes((10**15, 3)),
            r"pos.npy declares \[1000000000000000, 3\] of float64, 24,000,000,000,000,000 bytes",
        ),
        ("energy", npy_bytes((10**18, 10**18)), r"energy.npy declares \[1000000000000000000, 1000000000000000000\]"),
        ("z", npy_bytes((-5,), dtype="|u1"), r"z.npy declares \[-5\] of uint8"),
        ("z", npy_bytes((10**15,), dtype="|V0"), r"atomic numbers have shape \[1000000000000000\] of"),
        ("ptr", npy_bytes((3,), b"\0" * 24, dtype="|S8"), "ptr must rise from 0"),
        ("ptr", npy_bytes((), b"\0" * 8, dtype="<i8"), "ptr must rise from 0"),
        ("z", npy_bytes((), b"\1", dtype="|u1"), r"atomic numbers have shape \[\] of uint8"),
        ("pos", b"\x93NUMPY\x01\x00" + struct.pack("<H", 60000) + b"(" * 60000, "it cannot be read as .npz"),
        ("pos", b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{", "it cannot be read as .npz"),
        ("pos", b"", "it cannot be read as .npz"),
    ],
)
def test_an_array_that_is_not_what_it_declares_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / "set.npz"
    write_set(path, 2)
    replace_member(path, name, content)
    with pytest.raises(DataError, match=rf"^{path}: {said}"):
        read_all(path)


def test_a_file_that_unpacks_to_far_more_than_it_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "set.npz"
    write_set(path, 2)
    monkeypatch.setattr(structure_files, "_UNPACKED_BYTES", 2**20)
    replace_member(path, "energy", npy_bytes((2**20,), bytes(2**23)))
    with pytest.raises(DataError, match=rf"^{path}: [\d,]+ bytes unpack to 8,[\d,]+, more than 20 times as many; if"):
        read_all(path)
    # What nobody asks for is not unpacked.
    write_set(path, 2)
    replace_member(path, "table", npy_bytes((2**20,), bytes(2**23)))
    assert read_all(path) == 2


def test_an_array_alone_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    path.write_bytes(npy_bytes((10**15,)))
    with pytest.raises(DataError, match="it holds one array without a name"):
        read_all(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-1\n\n", r"frame 0 \(line 1\): -1 atoms are announced; a structure has one at least"),
        ("-7\n\n", "-7 atoms are announced"),
        ("0\n\n", "0 atoms are announced"),
        (f"{10**15}\n\nH 0 0 0\n", "1000000000000000 atoms are announced, 1 lines follow"),
        (f"{10**30}\n\nH 0 0 0\n", f"{10**30} atoms are announced, 1 lines follow"),
        ("9" * 5000 + "\n\n", "a number of atoms is expected"),
        ("1" * 2**20 + "\n", r"line 1 is longer than 1,048,576 characters"),
        ("1\n" + "x" * 2**21, r"line 2 is longer than 1,048,576 characters"),
        (
            HYDROGEN.format(comment="Properties=species:S:1:pos:R:3:more:R:999999"),
            r"frame 0 \(line 1\): Properties announces 1000003 columns, the line of its first atom has 4",
        ),
        (
            HYDROGEN.format(comment='Properties="species:S:1:pos:R:99999999999"'),
            "Properties has '99999999999' where a number of columns is expected",
        ),
        (HYDROGEN.format(comment="Properties=species:S:1:pos:R:-3"), "Properties has '-3' where a number"),
        (HYDROGEN.format(comment="Properties=" + "a:R:1:" * 5000), "Properties announces 5000 columns"),
    ],
)
def test_frames_that_announce_what_is_not_there_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "set.extxyz"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"^{path}: .*{said}"):
        read_all(path)


def test_a_frame_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ase_files, "_LARGEST_FRAME", 100)
    path = tmp_path / "set.extxyz"
    path.write_text(HYDROGEN.format(comment="energy=1.0") + "20\n\n" + "H 0 0 0\n" * 20)
    with pytest.raises(DataError, match=rf"^{path}: frame 1 \(line 4\): it is larger than"):
        read_all(path)


def one_line(path: Path) -> None:
    path.write_text("Elements,XYZ_Ang\n" + '"' + "1" * 2**21)


def gibberish(path: Path) -> None:
    path.write_bytes(b"Elements,XYZ_Ang\n\xff\xfe\x00")


def no_database(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\x00" + bytes(200))


@pytest.mark.parametrize(
    ("ending", "write", "said"),
    [
        ("csv", one_line, "line 2 is longer than"),
        ("csv", gibberish, "it is not UTF-8 text"),
        ("db", no_database, "it cannot be read as an ASE database"),
    ],
)
def test_tables_that_are_none_are_refused(
    tmp_path: Path, ending: str, write: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / f"set.{ending}"
    write(path)
    with pytest.raises(DataError, match=rf"^{path}: {said}"):
        read_all(path)
