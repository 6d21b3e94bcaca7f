"""Errors of predictions in physical units, as sums with counts: what batches and ranks give adds up to the whole.

Unlike losses they know no weights and no scales: an energy counts per atom, a property is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.families.materials.model.losses import Labels, Predictions
from phalanx.families.materials.model_config import MaterialsModel

SUMS = 3
"""Of each quantity: absolute errors, squared errors, and how many numbers these are sums of."""


@dataclass(frozen=True)
class Quantity:
    """Something predicted whose errors make sense together."""

    name: str
    label: str
    """Field of `Labels`."""
    unit: str
    """Empty for properties, which are in eV, A and e, whatever they are."""
    column: int | None = None
    """Column of the label; None takes all components alike."""


def quantities(config: MaterialsModel) -> list[Quantity]:
    """All that the model predicts, forces and stress included where it has an energy, learned or not."""
    found: list[Quantity] = []
    if config.energy is not None:
        found.append(Quantity("energy", "energy_G", "eV/atom"))
        found.append(Quantity("forces", "forces_N3", "eV/A"))
        found.append(Quantity("stress", "stress_G33", "eV/A^3"))
    if config.charges is not None:
        found.append(Quantity("charges", "charges_N", "e"))
    if config.dipole is not None:
        found.append(Quantity("dipole", "dipole_G3", "e*A"))
    for head, label in ((config.properties, "properties_GP"), (config.atom_properties, "atom_properties_NP")):
        if head is not None:
            found += [Quantity(name, label, "", column) for column, name in enumerate(head.names)]
    return found


def error_sums(
    config: MaterialsModel,
    predicted: Predictions,
    labels: Labels,
    *,
    source_G: Tensor,
    sources: int,
    graph_N: Tensor,
    atoms_G: Tensor,
) -> Tensor:
    """Sums by data set and quantity over the labels that are there: float64 [sources, Q, SUMS].

    source_G: int64, the data set of each graph. Components of forces, stresses and dipoles count one each.
    """
    rows = [_sums(quantity, predicted, labels, source_G, sources, graph_N, atoms_G) for quantity in quantities(config)]
    return torch.stack(rows, dim=1)


def _sums(
    quantity: Quantity,
    predicted: Predictions,
    labels: Labels,
    source_G: Tensor,
    sources: int,
    graph_N: Tensor,
    atoms_G: Tensor,
) -> Tensor:
    sums = torch.zeros((sources, SUMS), dtype=torch.float64, device=source_G.device)
    label, value = getattr(labels, quantity.label), getattr(predicted, quantity.label)
    if label is None or value is None:
        return sums
    if quantity.column is not None:
        label, value = label[:, quantity.column], value[:, quantity.column]
    there, error = _rows(~label.isnan()), _rows(value.double() - label.double())
    if quantity.label == "energy_G":
        error = error / atoms_G.clamp(min=1)[:, None]
    error = torch.where(there, error, 0.0)
    source = source_G.index_select(0, graph_N) if "_N" in quantity.label else source_G
    each = torch.stack((error.abs().sum(1), error.square().sum(1), there.sum(1).double()), dim=1)
    return sums.index_add(0, source, each)


def _rows(values: Tensor) -> Tensor:
    """One row for each graph or atom."""
    return values.flatten(1) if values.dim() > 1 else values[:, None]
