"""Small networks of the materials family for tests, with parameters filled as training would fill them."""

from __future__ import annotations

from typing import Any, get_args

import torch

from atom_graphs import CUTOFF
from phalanx.families.materials.declare import DeclaredMaterials
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import (
    BackboneName,
    Branch,
    ChargeHead,
    DipoleHead,
    EnergyHead,
    MaceOptions,
    MaterialsModel,
    NequipOptions,
    PropertyHead,
)
from phalanx.layout.initial_values import initialise_parameters

BODIES: tuple[str, ...] = get_args(BackboneName)

LIKE_MACE_TORCH: dict[str, Any] = {
    "mace": MaceOptions(
        degree=2,
        correlation=2,
        radial_width=6,
        radial_layers=3,
        fades="functions",
        element_mixing="matrices",
        first_skip=False,
        density=True,
    ),
    "distance_transform": "agnesi",
    "energy": EnergyHead(force_weight=1.0, stress_weight=1.0, width=3, every_block=True, repulsion="mace"),
}
"""A MACE as mace-torch has it."""


def small_model(body: str, **changes: Any) -> MaterialsModel:
    """Two layers of eight channels with every head and two branches of different units."""
    fields: dict[str, Any] = {
        "n_layers": 2,
        "d_model": 8,
        "body": body,
        "cutoff": CUTOFF,
        "n_radial": 5,
        "mean_neighbors": 6.0,
        "max_atomic_number": 10,
        "energy": EnergyHead(force_weight=1.0, stress_weight=1.0),
        "charges": ChargeHead(),
        "dipole": DipoleHead(),
        "properties": PropertyHead(names=["gap", "moment"]),
        "atom_properties": PropertyHead(names=["spin"]),
        "branches": [
            Branch(name="first", reference_energies={"1": -1.0, "8": -3.5}),
            Branch(name="second", energy_scale=2.0, properties_shift=[1.0, -2.0], properties_scale=[3.0, 0.5]),
        ],
    }
    if body == "nequip":
        fields["nequip"] = NequipOptions(degree=2, radial_width=8)
    if body == "mace":
        fields["mace"] = MaceOptions(degree=2, hidden_degree=1, correlation=3, radial_width=8)
    return MaterialsModel.model_validate({**fields, **changes})


def filled_network(
    config: MaterialsModel, *, seed: int = 1, dtype: torch.dtype = torch.float64, **options: Any
) -> MaterialsNetwork:
    """The network with parameters in `dtype`; biases, which begin at 0, get values too, so that tests see them."""
    with torch.device("meta"):
        network = MaterialsNetwork(config, dtype=dtype, **options).to(dtype)
    network.to_empty(device="cpu")
    parameters = dict(network.named_parameters())
    initialise_parameters(parameters, DeclaredMaterials(config, 1).initial_rules(), seed)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(parameters.items()):
            if name.endswith((".bias", ".eps")):
                parameter += 0.1 * torch.cos(torch.arange(parameter.numel(), dtype=dtype) + number).view_as(parameter)
            if ".coordinate." in name:
                parameter *= 30.0
    return network
