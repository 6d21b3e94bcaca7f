"""Active learning: the structures that members are farthest apart about, as each member alone says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ase
import ase.io
import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from graph_files import graph_data
from phalanx.cli.main import run_command_line
from phalanx.ensemble.family import EnsembleOptions
from phalanx.ensemble.members import Share, open_member
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.ensemble import select_structures as module
from phalanx.families.materials.ensemble.build_ensemble import build_ensemble
from phalanx.families.materials.ensemble.select_structures import Selection, select_structures, write_selection
from phalanx.families.materials.evaluation.calculator import PhalanxCalculator

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ensemble_dir(member_dirs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("select") / "three"
    members = [open_member(path) for path in member_dirs]
    build_ensemble(members, EnsembleOptions(weights="equal"), CPU).document(folder).write(folder)
    return folder


def molecules(count: int) -> list[ase.Atoms]:
    """Clusters and crystals of 1 to 6 atoms that are pressed together more and more."""
    random, found = np.random.default_rng(3), []
    for number in range(count):
        atoms = 1 + number % 6
        grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms] * 1.6
        one = ase.Atoms(random.choice([1, 6, 8], atoms), grid + random.uniform(-0.3, 0.3, grid.shape))
        if number % 4 == 1:
            one.set_cell([3.5, 3.4, 3.6])
            one.pbc = True
        found.append(one)
    return found


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "pool.extxyz"
    ase.io.write(path, molecules(24), format="extxyz")
    return path


def spreads_of_members(ensemble_dir: Path, structures: list[ase.Atoms]) -> tuple[np.ndarray, np.ndarray]:
    """Of energies by atom and the largest of forces, from calculators of the members."""
    document = json.loads((ensemble_dir / "ensemble.json").read_text())
    alone = [PhalanxCalculator(ensemble_dir / one["checkpoint"], device="cpu") for one in document["members"]]
    energies, forces = [], []
    for atoms in structures:
        energies.append(np.std([one.get_potential_energy(atoms) for one in alone], ddof=1) / len(atoms))
        each = np.std([one.get_forces(atoms) for one in alone], axis=0, ddof=1)
        forces.append(np.linalg.norm(each, axis=1).max())
    return np.array(energies), np.array(forces)


@pytest.mark.parametrize("by", ["forces", "energy"])
@pytest.mark.parametrize("batch", [1, 1024])
def test_the_widest_spreads_of_members_are_chosen(
    by: Any, batch: int, ensemble_dir: Path, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.families.materials.ensemble.select_structures._BATCH_ATOMS", batch)
    structures = ase.io.read(pool, ":")
    energies, forces = spreads_of_members(ensemble_dir, structures)
    wanted = forces if by == "forces" else energies
    found = select_structures(ensemble_dir, [str(pool)], top=5, by=by, device=CPU)
    assert [one.structure.raw.number for one in found.chosen] == np.argsort(-wanted)[:5].tolist()
    places = [one.structure.raw.number for one in found.chosen]
    np.testing.assert_allclose([one.energy for one in found.chosen], energies[places], rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose([one.forces for one in found.chosen], forces[places], rtol=1e-3, atol=1e-7)
    assert found.ranked == 24 and found.median == pytest.approx(np.median(wanted), rel=1e-3)


def test_the_file_says_where_structures_come_from_and_keeps_what_they_are_told(
    ensemble_dir: Path, tmp_path: Path
) -> None:
    structures = molecules(8)
    structures[7].info.update(charge=-1, spin=2)
    structures[3].numbers[0] = 7
    ase.io.write(tmp_path / "pool.extxyz", structures, format="extxyz")
    out = tmp_path / "new" / "next.extxyz"
    words = [
        "select",
        str(ensemble_dir),
        str(tmp_path / "*.extxyz"),
        "--out",
        str(out),
        "--top",
        "20",
        "--device",
        "cpu",
    ]
    assert run_command_line(words) == 0
    written = ase.io.read(out, ":")
    # Nitrogen was not trained on.
    assert len(written) == 7
    widths = [one.info["forces_spread"] for one in written]
    assert widths == sorted(widths, reverse=True)
    for one in written:
        assert one.info["file"] == str(tmp_path / "pool.extxyz")
        before = structures[int(one.info["place"].split()[1])]
        assert one.numbers.tolist() == before.numbers.tolist() and one.pbc.tolist() == before.pbc.tolist()
        np.testing.assert_allclose(one.positions, before.positions, atol=1e-7)
        np.testing.assert_allclose(one.cell.array, before.cell.array, atol=1e-7)
        assert (one.info.get("charge"), one.info.get("spin")) == (before.info.get("charge"), before.info.get("spin"))


def test_a_person_and_a_program_read_the_same(
    ensemble_dir: Path, pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["select", str(ensemble_dir), str(pool), "--top", "2", "--by", "energy", "--device", "cpu"]
    assert run_command_line([*words, "--out", str(tmp_path / "a.extxyz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranked"], found["left_out"], len(found["chosen"])) == (24, {}, 2)
    assert run_command_line([*words, "--out", str(tmp_path / "b.extxyz")]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(f"2 of 24 structures written to {tmp_path}/b.extxyz: members are ")
    for row, chosen in zip(rows, found["chosen"], strict=True):
        assert f"{1e3 * chosen['energy']:.2f}" in row and row.endswith(f"{chosen['file']}: {chosen['place']}")


def prepare_pool(folder: Path, cutoff: float) -> Path:
    """The same structures, of which one is an anion, as prepared ones, with energies that nobody looks at."""
    structures = molecules(24)
    structures[5].info.update(charge=-1, spin=2)
    for one in structures:
        one.info["energy"] = -1.0
    folder.mkdir()
    ase.io.write(folder / "pool.extxyz", structures, format="extxyz")
    electrons = {"total_charge": {"key": "charge", "unit": "e"}, "multiplicity": {"key": "spin", "unit": "1"}}
    source = {
        "name": "pool",
        "path": str(folder / "pool.extxyz"),
        "labels": {"energy": "eV", **electrons},
        "missing_labels": "allow",
        "no_edges": "allow",
        "check_units": False,
    }
    shares = {"validation_fraction": 0.3, "test_fraction": 0.2}
    prepare_graphs(graph_data(folder / "prepared", [source], cutoff=cutoff, **shares), workers=1)
    return folder / "prepared" / "pool"


def chosen_of(selection: Selection) -> list[tuple[str, int, float]]:
    return [(one.structure.raw.place[-2:], one.structure.raw.number, one.forces) for one in selection.chosen]


# The members' own cutoff, whose edges are taken, and another one, of which they are found anew.
@pytest.mark.parametrize("own", [True, False])
def test_prepared_structures_are_ranked_as_their_file(
    own: bool, ensemble_dir: Path, member_dirs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutoff = open_member(member_dirs[0]).run.data.cutoff  # type: ignore[attr-defined]
    folder = prepare_pool(tmp_path / "set", cutoff if own else cutoff + 1.0)
    expected = select_structures(ensemble_dir, [str(tmp_path / "set" / "pool.extxyz")], top=6, device=CPU)
    searched = []
    plain = module.find_edges
    monkeypatch.setattr(module, "find_edges", lambda *given: searched.append(1) or plain(*given))
    found = select_structures(ensemble_dir, [str(folder)], top=6, device=CPU)
    assert len(searched) == (0 if own else 24) and found.ranked == 24
    assert [number for _, number, _ in chosen_of(found)] == [number for _, number, _ in chosen_of(expected)]
    for one, other in zip(found.chosen, expected.chosen, strict=True):
        assert (one.energy, one.forces) == pytest.approx((other.energy, other.forces), rel=1e-4, abs=1e-7)
        assert one.structure.raw.file == other.structure.raw.file
        assert dict(one.structure.raw.values) == {
            key: value for key, value in other.structure.raw.values.items() if key in ("charge", "spin")
        }


def _select_share(
    ensemble_dir: Path, pools: list[str]
) -> tuple[list[tuple[str, int, float]], int, float, dict[int, int]]:
    share = Share(dist.get_rank(), dist.get_world_size())
    found = select_structures(ensemble_dir, pools, top=5, device=CPU, share=share)
    return chosen_of(found), found.ranked, found.median, found.unknown


def test_ranks_share_the_structures_and_all_get_the_selection(ensemble_dir: Path, pool: Path, tmp_path: Path) -> None:
    strange = ase.Atoms("N2", [[0, 0, 0], [0, 0, 1.1]])
    ase.io.write(tmp_path / "strange.extxyz", [strange] * 18, format="extxyz")
    pools = [str(pool), str(tmp_path / "strange.extxyz")]
    whole = select_structures(ensemble_dir, pools, top=5, device=CPU)
    for chosen, ranked, median, unknown in run_ranks(_select_share, 2, ensemble_dir, pools):
        assert [one[:2] for one in chosen] == [one[:2] for one in chosen_of(whole)]
        assert [one[2] for one in chosen] == pytest.approx([one.forces for one in whole.chosen], rel=1e-4)
        assert (ranked, unknown) == (24, {7: 18}) and median == pytest.approx(whole.median, rel=1e-4)


def test_what_cannot_be_ranked_is_refused(ensemble_dir: Path, tmp_path: Path) -> None:
    ase.io.write(tmp_path / "n.extxyz", ase.Atoms("N2", [[0, 0, 0], [0, 0, 1.1]]), format="extxyz")
    with pytest.raises(DataError, match="no structure is left to choose from"):
        select_structures(ensemble_dir, [str(tmp_path / "n.extxyz")], top=1, device=CPU)
    ase.io.write(tmp_path / "same.extxyz", ase.Atoms("H2"), format="extxyz")
    with pytest.raises(DataError, match=r"same.extxyz: frame 0 .* atoms 0 and 1 are on one place"):
        select_structures(ensemble_dir, [str(tmp_path / "same.extxyz")], top=1, device=CPU)
    document = json.loads((ensemble_dir / "ensemble.json").read_text())
    for number, member in enumerate(document["members"]):
        member["checkpoint"] = str((ensemble_dir / member["checkpoint"]).resolve())
        member["weight"] = float(number == 0)
    (tmp_path / "ensemble.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="all weight is on one member"):
        select_structures(tmp_path, [str(tmp_path / "n.extxyz")], top=1, device=CPU)
    found = select_structures(ensemble_dir, [str(write_one(tmp_path))], top=1, device=CPU)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_selection(found, tmp_path / "folder")


def write_one(folder: Path) -> Path:
    ase.io.write(folder / "one.extxyz", ase.Atoms("H2", [[0, 0, 0], [0, 0, 0.9]]), format="extxyz")
    return folder / "one.extxyz"
