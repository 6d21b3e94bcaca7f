"""Shares of batches: every atom, edge and label is in one, shares cost the same, large structures fall into pieces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atom_graphs import random_structure
from graph_shares import crystal, cutting_for, graph_batch
from materials_runs import write_materials_run
from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_batches import GraphBatch
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.graph_parallel.cut_batches import (
    Cutting,
    GraphShare,
    SharePart,
    cut_batch,
    cut_microbatch,
    cutting_of,
)
from phalanx.families.materials.graph_parallel.halo_exchange import Gathering, Sending
from phalanx.families.materials.graph_parallel.spatial_order import hilbert_numbers, spatial_order
from phalanx.families.materials.model_config import GlobalAttention
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK, Axis
from phalanx.layout.resolve import resolve_layout
from phalanx.training.inputs import TrainableModel
from small_networks import small_model

STRUCTURES = [random_structure(3, 7), crystal(40), random_structure(4, 1), crystal(20, seed=2)]
EVERYTHING = small_model("dimenet++", attention=GlobalAttention(heads=2))


def shares_of(size: int) -> list[SharePart]:
    batch = graph_batch(STRUCTURES, EVERYTHING)
    return [cut_microbatch(batch, cutting_for(EVERYTHING, rank, size)) for rank in range(size)]


def test_points_that_follow_each_other_on_the_curve_are_neighbours() -> None:
    steps = np.stack(np.meshgrid(*[np.arange(8)] * 3, indexing="ij"), -1).reshape(-1, 3)
    numbers = hilbert_numbers(steps, 3)
    assert sorted(numbers.tolist()) == list(range(512))
    assert np.abs(np.diff(steps[np.argsort(numbers)], axis=0)).sum(1).tolist() == [1] * 511


def test_order_keeps_structures_together_and_knows_no_images() -> None:
    batch = graph_batch(STRUCTURES)
    arrays = batch.positions_N3.numpy(), batch.cells_G33.numpy(), batch.graph_N.numpy()
    order = spatial_order(*arrays)
    assert sorted(order.tolist()) == list(range(len(order)))
    assert (np.diff(batch.graph_N.numpy()[order]) >= 0).all()
    positions, cells, graph = arrays
    elsewhere = positions + np.array([2.0, -1.0, 0.0]) @ cells[graph]
    assert spatial_order(elsewhere, cells, graph).tolist() == order.tolist()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_atom_edge_and_label_is_somewhere_once(size: int) -> None:
    batch, shares = graph_batch(STRUCTURES, EVERYTHING), shares_of(size)
    edges = []
    for share in shares:
        named = share.named
        source, target = named["edges_2E"]
        assert bool((target < share.halo.own).all()) and bool((source < share.halo.senders).all())
        places = named["positions_N3"]
        edges.append(torch.cat((places[source], places[target], named["shifts_E3"]), dim=1))
    first, second = batch.edges_2E
    wanted = torch.cat((batch.positions_N3[first], batch.positions_N3[second], batch.shifts_E3), dim=1)
    assert sorted(torch.cat(edges).tolist()) == sorted(wanted.tolist())
    atoms = torch.cat([share.named["positions_N3"][: share.halo.own] for share in shares])
    assert sorted(atoms.tolist()) == sorted(batch.positions_N3.tolist())
    for label in batch.tasks:
        whole = getattr(batch, label)
        there = [share.named[label][~share.named[label].isnan()] for share in shares]
        assert sorted(torch.cat(there).tolist()) == sorted(whole[~whole.isnan()].tolist()), label
    for share in shares:
        assert torch.equal(share.counts, batch.target_counts())


def test_halos_are_what_edges_come_from_and_what_others_send() -> None:
    shares = shares_of(3)
    for rank, share in enumerate(shares):
        source = share.named["edges_2E"][0]
        outside = source[source >= share.halo.own].unique()
        assert outside.tolist() == list(range(share.halo.own, share.halo.senders))
        received = []
        for other in range(3):
            plan = shares[other].halo.atoms
            assert isinstance(plan, Sending) and plan.sends[other] == 0
            start = sum(plan.sends[:rank])
            rows = plan.sent[start : start + plan.sends[rank]]
            assert len(rows) == shares[rank].halo.atoms.receives[other]  # type: ignore[union-attr]
            received.append(shares[other].named["positions_N3"][rows])
        assert torch.equal(torch.cat(received), share.named["positions_N3"][share.halo.own :])
        everyone, graphs = share.halo.everyone, share.halo.graph_A
        assert isinstance(everyone, Gathering) and graphs is not None
        assert len(everyone.taken) == len(graphs) == 68 and bool((graphs.diff() >= 0).all())


def test_edges_that_end_in_the_halo_come_with_it() -> None:
    shares = shares_of(3)
    arriving: dict[tuple[float, ...], int] = {}
    for share in shares:
        places = [tuple(place) for place in share.named["positions_N3"].tolist()]
        counts = torch.bincount(share.named["edges_2E"][1], minlength=share.halo.own).tolist()
        arriving |= dict(zip(places, counts, strict=False))
    for share in shares:
        assert share.halo.edge_targets is not None
        places = [tuple(place) for place in share.named["positions_N3"].tolist()]
        found = torch.bincount(share.halo.edge_targets, minlength=share.halo.senders).tolist()
        assert found[: share.halo.own] == [0] * share.halo.own
        assert found[share.halo.own :] == [arriving[place] for place in places[share.halo.own :]]


def test_shares_cost_the_same_and_pieces_are_compact() -> None:
    batch = graph_batch([crystal(343)], EVERYTHING)
    shares = [cut_microbatch(batch, Cutting(rank, 8)) for rank in range(8)]
    costs = [share.halo.own + 0.3 * share.named["edges_2E"].shape[1] for share in shares]
    assert max(costs) / min(costs) < 1.1
    # Atoms come in no order, so that eighths of them as they come would touch nearly all others.
    assert max(share.halo.senders - share.halo.own for share in shares) < 343 / 3


def test_small_structures_stay_whole_where_they_can() -> None:
    batch = graph_batch([random_structure(seed, 6) for seed in range(8)], EVERYTHING)
    shares = [cut_microbatch(batch, Cutting(rank, 4, node_cost=1.0, edge_cost=0.0)) for rank in range(4)]
    assert [share.halo.own for share in shares] == [12] * 4
    assert all(share.halo.atoms is None for share in shares)


def test_batches_without_atoms_have_shares_too() -> None:
    batch = next(iter(graph_batch(STRUCTURES, EVERYTHING).split(1))).take_graphs(0, 0)
    share = cut_batch(batch, 1, cutting_for(EVERYTHING, 1, 2))
    (x, named), halo = share.inputs(), share.parts[0].halo
    assert len(x) == named["edges_2E"].shape[1] == halo.own == halo.largest == 0 and halo.atoms is None


def test_training_reads_shares_whose_micro_batches_are_as_large_as_all_ranks_can_hold(tmp_path: Path) -> None:
    path = write_materials_run(tmp_path, structures=40)
    run = load_run(path, ["layout.cp=2", "layout.dp_shard=1", "data.microbatch_cost=20"])
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    layout, axes = resolve_layout(bind(run), 2), [Axis("cp", rank, 2) for rank in range(2)]
    streams = [
        bind(run, TrainableModel).open_inputs(layout, replace(ONE_RANK, cp=cp), torch.device("cpu"), first=False).stream
        for cp in axes
    ]
    # A budget of 20 for one device is one of 40 for two.
    double = load_run(path, ["data.microbatch_cost=40"])
    whole = (
        bind(double, TrainableModel)
        .open_inputs(resolve_layout(bind(double), 1), ONE_RANK, torch.device("cpu"), first=False)
        .stream
    )
    for _ in range(2):
        shares, batch = [stream.next() for stream in streams], whole.next()
        for cp, share in zip(axes, shares, strict=True):
            assert isinstance(share, GraphShare)
            assert isinstance(batch, GraphBatch)
            parts = cut_batch(batch, layout.accumulation, cutting_of(run, cp)).parts
            assert len(parts) == len(share.parts) > 1
            for mine, wanted in zip(share.parts, parts, strict=True):
                assert torch.equal(mine.named["edges_2E"], wanted.named["edges_2E"])
                assert torch.equal(mine.species_N, wanted.species_N)
    for stream in (*streams, whole):
        stream.close()
