"""Pooling of nodes: which ones stay, and what a network with it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.nn import TopKPooling as PublishedPooling

from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_batches import GraphBatch
from phalanx.families.materials.model.geometry import edge_geometry
from phalanx.families.materials.model.layers import Atoms
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model.pooling import TopKPooling, best_of_each, keep_nodes
from phalanx.families.materials.sizes import parameter_count
from phalanx.families.registry import bind
from phalanx.layout.layout_model import LayoutModel
from phalanx.verification.family import VerifiableModel


def pooled_run(**changes: Any) -> MaterialsRun:
    model = {
        "family": "materials",
        "n_layers": 3,
        "d_model": 8,
        "n_radial": 4,
        "cutoff": 3.0,
        "mean_neighbors": 4.0,
        "body": "painn",
        "graph": {"nodes": 3, "edges": 2, "positions": True},
        "pooling": {"ratio": 0.6},
        "properties": {"names": ["stiffness"]},
    }
    graph = {"node_features": ["a"], "edge_features": ["b"], "positions": True}
    source = {"name": "main", "path": "nowhere", "graph": graph, "properties": {"stiffness": "1"}}
    data = {"sources": [source], "prepared": "nowhere", "cutoff": 3.0}
    rest = {"layout": {"global_batch": 16}, "optimizer": {"lr": 0.01}, "training": {"steps": 2}}
    return MaterialsRun.model_validate({"model": model | changes, "data": data, **rest})


def sample_graphs(run: MaterialsRun) -> GraphBatch:
    batch = bind(run, VerifiableModel).samples(1, 0, 16, 16)
    assert isinstance(batch, GraphBatch)
    return batch


def test_the_best_of_each_graph_stay() -> None:
    graph_N = torch.tensor([0, 0, 0, 2, 2, 2, 2, 3])
    score_N = torch.tensor([0.1, 0.9, 0.5, -3.0, -1.0, -2.0, -4.0, -9.0])
    assert best_of_each(score_N, graph_N, 4, 0.5).tolist() == [1, 2, 4, 5, 7]
    assert best_of_each(score_N, graph_N, 4, 0.3).tolist() == [1, 4, 5, 7]


def test_pooling_is_that_of_torch_geometric() -> None:
    run = pooled_run()
    batch, options = sample_graphs(run), run.model.pooling
    assert options is not None
    geometry = edge_geometry(
        run.model,
        batch.positions_N3[batch.edges_2E[1]] - batch.positions_N3[batch.edges_2E[0]],
        batch.edges_2E,
        batch.species_N,
        batch.graph_N,
        dtype=torch.float64,
        graphs=len(batch.atoms),
    )
    torch.manual_seed(0)
    published, own = PublishedPooling(8, ratio=options.ratio).double(), TopKPooling(run.model, options).double()
    own.load_state_dict({"score": published.select.weight.detach()})
    x_NC = torch.randn(len(batch.graph_N), 8, dtype=torch.float64)
    found = own(Atoms(x_NC), geometry)
    graph = keep_nodes(geometry, found.kept_K)
    wanted_KC, wanted_2E, wanted_ER, wanted_K, perm_K, _ = published(
        x_NC, batch.edges_2E, geometry.radial_ER, batch.graph_N
    )
    # There the best node of a graph comes first, here nodes keep their order.
    order_K = perm_K.argsort()
    assert torch.equal(found.kept_K, perm_K[order_K]) and len(order_K) < len(x_NC)
    assert torch.allclose(found.scalars_NC, wanted_KC[order_K], rtol=1e-12)
    assert torch.equal(graph.graph_N, wanted_K[order_K])
    assert torch.equal(torch.stack((graph.source_E, graph.target_E)), order_K.argsort()[wanted_2E])
    assert torch.equal(graph.radial_ER, wanted_ER)


def test_the_order_of_nodes_does_not_matter_and_every_parameter_learns() -> None:
    run = pooled_run()
    torch.manual_seed(0)
    network, batch = MaterialsNetwork(run.model, dtype=torch.float64).double(), sample_graphs(run)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert sum(p.numel() for p in network.parameters()) == parameter_count(run.model)
    species_N, named = batch.inputs()
    losses = network(species_N, **named)
    order_N = torch.argsort(batch.graph_N + torch.rand(len(batch.graph_N)))
    assert batch.node_features_NF is not None
    moved = replace(
        batch,
        positions_N3=batch.positions_N3[order_N],
        node_features_NF=batch.node_features_NF[order_N],
        edges_2E=torch.argsort(order_N)[batch.edges_2E],
    )
    assert torch.allclose(network(species_N, **moved.inputs()[1]), losses, rtol=1e-9)
    losses.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in network.parameters())


def test_nodes_of_a_pooled_graph_are_not_shared_between_ranks() -> None:
    assert "cp" not in bind(pooled_run(), LayoutModel).axes
    assert "cp" in bind(pooled_run(pooling=None), LayoutModel).axes
    with pytest.raises(ValueError, match="pooling leaves out nodes"):
        pooled_run(atom_properties={"names": ["a"]})
