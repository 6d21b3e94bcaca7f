"""Blocks against the layers of torch-geometric, given the same weights, where the two are to be the same function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import CGConv, SAGEConv
from torch_geometric.nn.models import SchNet

from atom_graphs import CUTOFF, batch_of, random_structure
from phalanx.families.materials.model.geometry import Geometry, edge_geometry, edge_vectors
from phalanx.families.materials.model.layers import Atoms, InvariantAttention
from phalanx.families.materials.model.message_passing.invariant_backbones import degree_weights
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import Branch, EnergyHead, GlobalAttention
from phalanx.nn.layers import Linear
from small_networks import filled_network, small_model


def batch() -> dict[str, Tensor]:
    return batch_of([random_structure(1, 6), random_structure(4, 8), random_structure(3, 1)])


def geometry_of(network: MaterialsNetwork, given: dict[str, Tensor]) -> Geometry:
    vectors = edge_vectors(given["positions_N3"], given["edges_2E"], given["shifts_E3"])
    return edge_geometry(
        network.config,
        vectors,
        given["edges_2E"],
        given["species_N"],
        given["graph_N"],
        dtype=torch.float64,
        graphs=len(given["cells_G33"]),
    )


def copy(theirs: nn.Module, ours: nn.Module) -> None:
    """Weight and bias, where there is one, of a linear layer."""
    assert isinstance(theirs, nn.Linear) and isinstance(ours, Linear)
    assert (theirs.bias is None) == (ours.bias is None)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        if theirs.bias is not None:
            theirs.bias.copy_(ours.bias)


def test_schnet_is_that_of_torch_geometric() -> None:
    """The whole model, energies and forces, without shifted softplus in the head: its last layers are left out."""
    config = small_model("schnet", radial="gaussian", envelope="cosine", mean_neighbors=1.0, n_layers=3, n_radial=7)
    network = filled_network(config)
    reference = SchNet(hidden_channels=8, num_filters=8, num_interactions=3, num_gaussians=7, cutoff=CUTOFF).double()
    with torch.no_grad():
        reference.embedding.weight[:11] = network.embedding.elements.weight
    for ours, theirs in zip(network.blocks, reference.interactions, strict=True):
        block = ours.messages
        for layer, twin in (
            (block.inward, theirs.conv.lin1),
            (block.filter._modules["0"], theirs.mlp[0]),
            (block.filter._modules["1"], theirs.mlp[2]),
            (block.outward, theirs.conv.lin2),
            (block.update, theirs.lin),
        ):
            copy(twin, layer)
    given = batch()
    geometry = geometry_of(network, given)
    found = network.features(geometry)[0].scalars_NC
    distance_E = geometry.vector_E3.norm(dim=1)
    wanted = reference.embedding(given["species_N"])
    for block in reference.interactions:
        wanted = wanted + block(wanted, given["edges_2E"], distance_E, reference.distance_expansion(distance_E))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert (wanted - reference.embedding(given["species_N"])).abs().max() > 0.1


def test_cgcnn_is_that_of_torch_geometric_with_faded_messages() -> None:
    network = filled_network(small_model("cgcnn", mean_neighbors=1.0))
    given = batch()
    geometry = geometry_of(network, given)
    block = network.blocks[0].messages

    class Faded(CGConv):
        def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            message: Tensor = super().message(x_i, x_j, edge_attr)
            return message * geometry.envelope_E1

    theirs = Faded(8, dim=5).double()
    gates = [
        torch.cat([layer.weight[rows] for layer in (block.target, block.source, block.edge)], dim=1)
        for rows in (slice(8), slice(8, 16))
    ]
    with torch.no_grad():
        for layer, weight, bias in zip((theirs.lin_f, theirs.lin_s), gates, block.target.bias.split(8), strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    x_NC = network.embedding(geometry).scalars_NC
    found = block(Atoms(x_NC), geometry).scalars_NC
    torch.testing.assert_close(found, theirs(x_NC, given["edges_2E"], geometry.radial_ER))
    assert (found - x_NC).abs().max() > 0.1


def test_sage_is_that_of_torch_geometric_with_messages_of_gin() -> None:
    network = filled_network(small_model("sage"))
    given = batch()
    geometry = geometry_of(network, given)
    block = network.blocks[0].messages
    _, target_E = given["edges_2E"]
    degree_N = torch.zeros(len(given["species_N"]), dtype=torch.float64).index_add(
        0, target_E, geometry.envelope_E1[:, 0]
    )
    filters_EC = geometry.radial_ER @ block.edge.weight.T + block.edge.bias

    class Counted(SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            faded_EC = torch.nn.functional.silu(x_j + filters_EC) * geometry.envelope_E1
            return faded_EC / (degree_N[target_E, None] + 1.0)

    theirs = Counted(8, 8, aggr="sum").double()
    with torch.no_grad():
        theirs.lin_l.weight.copy_(block.neighbours.weight)
        theirs.lin_l.bias.copy_(block.own.bias)
        theirs.lin_r.weight.copy_(block.own.weight)
    x_NC = network.embedding(geometry).scalars_NC
    found = block(Atoms(x_NC), geometry).scalars_NC
    torch.testing.assert_close(found, x_NC + torch.nn.functional.silu(theirs(x_NC, given["edges_2E"])))
    assert (found - x_NC).abs().max() > 0.1


def test_matrices_of_mfc_go_by_smooth_degrees() -> None:
    places = torch.linspace(0.0, 9.0, 91, dtype=torch.float64)[:, None].requires_grad_()
    weights = degree_weights(places, 5)
    assert torch.allclose(weights.sum(1), torch.ones(91, dtype=torch.float64)) and (weights > -1e-12).all()
    # No neighbours: the first matrix, and a little of the second; in the middle of splines the published choice weighs most.
    assert torch.allclose(weights[0], torch.tensor([5.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64) / 6.0)
    assert weights[[0, 10, 20, 30, 40, 80]].argmax(1).tolist() == [0, 1, 2, 3, 4, 4]
    assert torch.equal(weights[60:, 4], torch.ones(31, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(lambda x: degree_weights(x, 5), (places[3::7] + 0.05).detach().requires_grad_())
    assert degree_weights(places, 1).unique().tolist() == [1.0]


@pytest.mark.parametrize("length", [None, 9])
def test_global_attention_is_that_of_torch_on_each_structure(length: int | None) -> None:
    config = small_model("schnet", attention=GlobalAttention(heads=2), energy=EnergyHead(), branches=[Branch()])
    network = filled_network(config)
    layer = network.blocks[1].attention
    assert isinstance(layer, InvariantAttention)
    given = batch()
    geometry = geometry_of(network, given)._replace(max_atoms=length)
    x_NC = network.embedding(geometry).scalars_NC
    reference = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        reference.in_proj_weight.copy_(layer.qkv.weight)
        reference.in_proj_bias.copy_(layer.qkv.bias)
        reference.out_proj.weight.copy_(layer.output.weight)
        reference.out_proj.bias.copy_(layer.output.bias)
    normed = layer.norm(x_NC)
    parts = [normed[given["graph_N"] == graph][None] for graph in range(3)]
    wanted = torch.cat([reference(part, part, part)[0][0] for part in parts])
    torch.testing.assert_close(layer(x_NC, geometry), wanted)
