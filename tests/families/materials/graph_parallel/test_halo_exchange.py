"""Networks on shares of the atoms of their structures compute what one rank computes, and save and send what they should."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from atom_graphs import random_structure
from distributed_ranks import run_ranks
from graph_shares import crystal, worst_error
from halo_numbers import numbers_for_atoms, numbers_for_edges
from phalanx.families.materials.graph_parallel.cut_batches import _GATHER_ABOVE
from phalanx.families.materials.model_config import Electrostatics, EnergyHead, GlobalAttention
from small_networks import BODIES, LIKE_MACE_TORCH, small_model

MIXED = [random_structure(3, 7), crystal(30), random_structure(4, 1, source=1), random_structure(5, 5, periodic=True)]
LARGE = [crystal(125)]
TWO_ATOMS = [random_structure(6, 2)]
PLAIN: dict[str, Any] = {"dipole": None, "charges": None}
"""Heads whose work is small."""
CASES: dict[str, tuple[str, dict[str, Any], Any, int | None]] = {
    **{body: (body, {}, MIXED, None) for body in BODIES},
    "softmax attention": ("schnet", {"attention": GlobalAttention(heads=2)}, MIXED, None),
    "linear attention": ("painn", {"attention": GlobalAttention(heads=2, kind="linear")}, MIXED, None),
    "repulsion": ("painn", {"energy": EnergyHead(force_weight=1.0, stress_weight=1.0, repulsion="zbl")}, MIXED, None),
    "like mace-torch": ("mace", LIKE_MACE_TORCH, MIXED, None),
    "charges of points": ("painn", {"electrostatics": Electrostatics(smearing=0.0)}, MIXED, None),
    "wide charges": ("schnet", {"electrostatics": Electrostatics(shared=True)}, MIXED, None),
    "no energy": ("gatv2", {"energy": None}, MIXED, None),
    "no forces": ("dimenet++", {"energy": EnergyHead()}, MIXED, None),
    "in chunks": ("painn", {}, MIXED, 37),
    "two atoms": ("dimenet++", {"attention": GlobalAttention(heads=2)}, TWO_ATOMS, None),
    "large": ("painn", PLAIN, LARGE, None),
}
ON_FOUR = ("dimenet++", "in chunks", "two atoms", "large")
COUNTED = [*BODIES, "repulsion", "like mace-torch", "charges of points", "wide charges", "no forces", "large"]
"""Cases without attention, whose exchanges are those of neighbours."""


def compare_all(names: list[str], gather_above: float) -> dict[str, list[dict[str, float]]]:
    """On one rank: every case's figures of all ranks."""
    found: dict[str, list[dict[str, float]]] = {}
    with patch("phalanx.families.materials.graph_parallel.cut_batches._GATHER_ABOVE", gather_above):
        for name in names:
            body, changes, structures, chunk = CASES[name]
            mine = worst_error(small_model(body, **changes), structures, chunk)
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            found[name] = ranks
    return found


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, int], list[dict[str, float]]]:
    """By case and number of ranks; rows are sent one by one, so that they can be counted."""
    return {
        (name, world): ranks
        for world, names in ((2, list(CASES)), (4, list(ON_FOUR)))
        for name, ranks in run_ranks(compare_all, world, names, 1.0, timeout_s=300.0)[0].items()
    }


@pytest.mark.parametrize("case", [*((name, 2) for name in CASES), *((name, 4) for name in ON_FOUR)], ids=str)
def test_shares_compute_what_the_whole_computes(
    case: tuple[str, int], figures: dict[tuple[str, int], list[dict[str, float]]]
) -> None:
    for rank in figures[case]:
        assert rank["loss"] < 1e-12, rank
        assert rank["gradient"] < 1e-11, rank


def test_rows_of_whole_halos_come_in_one_gather() -> None:
    found = run_ranks(compare_all, 2, ["egnn", "dimenet++"], 0.0, timeout_s=100.0)[0]
    for ranks in found.values():
        assert max(rank["gradient"] for rank in ranks) < 1e-11
        assert {rank["sent"] for rank in ranks} == {0}
    assert 0.5 < _GATHER_ABOVE < 1.0


def test_a_rank_may_have_no_atoms(figures: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    assert sorted(rank["atoms"] for rank in figures["two atoms", 4]) == [0, 0, 1, 1]


@pytest.mark.parametrize("name", COUNTED)
def test_halos_send_what_the_closed_form_says(
    name: str, figures: dict[tuple[str, int], list[dict[str, float]]]
) -> None:
    body, changes, _, _ = CASES[name]
    config = small_model(body, **changes)
    assert config.energy is not None
    derived = config.energy.force_weight is not None
    atom, edge = (count(config, forces=derived, stress=derived) for count in (numbers_for_atoms, numbers_for_edges))
    ranks = figures[name, 2]
    assert sum(rank["sent"] for rank in ranks) == sum(r["halo"] * atom + r["edge_halo"] * edge for r in ranks) > 0


@pytest.mark.parametrize("world", [2, 4])
def test_saved_activations_fall_as_ranks_share_a_structure(
    world: int, figures: dict[tuple[str, int], list[dict[str, float]]]
) -> None:
    ranks = figures["large", world]
    assert max(rank["saved"] for rank in ranks) < 1.25 / world * ranks[0]["saved_whole"]
    assert sum(rank["atoms"] for rank in ranks) == 125


def wrong_owner() -> float:
    """With the forces on halos left where they are."""
    with patch(
        "phalanx.families.materials.graph_parallel.halo_exchange.HaloExchange.to_owners",
        lambda self, x: x[: self.halo.own],
    ):
        return worst_error(small_model("painn"), MIXED)["gradient"]


def test_forces_left_on_halos_are_found() -> None:
    assert run_ranks(wrong_owner, 2, timeout_s=100.0)[0] > 1e-3
