"""Networks of graphs whose nodes are no atoms: what their predictions depend on, and how classes are learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_batches import GraphBatch
from phalanx.families.materials.evaluation.prediction_errors import error_rows, error_sums
from phalanx.families.materials.model.losses import Predictions, split_labels
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.sizes import parameter_count
from phalanx.families.registry import bind
from phalanx.verification.family import VerifiableModel

SOURCE = {
    "name": "main",
    "path": "nowhere",
    "graph": {"node_features": ["a"], "edge_features": ["b"], "graph_features": ["c"], "positions": True},
    "properties": {"stiffness": "1", "phase": {"classes": ["x", "y", "z"]}},
    "atom_properties": {"hot": {"classes": ["no", "yes"]}},
    "edge_properties": {"flux": "1"},
}


def graph_run(body: str, *, positions: bool) -> MaterialsRun:
    model = {
        "family": "materials",
        "n_layers": 2,
        "d_model": 8,
        "n_radial": 4,
        "cutoff": 3.0,
        "mean_neighbors": 4.0,
        "body": body,
        "graph": {"nodes": 3, "edges": 2, "graphs": 1, "positions": positions, "nodes_shift": [1.0, 2.0, 3.0]},
        "properties": {"names": ["stiffness", "phase"], "classes": {"phase": 3}},
        "atom_properties": {"names": ["hot"], "classes": {"hot": {"count": 2, "weights": [1.0, 3.0]}}},
        "edge_properties": {"names": ["flux"]},
        "branches": [{"properties_shift": [5.0, 0.0], "properties_scale": [2.0, 1.0]}],
    }
    data = {"sources": [SOURCE], "prepared": "nowhere", "cutoff": 3.0}
    rest = {"layout": {"global_batch": 16}, "optimizer": {"lr": 0.01}, "training": {"steps": 2}}
    return MaterialsRun.model_validate({"model": model, "data": data, **rest})


def sample_graphs(run: MaterialsRun) -> GraphBatch:
    batch = bind(run, VerifiableModel).samples(1, 0, 16, 16)
    assert isinstance(batch, GraphBatch)
    return batch


def build(run: MaterialsRun) -> MaterialsNetwork:
    torch.manual_seed(0)
    network = MaterialsNetwork(run.model, dtype=torch.float64).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network


def predict(network: MaterialsNetwork, batch: GraphBatch) -> dict[str, Tensor]:
    species_N, named = batch.inputs()
    _, graphs = split_labels(named)
    with torch.no_grad():
        found = network.predict(species_N, forces=False, **graphs)
    return {name: value for name, value in vars(found).items() if value is not None}


BLIND = ["gin", "sage", "mfc", "pna", "pna+", "gatv2", "cgcnn", "schnet"]
SEEING = ["schnet", "egnn", "painn", "pnaeq"]


@pytest.mark.parametrize(("body", "positions"), [(one, False) for one in BLIND] + [(one, True) for one in SEEING])
def test_predictions_follow_what_they_may_and_nothing_else(body: str, positions: bool) -> None:
    run = graph_run(body, positions=positions)
    network, batch = build(run), sample_graphs(run)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameter_count(run.model)
    before = predict(network, batch)
    assert before["properties_GP"].shape == (len(batch.atoms), 4)
    assert before["edge_properties_EP"].shape == (batch.edges_2E.shape[1], 1)
    # Nodes in another order, each within its graph, and edges in another one.
    torch.manual_seed(1)
    order_N = torch.argsort(batch.graph_N + torch.rand(len(batch.graph_N)))
    order_E = torch.randperm(batch.edges_2E.shape[1])
    place_N = torch.argsort(order_N)
    assert batch.node_features_NF is not None and batch.edge_features_EF is not None
    assert batch.graph_features_GF is not None
    moved = replace(
        batch,
        positions_N3=batch.positions_N3[order_N],
        node_features_NF=batch.node_features_NF[order_N],
        edges_2E=place_N[batch.edges_2E[:, order_E]],
        edge_features_EF=batch.edge_features_EF[order_E],
    )
    after = predict(network, moved)
    assert torch.allclose(after["properties_GP"], before["properties_GP"], rtol=1e-9)
    assert torch.allclose(after["atom_properties_NP"], before["atom_properties_NP"][order_N], rtol=1e-9)
    assert torch.allclose(after["edge_properties_EP"], before["edge_properties_EP"][order_E], rtol=1e-9)
    # Everything that is given is seen; positions only where the model asks for them.
    for name in ("node_features_NF", "edge_features_EF", "graph_features_GF", "positions_N3"):
        changed = predict(network, replace(batch, **{name: getattr(batch, name) * 1.1}))["properties_GP"]
        assert torch.equal(changed, before["properties_GP"]) == (name == "positions_N3" and not positions)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    turned = predict(network, replace(batch, positions_N3=batch.positions_N3 @ turn))
    assert torch.allclose(turned["properties_GP"], before["properties_GP"], rtol=1e-9)


def test_classes_are_learned_by_cross_entropy_of_what_is_known() -> None:
    run = graph_run("sage", positions=False)
    network, batch = build(run), sample_graphs(run)
    species_N, named = batch.inputs()
    losses = network(species_N, **named)
    assert batch.properties_GP is not None and batch.atom_properties_NP is not None
    found = predict(network, batch)
    known = ~batch.properties_GP[:, 0].isnan()
    phase = F.cross_entropy(found["properties_GP"][known, 1:], batch.properties_GP[known, 1].long(), reduction="sum")
    stiffness = ((found["properties_GP"][known, 0] - batch.properties_GP[known, 0]) / 2.0).square().sum()
    hot_N = batch.atom_properties_NP[:, 0]
    there = ~hot_N.isnan()
    assert 0 < int(known.sum()) < len(known) and 0 < int(there.sum()) < len(there)
    log_N2 = found["atom_properties_NP"][there].log_softmax(1)
    hot = -(torch.tensor([1.0, 3.0])[hot_N[there].long()] * log_N2.gather(1, hot_N[there].long()[:, None])[:, 0]).sum()
    assert torch.allclose(losses[:2], torch.stack((phase + stiffness, hot)))
    losses.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in network.parameters())


def test_accuracy_and_f1_are_those_of_the_classes_that_are_known() -> None:
    run = graph_run("sage", positions=False)
    batch = sample_graphs(run)
    labels, _ = split_labels(batch.inputs()[1])
    graphs, nodes = len(batch.atoms), len(batch.graph_N)
    scores = torch.randn(graphs, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    predicted = Predictions(properties_GP=scores, atom_properties_NP=torch.tensor([[1.0, 0.0]]).expand(nodes, 2))
    sums = error_sums(
        run.model,
        predicted,
        labels,
        source_G=batch.source_G,
        sources=1,
        graph_N=batch.graph_N,
        target_E=batch.edges_2E[1],
        atoms_G=torch.from_numpy(batch.atoms),
    )
    rows = {row.quantity: row for row in error_rows(run, sums)}
    assert batch.properties_GP is not None and batch.atom_properties_NP is not None
    phase_G = batch.properties_GP[:, 1].nan_to_num(nan=-1).int().tolist()
    pairs = [(a, b) for a, b in zip(phase_G, scores[:, 1:].argmax(1).tolist(), strict=True) if a >= 0]
    finds = []
    for one in range(3):
        right = sum(a == b == one for a, b in pairs)
        said, true = sum(b == one for _, b in pairs), sum(a == one for a, _ in pairs)
        finds += [2 * right / (said + true)] if said + true else []
    accuracy = sum(a == b for a, b in pairs) / len(pairs)
    assert rows["phase"].numbers == len(pairs) and rows["phase"].accuracy == pytest.approx(accuracy)
    assert rows["phase"].f1 == pytest.approx(sum(finds) / len(finds))
    no = float((batch.atom_properties_NP[:, 0] == 0).sum() / (~batch.atom_properties_NP[:, 0].isnan()).sum())
    # Always the first class: its F1 is 2 p / (1 + p), that of the other is 0.
    assert rows["hot"].accuracy == pytest.approx(no) and rows["hot"].f1 == pytest.approx(no / (1.0 + no))
    assert rows["stiffness"].accuracy is None


def test_models_say_what_does_not_go_with_graphs() -> None:
    run = graph_run("sage", positions=False)
    for changes, message in (
        ({"body": "painn"}, "needs directions of edges"),
        ({"body": "mace"}, "sees elements"),
        ({"energy": {}}, "energy is of atoms"),
        ({"graph": None}, "edge_properties need a model with graph"),
        ({"graph": {"nodes": 3, "nodes_scale": [1.0]}}, "nodes_scale has 1 values"),
        ({"properties": {"names": ["a"], "classes": {"b": 2}}}, "b is not among names"),
    ):
        with pytest.raises(ValueError, match=message):
            type(run.model).model_validate({**run.model.model_dump(), **changes})
    for changes, message in (
        ({"graph": None, "edge_properties": {}}, "has no graph, and the model has model.graph"),
        ({"properties": {"stiffness": "1", "phase": "1"}}, "phase has 0 classes in source main, 3 in the model"),
        ({"graph": {"node_features": ["a"]}}, None),
    ):
        source = {**SOURCE, **changes}
        data = run.data.model_validate({**run.data.model_dump(), "sources": [source]})
        problems = [problem.text for problem in run.model_copy(update={"data": data}).find_problems()]
        assert (not problems) if message is None else any(message in one for one in problems)
