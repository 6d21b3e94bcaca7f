"""The on-disk format: the same whatever the workers and interruptions, opened from its index, and checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from graph_files import graph_data, prepared_sources, two_sources, write_set
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data import prepare_structures
from phalanx.families.materials.data.array_files import map_arrays, write_arrays
from phalanx.families.materials.data.graph_shards import SPLITS, PreparedSource, open_prepared, read_manifest
from phalanx.families.materials.data.neighbours import find_edges
from phalanx.families.materials.data.prepare_structures import Job, Piece, prepare_graphs


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".prepare.lock"
    }


def test_every_structure_is_in_one_split_with_its_own_values(tmp_path: Path) -> None:
    data = prepared_sources(tmp_path)
    made = dict(np.load(tmp_path / "crystals.npz"))
    seen: list[int] = []
    for split in SPLITS:
        source = open_prepared(data, split)[1]
        items = np.arange(len(source))
        atoms, edges = source.sizes(items)
        for item, (shard, row) in enumerate(zip(*source.locate(items), strict=True)):
            arrays = source.shard(int(shard))
            number = int(arrays["origin"][row, 1])
            seen.append(number)
            assert source.name(item) == f"{tmp_path}/crystals.npz: structure {number}"
            part = slice(made["ptr"][number], made["ptr"][number + 1])
            nodes = slice(*arrays["node_starts"][row : row + 2])
            pairs = slice(*arrays["edge_starts"][row : row + 2])
            positions = made["pos"][part].astype("f4")
            expected = find_edges(positions, made["cell"][number].astype("f4"), (True, True, True), data.cutoff)
            assert (atoms[item], edges[item]) == (len(positions), len(expected))
            assert np.array_equal(arrays["species"][nodes], made["z"][part])
            assert np.array_equal(arrays["positions"][nodes], positions)
            assert np.array_equal(arrays["source"][pairs], expected.source)
            assert np.array_equal(arrays["target"][pairs], expected.target)
            assert np.array_equal(arrays["images"][pairs], expected.images)
            assert arrays["energy"][row] == pytest.approx(made["energy"][number] * 0.043364104241801, rel=1e-12)
            assert np.allclose(arrays["forces"][nodes], made["forces"][part] * 0.043364104241801, atol=1e-6)
    assert sorted(seen) == list(range(30))


def test_workers_and_interruptions_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = prepared_sources(tmp_path)
    expected = contents(tmp_path / "prepared")
    assert len([name for name in expected if "shard" in name]) == 4 + 2
    shutil.rmtree(tmp_path / "prepared")
    real, done = prepare_structures.make_piece, []

    def make_two(piece: Piece, job: Job) -> None:
        if len(done) == 2:
            half.write_bytes(b"half")
            raise KeyboardInterrupt
        done.append(piece)
        real(piece, job)

    work = tmp_path / "prepared/molecules/.work"
    half = work / ".writing-shard-00002.safetensors.1"
    with monkeypatch.context() as patch:
        patch.setattr(prepare_structures, "make_piece", make_two)
        with pytest.raises(KeyboardInterrupt):
            prepare_graphs(data, workers=1, piece_structures=16)
    assert not half.exists()
    # A process that is killed clears nothing.
    half.write_bytes(b"half")
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("shard-*")}
    assert len(kept) == 2
    prepare_graphs(data, workers=2, piece_structures=16)
    assert contents(tmp_path / "prepared") == expected
    assert {name: (tmp_path / "prepared/molecules" / name).stat().st_mtime_ns for name in kept} == kept


def test_what_was_moved_before_a_crash_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = two_sources(tmp_path)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_structures.Manifest, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare_graphs(data, workers=1, piece_structures=16)
    with pytest.raises(
        DataError, match=r"molecules/manifest\.json: No such file or directory; prepare the source first"
    ):
        open_prepared(data, "train")
    moved = [path.name for path in (tmp_path / "prepared/molecules").glob("shard-*")]
    assert len(moved) == 4
    real, made = prepare_structures.make_piece, []

    def count(piece: Piece, job: Job) -> None:
        made.append(job.source.name)
        real(piece, job)

    monkeypatch.setattr(prepare_structures, "make_piece", count)
    prepare_graphs(data, workers=1, piece_structures=16)
    assert made == ["crystals", "crystals"]
    assert len(open_prepared(data, "train")[0]) > 0


def test_prepared_again_it_returns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = prepared_sources(tmp_path)
    monkeypatch.setattr(prepare_structures, "make_pieces", None)
    manifests = prepare_graphs(data, workers=1, piece_structures=16)
    assert manifests["molecules"] == read_manifest(tmp_path / "prepared/molecules")


def test_other_settings_and_other_files_are_told_apart(tmp_path: Path) -> None:
    data = prepared_sources(tmp_path)
    changed = GraphData.model_validate(data.model_dump() | {"cutoff": 3.5})
    for use in (lambda: open_prepared(changed, "train"), lambda: prepare_graphs(changed, workers=1)):
        with pytest.raises(
            DataError, match=r"was prepared with cutoff=3\.0, source molecules now asks for 3\.5; choose"
        ):
            use()
    write_set(tmp_path / "molecules.npz", 60, seed=7)
    with pytest.raises(DataError, match="molecules was prepared from other files; delete it or choose another"):
        prepare_graphs(data, workers=1, piece_structures=16)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    data = two_sources(tmp_path)
    (tmp_path / "prepared/molecules").mkdir(parents=True)
    (tmp_path / "prepared/molecules/notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds other files \(notes\.txt\); choose another data\.prepared"):
        prepare_graphs(data, workers=1)
    assert (tmp_path / "prepared/molecules/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["index.safetensors", "shard-00001.safetensors"])
def test_a_truncated_or_altered_file_is_named(name: str, tmp_path: Path) -> None:
    data = prepared_sources(tmp_path)
    path = tmp_path / "prepared/molecules" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    source = PreparedSource(path.parent, "train")
    with pytest.raises(DataError, match=rf"{name}: sha256 .* found, .* expected; the file was altered"):
        source.verify()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=rf"{name}: \d+ bytes found, \d+ expected; the file is truncated or altered"):
        open_prepared(data, "train")


def test_a_shard_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    prepared_sources(tmp_path)
    source = PreparedSource(tmp_path / "prepared/molecules", "train")
    path = source.path / source.manifest.shards[0].data.name
    source.shard(0)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=rf"{path.name}: 200 bytes found, \d+ expected; the file was cut short"):
        source.shard(0)


def test_a_group_stays_together_across_sources(tmp_path: Path) -> None:
    write_set(tmp_path / "a.npz", 90)
    write_set(tmp_path / "b.npz", 90, seed=5)
    sources = [{"name": name, "path": str(tmp_path / f"{name}.npz"), "group_by": "family"} for name in "ab"]
    data = graph_data(tmp_path / "prepared", sources, validation_fraction=0.2, test_fraction=0.2)
    manifests = prepare_graphs(data, workers=1)
    where: dict[int, set[str]] = {}
    for split in SPLITS:
        for source in open_prepared(data, split):
            shard, row = source.locate(np.arange(len(source)))
            assert (shard == 0).all()
            for number in source.shard(0)["origin"][row, 1].tolist():
                where.setdefault(number // 3, set()).add(split)
    assert len(where) == 30 and all(len(splits) == 1 for splits in where.values())
    counts = manifests["a"].splits
    assert all(counts[split].structures % 3 == 0 and counts[split].structures > 0 for split in SPLITS)


def test_statistics_are_those_of_the_training_split(tmp_path: Path) -> None:
    made = write_set(tmp_path / "a.npz", 200)
    per_element = {6: -1030.0, 7: -1480.0, 8: -2040.0}
    graph = np.repeat(np.arange(200), np.diff(made["ptr"]))
    exact = np.bincount(graph, weights=[per_element[z] for z in made["z"].tolist()])
    noise = np.random.default_rng(3).normal(0.0, 0.01, 200) * np.diff(made["ptr"])
    energy = exact + noise
    write_set(tmp_path / "a.npz", 200, energy=energy)
    source = {"name": "a", "path": str(tmp_path / "a.npz"), "labels": {"energy": "eV", "forces": "eV/A"}}
    data = graph_data(tmp_path / "prepared", [source])
    found = prepare_graphs(data, workers=1, piece_structures=64)["a"].statistics
    train = open_prepared(data, "train")[0]
    shard, row = train.locate(np.arange(len(train)))
    numbers = np.array([train.shard(s)["origin"][r, 1] for s, r in zip(shard.tolist(), row.tolist(), strict=True)])
    mine = np.isin(graph, numbers)
    assert found.elements == {z: int((made["z"][mine] == z).sum()) for z in (6, 7, 8)}
    assert found.labels["energy"].mean == pytest.approx(energy[numbers].mean())
    assert found.labels["energy"].std == pytest.approx(energy[numbers].std())
    assert found.labels["forces"].std == pytest.approx(made["forces"][mine].std(), rel=1e-5)
    assert found.labels["forces"].numbers == 3 * mine.sum()
    assert found.reference_energies == pytest.approx(per_element, abs=0.05)
    assert found.residual_std == pytest.approx(0.01, rel=0.2)
    assert sum(found.degrees) == mine.sum()
    assert (
        sum(degree * count for degree, count in enumerate(found.degrees)) == train.sizes(np.arange(len(train)))[1].sum()
    )
    assert found.largest_atoms == np.diff(made["ptr"]).max()


def test_rounding_is_no_scale_of_energies(tmp_path: Path) -> None:
    """A single composition is met exactly by reference energies: nothing is left to take a unit from."""
    molecule = {"ptr": np.array([0, 7]), "z": np.array([6, 6, 7, 8, 8, 8, 8]), "energy": np.array([-12345.6])}
    write_set(tmp_path / "a.npz", 1, **molecule, pos=np.arange(7.0)[:, None] * [1.4, 0.0, 0.0])
    source = {"name": "a", "path": str(tmp_path / "a.npz"), "labels": {"energy": "eV"}}
    data = graph_data(tmp_path / "prepared", [source], validation_fraction=0.0, test_fraction=0.0)
    found = prepare_graphs(data, workers=1)["a"].statistics
    assert found.residual_std == 0.0
    assert sum(found.reference_energies[z] for z in molecule["z"].tolist()) == pytest.approx(-12345.6)


def test_arrays_keep_their_formats_and_are_read_without_pickle(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "b": np.empty((0, 3)),
        "c": np.array([-1], dtype=np.int8),
    }
    write_arrays(tmp_path / "x", arrays)
    found = map_arrays(tmp_path / "x")
    assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
        name: (array.dtype, array.shape) for name, array in arrays.items()
    }
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    with pytest.raises(ValueError, match="read-only"):
        found["a"][0, 0] = 1


def test_a_header_that_promises_more_than_there_is_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F64", "shape": [4], "data_offsets": [0, 32]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(DataError, match="an array should lie at bytes 0 to 32 of 8"):
        map_arrays(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xff" * 9)
    with pytest.raises(DataError, match="the header is longer than the file"):
        map_arrays(tmp_path / "x")


def test_a_wrong_unit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    data = graph_data(tmp_path / "prepared", [{"name": "a", "path": "nowhere.npz", "labels": {"energy": "volt"}}])
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.labels\.energy"):
        prepare_graphs(data)
