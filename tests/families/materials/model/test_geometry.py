"""Edge vectors, envelopes, radial functions and triplets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atom_graphs import Structure, batch_of, edges_of, random_structure
from phalanx.families.materials.model.geometry import (
    cutoff_envelope,
    edge_geometry,
    edge_vectors,
    find_triplets,
    radial_functions,
)
from small_networks import small_model

F64 = torch.float64


def test_a_shift_belongs_to_the_target() -> None:
    positions = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    vectors = edge_vectors(positions, torch.tensor([[0, 1], [1, 0]]), torch.tensor([[10.0, 0, 0], [0, 0, 0]]))
    assert vectors.tolist() == [[11.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]


@pytest.mark.parametrize(("kind", "derivatives"), [("polynomial", 2), ("cosine", 1)])
def test_envelopes_fade_as_smoothly_as_they_promise(kind: str, derivatives: int) -> None:
    config = small_model("painn", envelope=kind, cutoff=4.0)
    near = torch.tensor(4.0 - 1e-9, dtype=F64, requires_grad=True)
    value = cutoff_envelope(config, near)
    for order in range(derivatives + 1):
        assert abs(value.item()) < 1e-6, order
        (value,) = torch.autograd.grad(value, near, create_graph=True)
    assert abs(value.item()) > 0.1
    assert cutoff_envelope(config, torch.tensor([0.0, 4.0, 5.0])).tolist() == [1.0, 0.0, 0.0]
    inside = cutoff_envelope(config, torch.linspace(0.0, 4.0, 50, dtype=F64))
    assert (inside.diff() < 0.0).all()


def test_bessel_functions_are_orthogonal_and_vanish_at_the_cutoff() -> None:
    config = small_model("painn", n_radial=6, cutoff=3.0)
    distance = ((torch.arange(4000, dtype=F64) + 0.5) * (3.0 / 4000))[:, None]
    values = radial_functions(config, distance)
    overlap = (values * distance).T @ (values * distance) / 4000
    torch.testing.assert_close(overlap, 1.5 * torch.eye(6, dtype=F64))
    assert radial_functions(config, torch.tensor([[3.0]], dtype=F64)).abs().max() < 1e-14


def test_gaussians_stand_evenly_from_nothing_to_the_cutoff() -> None:
    config = small_model("painn", radial="gaussian", n_radial=4, cutoff=3.0)
    values = radial_functions(config, torch.tensor([[0.0], [1.0], [2.5]], dtype=F64))
    assert values[0, 0] == 1.0 and values[1, 1] == 1.0
    assert values[2, 2].item() == values[2, 3].item() == pytest.approx(np.exp(-0.125))


def wanted_triplets(structure: Structure) -> set[tuple[int, int]]:
    edges, shifts = edges_of(structure, 3.0)
    found = set()
    for first in range(edges.shape[1]):
        for second in range(edges.shape[1]):
            meets = edges[1, first] == edges[0, second]
            back = edges[0, first] == edges[1, second] and np.allclose(shifts[first], -shifts[second])
            if meets and not back:
                found.add((first, second))
    return found


@pytest.mark.parametrize("periodic", [False, True])
def test_triplets_are_all_pairs_of_edges_that_meet(periodic: bool) -> None:
    structure = random_structure(3, 3, periodic=periodic)
    batch = batch_of([structure], 3.0)
    order = torch.randperm(batch["edges_2E"].shape[1], generator=torch.Generator().manual_seed(0))
    vector_E3 = edge_vectors(batch["positions_N3"], batch["edges_2E"], batch["shifts_E3"])[order]
    geometry = edge_geometry(
        small_model("dimenet++"),
        vector_E3,
        batch["edges_2E"][:, order],
        batch["species_N"],
        batch["graph_N"],
        dtype=F64,
        graphs=1,
    )
    found = find_triplets(geometry)
    pairs = list(zip(order[found.incoming_T].tolist(), order[found.outgoing_T].tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) and set(pairs) == wanted_triplets(structure)
    # The angle at the middle atom, between the bonds that leave it.
    incoming, outgoing = (geometry.unit_E3[index] for index in found[:2])
    torch.testing.assert_close(found.cosine_T1[:, 0], (-incoming * outgoing).sum(1))
