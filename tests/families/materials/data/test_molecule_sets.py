"""The three real sets: QM9 molecules, GFN2-xTB copies of them, and EMT alloys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from graph_files import graph_data
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_batches import graph_columns
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs

FOLDER = Path(__file__).resolve().parents[5] / "shared/data/molecules"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no molecule sets at {FOLDER}")


def shortened(name: str, structures: int, folder: Path) -> Path:
    """The first structures of a set."""
    made = dict(np.load(FOLDER / f"{name}.npz"))
    atoms, total = int(made["ptr"][structures]), int(made["ptr"][-1])
    count = len(made["ptr"]) - 1
    cut = {
        key: array[: {total: atoms, count: structures}[len(array)]]
        for key, array in made.items()
        if key not in ("ptr", "prop_names")
    }
    np.savez(folder / f"{name}.npz", ptr=made["ptr"][: structures + 1], **cut)
    return folder / f"{name}.npz"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> GraphData:
    folder = tmp_path_factory.mktemp("sets")
    sources = [
        {
            "name": "qm9",
            "path": str(shortened("qm9_12k", 400, folder)),
            "labels": {"charges": {"key": "mulliken", "unit": "e"}},
            "properties": {
                "gap": {"key": "props", "column": 4, "unit": "Ha"},
                "polarizability": {"key": "props", "column": 1, "unit": "bohr^3"},
                "heat_capacity": {"key": "props", "column": 8, "unit": "cal/mol/K"},
            },
            "group_by": "qm9_index",
        },
        {
            "name": "xtb",
            "path": str(shortened("xtb_6k", 400, folder)),
            "labels": {"energy": "eV", "forces": "eV/A", "charges": "e", "dipole": "e*A"},
            "group_by": "qm9_index",
        },
        {
            "name": "alloy",
            "path": str(shortened("alloy_emt_1500", 100, folder)),
            "labels": {"energy": "eV", "forces": "eV/A", "stress": "eV/A^3"},
        },
    ]
    data = graph_data(folder / "prepared", sources, cutoff=5.0)
    prepare_graphs(data, workers=1)
    return data


def test_their_units_and_sizes_are_as_expected(data: GraphData) -> None:
    qm9, xtb, alloy = (source.manifest for source in open_prepared(data, "train"))
    assert [manifest.totals.structures for manifest in (qm9, xtb, alloy)] == [400, 400, 100]
    # Total energies of GFN2-xTB atoms are some 10 to 130 eV, cohesive energies of EMT are below one.
    assert -60 < xtb.statistics.reference_energies[6] < -50 and xtb.statistics.residual_std < 1.0
    assert all(abs(energy) < 1.0 for energy in alloy.statistics.reference_energies.values())
    assert 5.0 < qm9.statistics.labels["gap"].mean < 9.0
    assert 8.0 < qm9.statistics.labels["polarizability"].mean < 14.0
    assert alloy.statistics.largest_edges > 5000 > qm9.statistics.largest_edges


def test_forces_of_a_structure_add_up_to_nothing_in_every_batch(data: GraphData) -> None:
    sources = open_prepared(data, "train")
    order = graph_order(sources, data, seed=1, global_batch=40)
    stream = GraphBatchStream(order, graph_columns(sources), rank=1, ranks=2, prefetch=0)
    for step in range(1, 6):
        batch = stream.batch(step)
        assert batch.forces_N3 is not None and batch.charges_N is not None
        net = torch.zeros(len(batch.atoms), 3).index_add(0, batch.graph_N, batch.forces_N3)
        known = batch.source_G > 0
        assert float(net[known].abs().max()) < 1e-3
        charge = torch.zeros(len(batch.atoms)).index_add(0, batch.graph_N, batch.charges_N)
        assert float(charge[batch.source_G < 2].abs().max()) < 1e-3
