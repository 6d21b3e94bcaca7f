"""Labels, which of them are there, and losses as sums over them; counts come from labels alone, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.families.materials.model.geometry import Constant, cell_volumes
from phalanx.families.materials.model_config import PROPERTY_LABELS, Loss, MaterialsModel, PropertyHead


@dataclass(frozen=True)
class Labels:
    """Labels of a batch; None where no graph has one, NaN where a graph lacks it. NaN takes no part in a loss."""

    energy_G: Tensor | None = None
    """eV; float64, since total energies are large beside their differences."""
    forces_N3: Tensor | None = None
    """eV/angstrom."""
    stress_G33: Tensor | None = None
    """eV/angstrom^3, positive under tension (as ASE has it); NaN for graphs without a cell."""
    charges_N: Tensor | None = None
    """Elementary charges."""
    dipole_G3: Tensor | None = None
    """Elementary charges times angstrom."""
    properties_GP: Tensor | None = None
    """In the data set's own units."""
    atom_properties_NP: Tensor | None = None
    """In the data set's own units."""
    edge_properties_EP: Tensor | None = None
    """In the data set's own units. Of these three, a property that is a class has the number of the class in its column."""


def split_labels(inputs: Mapping[str, Any]) -> tuple[Labels, dict[str, Any]]:
    """Return the labels among a batch's inputs by name, and all others."""
    names = {field.name for field in fields(Labels)}
    labels = {name: value for name, value in inputs.items() if name in names}
    return Labels(**labels), {name: value for name, value in inputs.items() if name not in names}


@dataclass(frozen=True)
class Predictions(Labels):
    """Predictions for a batch; None where the model has no head for it, or was not asked.

    A property that is a class has a score for each class, before the softmax (`PropertyHead.columns`).
    """

    atom_energies_N: Tensor | None = None
    """Share of each atom in the energy (eV), its element's reference energy included."""
    effective_charges_N: Tensor | None = None
    """Charges whose energy `model.electrostatics` adds (elementary charges)."""


@dataclass(frozen=True)
class Task:
    """One kind of label that a model learns."""

    label: str
    """Field of `Labels`."""
    loss: Loss
    weight: float


def learned_tasks(config: MaterialsModel) -> list[Task]:
    """Return what the model learns, in the order of its losses and of the counts."""
    found: list[Task] = []
    if config.energy is not None:
        energy = config.energy
        weights = (energy.weight, energy.force_weight, energy.stress_weight)
        labels = ("energy_G", "forces_N3", "stress_G33")
        found += [Task(name, energy.loss, w) for name, w in zip(labels, weights, strict=True) if w is not None]
    for head, name in (
        (config.charges, "charges_N"),
        (config.dipole, "dipole_G3"),
        *((getattr(config, head), label) for head, label in PROPERTY_LABELS.items()),
    ):
        if head is not None:
            found.append(Task(name, head.loss, head.weight))
    return found


def summed_losses(
    config: MaterialsModel,
    units: DatasetUnits,
    predicted: Predictions,
    labels: Labels,
    *,
    branch_G: Tensor,
    graph_N: Tensor,
    target_E: Tensor,
    atoms_G: Tensor,
    cells_G33: Tensor,
) -> Tensor:
    """Return weighted losses summed over the labels that are there: float64 [T], in the order of `learned_tasks`.

    branch_G: int64, the data set of each graph. atoms_G: atoms of each graph. cells_G33: its lattice vectors, angstrom.
    """
    sums = []
    for task in learned_tasks(config):
        label, value = getattr(labels, task.label), getattr(predicted, task.label)
        if label is None:
            # A loss for every task on every rank, so that sums over ranks pair up.
            sums.append(torch.zeros((), dtype=torch.float64, device=branch_G.device))
            continue
        branch = rows_of_graphs(task.label, branch_G, graph_N, target_E)
        head = _HEADS.get(task.label)
        classes_N: Tensor | float = 0.0
        if head is not None:
            options: PropertyHead = getattr(config, head)
            if options.classes:
                classes_N = _class_losses(options, units.class_weights[task.label], value, label)
                # One number a property, as labels have; those of classes count no further.
                value = torch.stack([value[:, columns.start] for columns in options.columns], dim=1)
                label = label.clone()
                for name in options.classes:
                    label[:, options.names.index(name)] = torch.nan
        # Chosen before any loss is formed: 0 * NaN would be NaN in the gradient.
        error = torch.where(label.isnan(), 0.0, value.double() - label.double())
        if task.label == "energy_G" and config.energy is not None and config.energy.per_atom:
            error = error / atoms_G.clamp(min=1)
        elif task.label == "stress_G33" and config.energy is not None and config.energy.stress_as == "virial":
            # eV an atom: a stress weighs little in a large cell, whose virial is as much of the energy as a small one's.
            error = error * (cell_volumes(cells_G33.double()) / atoms_G.clamp(min=1))[:, None, None]
        elif head is not None:
            error = error / units.property_scale(task.label, branch)
        each = (
            _pointwise_loss(task.loss, error).flatten(1).sum(1)
            if error.dim() > 1
            else _pointwise_loss(task.loss, error)
        )
        sums.append(task.weight * ((each + classes_N) * units.weight(branch)).sum())
    return torch.stack(sums)


