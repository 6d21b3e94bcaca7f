"""Batches: what is in the files is in the tensors, whichever ranks and micro-batches it goes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graph_files import graph_data, prepared_sources, write_set
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.balance import CostModel
from phalanx.families.materials.data.graph_batches import LABELS, GraphBatch, graph_columns
from phalanx.families.materials.data.graph_shards import PreparedSource, open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs

KCAL = 0.043364104241801
STEPS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> GraphData:
    return prepared_sources(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def sources(data: GraphData) -> list[PreparedSource]:
    return open_prepared(data, "train")


def stream_of(data: GraphData, sources: list[PreparedSource], **changes: Any) -> GraphBatchStream:
    order = graph_order(sources, data, seed=5, global_batch=changes.pop("global_batch", 12))
    return GraphBatchStream(order, graph_columns(sources), **({"prefetch": 0} | changes))


def by_sample(batch: GraphBatch) -> dict[int, dict[str, torch.Tensor | None]]:
    """Each structure of a batch by its sample number, edges counted within it."""
    found = {}
    for graph, number in enumerate(batch.sample_indices.tolist()):
        mine = batch.graph_N == graph
        first = int(mine.nonzero()[0])
        edges = mine[batch.edges_2E[0]]
        assert torch.equal(edges, mine[batch.edges_2E[1]])
        parts: dict[str, torch.Tensor | None] = {
            "edges": batch.edges_2E[:, edges] - first,
            "shifts": batch.shifts_E3[edges],
        }
        for name in ("species_N", "positions_N3", "forces_N3", "charges_N", "atom_properties_NP"):
            parts[name] = getattr(batch, name)[mine]
        for name in ("cells_G33", "source_G", "energy_G", "stress_G33", "dipole_G3", "properties_GP"):
            parts[name] = getattr(batch, name)[graph]
        found[number] = parts
    return found


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(torch.nan_to_num(first[name], nan=-7e7), torch.nan_to_num(second[name], nan=-7e7)) for name in first
    )


def test_tensors_hold_what_the_files_hold(data: GraphData, sources: list[PreparedSource]) -> None:
    files = [dict(np.load(source.path)) for source in data.sources]
    stream = stream_of(data, sources)
    for step in range(1, STEPS):
        batch = stream.batch(step)
        located = stream.order.batch(step)
        assert torch.equal(batch.sample_indices, torch.from_numpy(located.numbers))
        for row, parts in enumerate(by_sample(batch).values()):
            source, item = int(located.source[row]), int(located.item[row])
            made, number = files[source], int(sources[source].name(item).rsplit(" ", 1)[1])
            atoms = slice(made["ptr"][number], made["ptr"][number + 1])
            assert int(parts["source_G"]) == source
            assert parts["species_N"].tolist() == made["z"][atoms].tolist()
            assert np.allclose(parts["positions_N3"], made["pos"][atoms], atol=1e-6)
            unit = (1.0, KCAL)[source]
            assert float(parts["energy_G"]) == pytest.approx(made["energy"][number] * unit, rel=1e-12)
            if source == 0:
                assert np.allclose(parts["charges_N"], made["charges"][atoms])
                assert np.allclose(parts["dipole_G3"], made["dipole"][number])
                assert float(parts["properties_GP"][0]) == pytest.approx(made["table"][number, 1] * 27.211386245988)
                assert float(parts["properties_GP"][1]) == pytest.approx(made["table"][number, 2] * 0.529177210903**3)
                assert np.allclose(parts["atom_properties_NP"][:, 0], made["spin"][atoms])
                assert parts["forces_N3"].isnan().all() and parts["stress_G33"].isnan().all()
                assert not parts["cells_G33"].any() and not parts["shifts"].any()
            else:
                assert np.allclose(parts["forces_N3"], made["forces"][atoms] * unit)
                stress = made["stress"][number][[0, 5, 4, 5, 1, 3, 4, 3, 2]].reshape(3, 3)
                assert np.allclose(parts["stress_G33"], stress * 0.00624150907, rtol=1e-5)
                assert np.allclose(parts["cells_G33"], made["cell"][number])
                assert parts["charges_N"].isnan().all() and parts["properties_GP"].isnan().all()


def test_edges_are_all_pairs_within_the_cutoff(data: GraphData, sources: list[PreparedSource]) -> None:
    batch = stream_of(data, sources).batch(1)
    source, target = batch.edges_2E
    assert torch.equal(batch.graph_N[source], batch.graph_N[target])
    distances = (batch.positions_N3[target] + batch.shifts_E3 - batch.positions_N3[source]).norm(dim=1)
    across = batch.shifts_E3.any(dim=1)
    assert across.any() and (batch.source_G[batch.graph_N[source[across]]] == 1).all()
    assert float(distances.max()) <= data.cutoff + 1e-5 and float(distances.min()) > 0.5
    assert (batch.graph_N.diff() >= 0).all() and (target.diff() >= 0).all()


@pytest.mark.parametrize("ranks", [2, 3, 8, 40])
def test_ranks_together_have_the_global_batch_of_one(
    data: GraphData, sources: list[PreparedSource], ranks: int
) -> None:
    alone = stream_of(data, sources)
    streams = [stream_of(data, sources, rank=rank, ranks=ranks, parts=2) for rank in range(ranks)]
    assert {stream.fingerprint for stream in streams} == {alone.fingerprint}
    for step in range(1, STEPS):
        whole = alone.batch(step)
        parts = [stream.batch(step) for stream in streams]
        found: dict[int, Any] = {}
        for part in parts:
            found |= by_sample(part)
        expected = by_sample(whole)
        assert sum(len(part.sample_indices) for part in parts) == len(expected) and found.keys() == expected.keys()
        assert all(same(found[number], expected[number]) for number in expected)
        assert torch.equal(sum(part.target_counts() for part in parts), whole.target_counts())
        assert {len(part.graphs_by_part) for part in parts} == {2}
        division = streams[0].division(step)
        for rank, part in enumerate(parts):
            costs = streams[0].order.cost.whole(part.atoms, part.edges)
            assert costs.sum() == division.loads[rank].sum()


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 30])
def test_micro_batches_together_are_the_batch(data: GraphData, sources: list[PreparedSource], parts: int) -> None:
    batch = stream_of(data, sources, parts=3).batch(2)
    pieces = list(batch.split(parts))
    assert len(pieces) == parts
    found: dict[int, Any] = {}
    for piece in pieces:
        assert piece.inputs()[1]["max_atoms"] == int(piece.atoms.max(initial=0))
        found |= by_sample(piece)
    expected = by_sample(batch)
    assert list(found) == list(expected) and all(same(found[number], expected[number]) for number in expected)
    assert torch.equal(sum(piece.target_counts() for piece in pieces), batch.target_counts())
    if parts == 3:
        loads = [int(stream_of(data, sources).order.cost.whole(piece.atoms, piece.edges).sum()) for piece in pieces]
        assert loads == stream_of(data, sources, parts=3).division(2).loads[0].tolist()


def test_a_rank_without_structures_has_empty_tensors(data: GraphData, sources: list[PreparedSource]) -> None:
    batch = stream_of(data, sources, global_batch=1, rank=3, ranks=4, parts=2).batch(1)
    assert len(batch.sample_indices) == 0 and batch.positions_N3.shape == (0, 3) and batch.edges_2E.shape == (2, 0)
    assert batch.target_counts().tolist() == [0] * len(batch.tasks)
    assert [len(piece.sample_indices) for piece in batch.split(2)] == [0, 0]
    assert batch.energy_G is not None and batch.inputs()[1]["max_atoms"] == 0


def test_counts_are_of_the_numbers_that_are_there(data: GraphData, sources: list[PreparedSource]) -> None:
    batch = stream_of(data, sources).batch(3)
    crystals = int((batch.source_G == 1).sum())
    crystal_atoms = int((batch.source_G[batch.graph_N] == 1).sum())
    molecules, atoms = len(batch.atoms) - crystals, len(batch.species_N) - crystal_atoms
    assert batch.tasks == LABELS[:-1] and crystals and molecules
    expected = [len(batch.atoms), 3 * crystal_atoms, 9 * crystals, atoms, 3 * molecules, 2 * molecules, atoms]
    assert batch.target_counts().tolist() == expected
    columns = graph_columns(sources, tasks=["forces_N3", "energy_G"], properties={})
    order = graph_order(sources, data, seed=5, global_batch=12)
    chosen = GraphBatchStream(order, columns, prefetch=0).batch(3)
    assert chosen.target_counts().tolist() == [3 * crystal_atoms, len(batch.atoms)]
    assert chosen.properties_GP is None and chosen.total_charge_G is not None and not chosen.total_charge_G.any()
    swapped = graph_columns(sources, properties={"properties": ["volume", "gap"]})
    turned = GraphBatchStream(order, swapped, prefetch=0).batch(3)
    assert batch.properties_GP is not None and turned.properties_GP is not None
    assert torch.equal(turned.properties_GP.nan_to_num(), batch.properties_GP.flip(1).nan_to_num())


def test_inputs_are_what_a_model_takes_and_moving_keeps_them(data: GraphData, sources: list[PreparedSource]) -> None:
    batch = stream_of(data, sources).batch(1)
    species, named = batch.to(torch.device("cpu")).inputs()
    assert species.dtype == torch.int64 and "sample_indices" not in named and "species_N" not in named
    formats = {name: value.dtype for name, value in named.items() if isinstance(value, torch.Tensor)}
    assert formats["energy_G"] == formats["properties_GP"] == torch.float64
    assert formats["positions_N3"] == formats["shifts_E3"] == formats["forces_N3"] == torch.float32
    assert formats["graph_N"] == formats["edges_2E"] == formats["source_G"] == torch.int64


def test_a_stream_goes_on_anywhere_and_reads_ahead(data: GraphData, sources: list[PreparedSource]) -> None:
    plain = stream_of(data, sources)
    ahead = stream_of(data, sources, prefetch=2)
    for step in range(1, 5):
        assert torch.equal(ahead.next().sample_indices, plain.batch(step).sample_indices)
    ahead.seek(1000)
    assert torch.equal(ahead.next().positions_N3, plain.batch(1001).positions_N3)
    ahead.close()


def test_measured_costs_move_structures_between_ranks_but_not_between_steps(
    data: GraphData, sources: list[PreparedSource]
) -> None:
    streams = [stream_of(data, sources, rank=rank, ranks=2) for rank in range(2)]
    before = [[stream.batch(step) for stream in streams] for step in range(1, STEPS)]
    for stream in streams:
        stream.use_costs(CostModel(node=0.0, edge=1.0), first=1)
    after = [[stream.batch(step) for stream in streams] for step in range(1, STEPS)]
    moved = 0
    for old, new in zip(before, after, strict=True):
        numbers = [torch.cat([part.sample_indices for part in parts]).sort().values for parts in (old, new)]
        assert torch.equal(*numbers)
        moved += not torch.equal(old[0].sample_indices, new[0].sample_indices)
        edges = [int(part.edges.sum()) for part in new]
        assert abs(edges[0] - edges[1]) <= max(int(part.edges.max()) for part in new)
    assert moved


def test_a_budget_sets_the_number_of_micro_batches(data: GraphData, sources: list[PreparedSource]) -> None:
    budget = 400.0
    streams = [stream_of(data, sources, rank=rank, ranks=2, budget=budget) for rank in range(2)]
    cost = streams[0].order.cost
    seen = set()
    for step in range(1, STEPS):
        batches = [stream.batch(step) for stream in streams]
        (parts,) = {len(batch.graphs_by_part) for batch in batches}
        seen.add(parts)
        for batch in batches:
            for piece in batch.split(parts):
                assert cost.whole(piece.atoms, piece.edges).sum() * cost.unit <= budget * 1.001
    assert max(seen) > 1


def test_a_structure_above_the_budget_is_named_or_stands_alone(data: GraphData, sources: list[PreparedSource]) -> None:
    message = (
        r"\.npz: structure \d+: its \d+ atoms and \d+ edges cost [\d.]+, more than data\.microbatch_cost=100 \(so do \d+ of "
        r"\d+ structures of that split\); raise it to at least that, or set data\.oversized: alone"
    )
    with pytest.raises(DataError, match=message):
        stream_of(data, sources, budget=100.0)
    stream = stream_of(data, sources, budget=100.0, oversized_alone=True)
    batch = stream.batch(1)
    cost = stream.order.cost
    for piece in batch.split(len(batch.graphs_by_part)):
        assert len(piece.atoms) <= 1 or cost.whole(piece.atoms, piece.edges).sum() * cost.unit <= 100.1


def test_labels_that_no_source_has_are_refused(sources: list[PreparedSource]) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.properties asks for homo, which no source of data has; they have gap, volume"
    ):
        graph_columns(sources, properties={"properties": ["homo"]})
    with pytest.raises(ConfigError, match="the model learns forces, which no source of data has a label for"):
        graph_columns(sources[:1], tasks=["energy_G", "forces_N3"])


def test_a_total_charge_is_given_where_known_and_else_zero(tmp_path: Path) -> None:
    charges = np.array([1.0, -2.0, np.nan, 0.0, 1.0, 3.0])
    write_set(tmp_path / "a.npz", 6, q=charges)
    source = {
        "name": "a",
        "path": str(tmp_path / "a.npz"),
        "labels": {"energy": "eV", "total_charge": {"key": "q", "unit": "e"}},
        "missing_labels": "allow",
    }
    data = graph_data(tmp_path / "prepared", [source], validation_fraction=0.0, test_fraction=0.0)
    prepare_graphs(data, workers=1)
    sources = open_prepared(data, "train")
    batch = stream_of(data, sources, global_batch=6).batch(1)
    assert batch.total_charge_G is not None and batch.tasks == ("energy_G",)
    assert sorted(batch.total_charge_G.tolist()) == [-2.0, 0.0, 0.0, 1.0, 1.0, 3.0]
    assert "total_charge_G" in batch.inputs()[1]


def test_dipoles_of_periodic_structures_that_an_older_version_prepared_take_no_part(tmp_path: Path) -> None:
    """Of a shard as it was written before they were refused."""
    data = prepared_sources(tmp_path, structures=12)
    source = open_prepared(data, "train")[0]
    for number in range(len(source.manifest.shards)):
        shard = dict(source.shard(number))
        shard["periodic"] = np.arange(len(shard["periodic"]))[:, None] % 2 * np.ones(3, dtype=np.uint8)
        source._open[number] = shard
    order = graph_order([source], data.model_copy(update={"sources": data.sources[:1]}), seed=1, global_batch=6)
    stream = GraphBatchStream(order, graph_columns([source], tasks=["dipole_G3"]), prefetch=0)
    batch = stream.batch(1)
    assert batch.dipole_G3 is not None
    left_out = batch.dipole_G3.isnan().all(1)
    assert left_out.any() and not left_out.all()
    assert int(batch.target_counts()[0]) == 3 * int((~left_out).sum())
