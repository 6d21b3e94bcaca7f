"""A prepared folder is whole or absent: interrupted preparations go on, other data are never touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.data.prepared_folder import (
    MANIFEST,
    FileRecord,
    FolderManifest,
    check_content,
    check_size,
    check_still_whole,
    file_record,
    prepare_once,
    read_checked,
)
from phalanx.errors import DataError
from phalanx.files import TEMPORARY


class Listing(FolderManifest):
    """A manifest of two files."""

    plan: str
    files: list[FileRecord]


def read_listing(folder: Path) -> Listing:
    return read_checked(folder / MANIFEST, Listing, missing="prepare it", malformed="prepare it again")


def build_with(text: str, made: list[str], fail: bool = False) -> Callable[[Path], tuple[Listing, list[Path]]]:
    """Return a builder of two files that keeps what is there, notes in `made` what it wrote, and may fail between them."""

    def build(work: Path) -> tuple[Listing, list[Path]]:
        files = [work / "part-0.bin", work / "part-1.bin"]
        for number, file in enumerate(files):
            if not file.exists():
                (work / f"{TEMPORARY}half").write_text("half a file")
                file.write_text(f"{text} {number}")
                made.append(file.name)
            if fail:
                raise KeyboardInterrupt
        return Listing(plan=text, files=[file_record(file) for file in files]), files

    return build


def prepare(out: Path, text: str, made: list[str], *, fail: bool = False) -> Listing:
    return prepare_once(
        out,
        text,
        read=read_listing,
        build=build_with(text, made, fail),
        results=("part-*.bin",),
        option="--out",
        otherwise="holds other things",
        again="try again",
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_prepared_once_and_holds_its_files_alone(tmp_path: Path) -> None:
    made: list[str] = []
    out = tmp_path / "new" / "out"
    first = prepare(out, "text", made)
    assert names(out) == [MANIFEST, "part-0.bin", "part-1.bin"]
    assert prepare(out, "text", made) == first == read_listing(out)
    assert made == ["part-0.bin", "part-1.bin"], "the second call does nothing"
    for record in first.files:
        check_content(out, record)


def test_an_interrupted_preparation_goes_on_with_what_is_done(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", "text", made, fail=True)
    assert names(tmp_path / "out") == [".work"], "nothing half done is among the results, and the lock is gone"
    assert names(tmp_path / "out" / ".work") == ["part-0.bin", "plan"], "what was half written is cleared"
    prepare(tmp_path / "out", "text", made)
    assert made == ["part-0.bin", "part-1.bin"]


def test_a_call_stopped_while_it_moved_results_goes_on(tmp_path: Path) -> None:
    made: list[str] = []
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(out, "text", made, fail=True)
    (out / ".work" / "part-0.bin").replace(out / "part-0.bin")
    prepare(out, "text", made)
    assert made == ["part-0.bin", "part-1.bin"]
    assert names(out) == [MANIFEST, "part-0.bin", "part-1.bin"]


def test_what_another_plan_left_is_cleared(tmp_path: Path) -> None:
    made: list[str] = []
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(out, "old", made, fail=True)
    (out / ".work" / "part-0.bin").replace(out / "part-0.bin")
    prepare(out, "new", made)
    assert [(out / name).read_text() for name in ("part-0.bin", "part-1.bin")] == ["new 0", "new 1"]


def test_finished_data_of_another_plan_are_refused(tmp_path: Path) -> None:
    prepare(tmp_path, "old", [])
    with pytest.raises(DataError, match=f"^{tmp_path} holds other things; delete it or choose another --out$"):
        prepare(tmp_path, "new", [])
    assert read_listing(tmp_path).plan == "old"


def test_folders_and_files_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "part-0.bin").write_text("mine")
    with pytest.raises(
        DataError, match=r"holds other files \(part-0\.bin\); choose another --out, or an empty folder$"
    ):
        prepare(tmp_path, "text", [])
    assert (tmp_path / "part-0.bin").read_text() == "mine"
    with pytest.raises(DataError, match=r"part-0\.bin is a file; choose another --out$"):
        prepare(tmp_path / "part-0.bin", "text", [])


def test_a_disk_that_refuses_is_told_with_what_to_do(tmp_path: Path) -> None:
    def full(work: Path) -> tuple[Listing, list[Path]]:
        raise OSError(28, "No space left on device", str(work / "part-0.bin"))

    wanted = (
        r"part-0\.bin: No space left on device; make room and try again, which goes on with what is done, or choose"
    )
    with pytest.raises(DataError, match=wanted):
        prepare_once(
            tmp_path / "out",
            "text",
            read=read_listing,
            build=full,
            results=(),
            option="--out",
            otherwise="holds other things",
            again="try again",
        )


def test_altered_files_are_named(tmp_path: Path) -> None:
    listing = prepare(tmp_path, "text", [])
    path = tmp_path / "part-1.bin"
    path.write_text("TEXT 1")
    with pytest.raises(DataError, match=r"part-1\.bin: sha256 .* found, .* expected; the file was altered"):
        check_content(tmp_path, listing.files[1])
    path.write_text("text")
    with pytest.raises(DataError, match=r"part-1\.bin: 4 bytes found, 6 expected; the file is truncated or altered"):
        check_size(tmp_path, listing.files[1])
    with pytest.raises(
        DataError, match=r"part-1\.bin: 4 bytes found, 6 expected; the file was cut short while it was read"
    ):
        check_still_whole(path, 6)
    path.unlink()
    with pytest.raises(DataError, match=r"part-1\.bin: No such file or directory; the manifest lists it with 6 bytes"):
        check_size(tmp_path, listing.files[1])


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json: No such file or directory; prepare it$"):
        read_listing(tmp_path)
    (tmp_path / MANIFEST).write_text('{"plan": "text", "files": [{"name": "../x", "bytes": 1, "sha256": "0"}]}')
    with pytest.raises(DataError, match=r"manifest\.json: files\.0\.name: .*; prepare it again$"):
        read_listing(tmp_path)