def rows_of_graphs(label: str, of_graphs: Tensor, graph_N: Tensor, target_E: Tensor) -> Tensor:
    """Return a value of graphs for each row of the field `label`: graphs, atoms or edges, by the letter in its name."""
    if "_G" in label:
        return of_graphs
    of_atoms = of_graphs.index_select(0, graph_N)
    return of_atoms if "_N" in label else of_atoms.index_select(0, target_E)


def _class_losses(head: PropertyHead, weights: Mapping[str, Constant], value: Tensor, label: Tensor) -> Tensor:
    """Return the cross-entropy of each row [rows], summed over the properties that are classes and are known there."""
    total = value.new_zeros(len(value))
    for place, (name, columns) in enumerate(zip(head.names, head.columns, strict=True)):
        if name not in head.classes:
            continue
        weight = weights[name].on(value.device, value.dtype) if name in weights else None
        # -100 is what cross_entropy leaves out.
        known = label[:, place].nan_to_num(nan=-100.0).long()
        total = total + F.cross_entropy(value[:, columns], known, weight=weight, reduction="none")
    return total


def _pointwise_loss(loss: Loss, error: Tensor) -> Tensor:
    if loss == "mse":
        return error.square()
    if loss == "mae":
        return error.abs()
    return F.huber_loss(error, torch.zeros_like(error), reduction="none")


class DatasetUnits:
    """The tables of all branches. Rows are asked for by branch, int64; everything is float64."""

    def __init__(self, config: MaterialsModel) -> None:
        branches = config.branches
        energies = torch.zeros(len(branches), config.max_atomic_number + 1, dtype=torch.float64, device="cpu")
        for row, branch in zip(energies, branches, strict=True):
            for element, energy in branch.reference_energies.items():
                # Heavier elements than the table has cannot come in the data either.
                if int(element) <= config.max_atomic_number:
                    row[int(element)] = energy
        self._elements = energies.shape[1]
        self._reference = Constant(energies.flatten())
        self._energy_scale = _constant_table([branch.energy_scale for branch in branches])
        self._weight = _constant_table([branch.weight for branch in branches])
        self._property_scale: dict[str, Constant] = {}
        """Scale of each branch's properties, by label."""
        self._outputs: dict[str, tuple[Constant, Constant]] = {}
        """Shift and scale of each number of a head, by label."""
        self.class_weights: dict[str, dict[str, Constant]] = {}
        """Weights of the classes of properties that have such, by label and property."""
        for name, label in PROPERTY_LABELS.items():
            head: PropertyHead | None = getattr(config, name)
            if head is not None:
                size, counts = len(head.names), [columns.stop - columns.start for columns in head.columns]
                shifts = [getattr(branch, f"{name}_shift") or [0.0] * size for branch in branches]
                scales = [getattr(branch, f"{name}_scale") or [1.0] * size for branch in branches]
                self._property_scale[label] = _constant_table(scales)
                # Scores of a class share what its property has: 0 and 1.
                self._outputs[label] = (
                    _constant_table([np.repeat(row, counts).tolist() for row in shifts]),
                    _constant_table([np.repeat(row, counts).tolist() for row in scales]),
                )
                self.class_weights[label] = {
                    each: _constant_table(options.weights) for each, options in head.classes.items() if options.weights
                }

    def reference_energy(self, species_N: Tensor, branch_N: Tensor) -> Tensor:
        """Return the energy of each atom's element (eV)."""
        return _table_rows(self._reference, branch_N * self._elements + species_N)

    def energy_scale(self, branch: Tensor) -> Tensor:
        """Return what one unit of the energy head means (eV)."""
        return _table_rows(self._energy_scale, branch)

    def weight(self, branch: Tensor) -> Tensor:
        """Return the factor on the losses."""
        return _table_rows(self._weight, branch)

    def property_scale(self, label: str, branch: Tensor) -> Tensor:
        """Return what one unit of a property means, [rows, P]."""
        return _table_rows(self._property_scale[label], branch)

    def output_units(self, label: str, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return what 0 and one unit of each number of a head mean, both [rows, outputs]."""
        shift, scale = self._outputs[label]
        return _table_rows(shift, branch), _table_rows(scale, branch)


_HEADS = {label: head for head, label in PROPERTY_LABELS.items()}


def _constant_table(values: list[float] | list[list[float]]) -> Constant:
    return Constant(torch.tensor(values, dtype=torch.float64, device="cpu"))


def _table_rows(table: Constant, index: Tensor) -> Tensor:
    return table.on(index.device, torch.float64).index_select(0, index)
