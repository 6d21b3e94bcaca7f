"""Total charges: labelled, or what the charges of atoms add up to; what makes no whole is refused by file and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_files import graph_data, write_set
from phalanx.cli.data import describe_charges
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_batches import Collator, graph_columns
from phalanx.families.materials.data.graph_shards import Located, open_prepared
from phalanx.families.materials.data.graph_statistics import joint_statistics
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.structures import total_charges

CHARGES = np.array([0.0, 1.0, -2.0, 0.0, 1.0, 0.0])
"""Of the structures of a set."""


def ions(folder: Path, charges: np.ndarray = CHARGES, **source: Any) -> GraphData:
    """A set of structures whose charges add up to these numbers; `q` holds them, too."""
    made = write_set(folder / "ions.npz", len(charges), q=charges)
    atoms = np.diff(made["ptr"])
    write_set(folder / "ions.npz", len(charges), q=charges, charges=made["charges"] + np.repeat(charges / atoms, atoms))
    given = {"name": "ions", "path": str(folder / "ions.npz"), "labels": {"energy": "eV", "charges": "e"}, **source}
    return graph_data(folder / "prepared", [given], validation_fraction=0.0, test_fraction=0.0)


def totals(data: GraphData) -> list[float]:
    """Of a batch of all structures of the prepared set, in the order of the file."""
    sources = open_prepared(data, "train")
    items = np.arange(len(CHARGES))
    found = Located(items, np.zeros_like(items), items, *sources[0].sizes(items))
    batch = Collator(sources, graph_columns(sources))(found, (len(items),))
    assert batch.total_charge_G is not None
    charges: list[float] = batch.total_charge_G.tolist()
    return charges


def test_ions_are_told_by_their_charges(tmp_path: Path) -> None:
    data = ions(tmp_path)
    statistics = prepare_graphs(data, workers=1)["ions"].statistics
    assert totals(data) == CHARGES.tolist()
    assert statistics.total_charges == {-2: 1, 0: 3, 1: 2} and statistics.taken_for_neutral == 0
    assert describe_charges(statistics) == "total charges: -2 in 1, +1 in 2, 0 in 3 structures"
    joint = joint_statistics(open_prepared(data, "train") * 2)
    assert joint.total_charges == {-2: 2, 0: 6, 1: 4}


def test_nothing_is_said_of_neutral_structures(tmp_path: Path) -> None:
    assert describe_charges(prepare_graphs(ions(tmp_path, 0 * CHARGES), workers=1)["ions"].statistics) == ""


def test_a_label_comes_before_the_sum_and_the_sum_before_nothing(tmp_path: Path) -> None:
    labels = {"energy": "eV", "charges": "e", "total_charge": {"key": "q", "unit": "e"}}
    data = ions(tmp_path, labels=labels, missing_labels="allow", charge_sum="any")
    arrays = dict(np.load(tmp_path / "ions.npz"))
    arrays["q"] = np.array([0.0, np.nan, np.nan, 3.0, np.nan, np.nan])
    # An atom of the last two has no charge, so that their sums say nothing.
    arrays["charges"][arrays["ptr"][4:6]] = np.nan
    np.savez(tmp_path / "ions.npz", **arrays)
    statistics = prepare_graphs(data, workers=1)["ions"].statistics
    assert totals(data) == [0.0, 1.0, -2.0, 3.0, 0.0, 0.0]
    assert statistics.taken_for_neutral == 2
    assert describe_charges(statistics) == (
        "total charges: -2 in 1, +1 in 1, +3 in 1, 0 in 1 structures; 2 structures say nothing of their total charge and "
        "are taken for neutral"
    )


def test_charges_that_make_no_whole_are_refused_unless_that_is_meant(tmp_path: Path) -> None:
    charges = CHARGES + np.array([0.0, 0.05, 0.0, 0.4, 0.0, 0.0])
    said = (
        r"ions.npz: structure 3: its charges add up to 0.400 e, which is no whole number; correct their unit \(e\) or the "
        r"label, or set charge_sum: any for source ions \(\+0 e is then taken for its total charge\)"
    )
    with pytest.raises(DataError, match=said):
        prepare_graphs(ions(tmp_path, charges), workers=1)
    data = ions(tmp_path, charges, charge_sum="any")
    prepare_graphs(data, workers=1)
    assert totals(data) == CHARGES.tolist()
    # What is prepared is the same either way.
    assert totals(ions(tmp_path, charges)) == CHARGES.tolist()


def test_charges_that_contradict_the_total_charge_are_refused(tmp_path: Path) -> None:
    labels = {"energy": "eV", "charges": "e", "total_charge": {"key": "q", "unit": "e", "factor": -1.0}}
    with pytest.raises(DataError, match=r"structure 1: its charges add up to 1.000 e, but its total_charge is -1 e"):
        prepare_graphs(ions(tmp_path, labels=labels), workers=1)
    data = ions(tmp_path, labels=labels, charge_sum="any")
    prepare_graphs(data, workers=1)
    assert totals(data) == (-CHARGES).tolist()


def test_a_lone_ion_is_looked_at_too(tmp_path: Path) -> None:
    lone = {"ptr": np.array([0, 1]), "z": np.array([11]), "pos": np.zeros((1, 3)), "charges": np.array([0.5])}
    np.savez(tmp_path / "lone.npz", **lone)
    source = {"name": "lone", "path": str(tmp_path / "lone.npz"), "labels": {"charges": "e"}, "no_edges": "allow"}
    data = graph_data(tmp_path / "prepared", [source], validation_fraction=0.0, test_fraction=0.0)
    with pytest.raises(DataError, match=r"structure 0: its charges add up to 0.500 e"):
        prepare_graphs(data, workers=1)


def test_no_structures_have_no_charges() -> None:
    none = np.empty(0)
    assert total_charges(None, none, none.astype(np.int64), 0).tolist() == []
    assert np.isnan(total_charges(None, None, np.zeros(3, dtype=np.int64), 1)).tolist() == [True]


def test_multiplicities_are_read_and_wrong_ones_refused(tmp_path: Path) -> None:
    """1 where a structure has no label; other numbers than whole ones from 1 on are refused by file and place."""
    labels = {"energy": "eV", "charges": "e", "multiplicity": {"key": "q", "unit": "1"}}
    given = np.array([1.0, 2.0, np.nan, 3.0, 1.0, 5.0])
    data = multiplets(tmp_path / "good", given, labels=labels, missing_labels="allow")
    prepare_graphs(data, workers=1)
    sources = open_prepared(data, "train")
    items = np.arange(len(given))
    found = Located(items, np.zeros_like(items), items, *sources[0].sizes(items))
    batch = Collator(sources, graph_columns(sources))(found, (len(items),))
    assert batch.multiplicity_G is not None and batch.multiplicity_G.tolist() == [1.0, 2.0, 1.0, 3.0, 1.0, 5.0]
    for number, wrong in enumerate((0.0, 1.5)):
        bad = multiplets(
            tmp_path / f"bad{number}", np.where(given == 5.0, wrong, given), labels=labels, missing_labels="allow"
        )
        with pytest.raises(
            DataError, match=f"structure 5.*its multiplicity is {wrong:g}, which is no whole number from 1"
        ):
            prepare_graphs(bad, workers=1)


def multiplets(folder: Path, multiplicities: np.ndarray, **source: Any) -> GraphData:
    """A set of neutral structures with these numbers in `q`."""
    folder.mkdir()
    write_set(folder / "set.npz", len(multiplicities), q=multiplicities)
    given = {"name": "set", "path": str(folder / "set.npz"), **source}
    return graph_data(folder / "prepared", [given], validation_fraction=0.0, test_fraction=0.0)
