"""Errors of predictions on held-out structures, by data set and in physical units.

Sums with counts: what batches and ranks give adds up to the whole. Unlike losses they know no weights and no scales: an
energy counts per atom, a property is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import DataError
from phalanx.families.materials.config import GraphData, MaterialsRun
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.balance import (
    CostModel,
    assign_by_head_group,
    divide_by_cost,
    divide_within_budget,
)
from phalanx.families.materials.data.graph_batches import Collator, Columns
from phalanx.families.materials.data.graph_shards import Located, PreparedSource, spread_evenly
from phalanx.families.materials.data.in_memory.held_structures import HeldStructures, held_rows
from phalanx.families.materials.model.losses import Labels, Predictions, learned_tasks, rows_of_graphs
from phalanx.families.materials.model_config import PROPERTY_LABELS, MaterialsModel, PropertyHead
from phalanx.layout.data_parallel.task_heads import branch_groups
from phalanx.layout.execute import Executor
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.inputs import Finding


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one quantity over one data set."""

    source: str
    quantity: str
    unit: str
    """Energies count per atom; empty for properties, which are in eV, A and e, whatever they are."""
    mae: float
    rmse: float
    numbers: int
    """Numbers that these are means of: three a force, nine a stress."""
    accuracy: float | None = None
    """Of a property that is a class: share of those that were right; mae is then that of the others, and rmse its root."""
    f1: float | None = None
    """Likewise: mean over classes, of those that occur or are predicted, of 2 right / (2 right + wrong + missed)."""

    @property
    def errors_in_words(self) -> str:
        """Return both errors with their unit, or accuracy and F1 of classes."""
        if self.accuracy is not None:
            return f"accuracy {self.accuracy:.4g} F1 {self.f1:.4g}"
        scale, unit = (1.0, self.unit) if not self.unit.startswith("eV") else (1e3, f"m{self.unit}")
        return f"MAE {self.mae * scale:.4g} RMSE {self.rmse * scale:.4g} {unit}".rstrip()

    def __str__(self) -> str:
        return f"{self.source} {self.quantity} {self.errors_in_words}"


@dataclass(frozen=True)
class GraphErrors:
    """Findings of an evaluation."""

    loss: float
    """Held-out loss, summed over tasks as the training loss is."""
    structures: int
    rows: list[ErrorRow]
    untrained: dict[str, dict[int, int]] | None = None
    """By source and atomic number: structures among these with an element that the source's branch was not trained on; None
    where that was not looked for."""
    unlabelled: dict[str, list[str]] | None = None
    """By source: what the model learned and these structures have no label of; None where that was not looked for."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        plain = {"loss": self.loss, "structures": self.structures, "errors": [asdict(row) for row in self.rows]}
        found = {"untrained_elements": self.untrained, "unlabelled": self.unlabelled}
        return plain | {name: known for name, known in found.items() if known is not None}


@dataclass(frozen=True)
class GraphEvaluator:
    """Predicts the same held-out structures again and again."""

    run: MaterialsRun
    sources: list[PreparedSource]
    """One split of each source, in the order of `data.sources`."""
    columns: Columns
    device: torch.device
    samples: int | None
    """Structures an evaluation reads over all sources, spread evenly over each; None for all."""
    held: Sequence[HeldStructures] | None = None
    """By source, structures in memory: all of `evaluation_share`; None reads files."""

    def evaluate(self, executor: Executor) -> list[Finding]:
        """Return the loss as in training, and errors of every quantity that a data set has labels of."""
        if not any(len(source) for source in self.sources):
            return []
        errors = self.errors(executor)
        words = f"held-out loss {errors.loss:.5g}; {'; '.join(map(str, errors.rows))}"
        return [Finding("evaluation", errors.as_dict(), words)]

    def errors(self, executor: Executor) -> GraphErrors:
        """Return the same, over at least one structure. Every rank calls it."""
        mesh = executor.mesh
        found, mine, parts = evaluation_share(
            self.run.data, self.sources, self.samples, executor.layout, mesh.data_rank
        )
        size = len(learned_tasks(self.run.model))
        sums = torch.zeros(
            size + len(self.sources) * len(predicted_quantities(self.run.model)) * SUMS,
            dtype=torch.float64,
            device=self.device,
        )
        counts = torch.zeros(size, dtype=torch.float64, device=self.device)
        start = 0
        # Every rank has the same number of micro-batches: a sharded model needs all ranks in each.
        for count in parts:
            rows = mine[start : start + count]
            start += count
            chosen = found.take(rows)
            held = None if self.held is None else held_rows(self.held, chosen, np.arange(count))
            batch = Collator(self.sources, self.columns)(chosen, (count,), held)
            heaviest = int(batch.species_N.max()) if len(batch.species_N) else 0
            if heaviest > self.run.model.max_atomic_number:
                raise DataError(
                    f"a held-out structure has atomic number {heaviest}, model.max_atomic_number="
                    f"{self.run.model.max_atomic_number} is less; set model.max_atomic_number={heaviest} or more"
                )
            share = executor.cut(batch, 1).to(self.device)
            x, inputs = share.inputs()
            result = executor.infer(x, {**inputs, "measured_sources": len(self.sources)}, share.sample_indices)
            assert result is not None
            sums += result
            # Ranks of `cp` share structures and would each count them.
            if mesh.reads_first:
                counts += share.target_counts()
        # Sums and counts, divided only at the end: means of ranks with unequal shares would weigh them wrongly.
        if mesh.world is not None:
            dist.all_reduce(sums, group=mesh.world)
            dist.all_reduce(counts, group=mesh.world)
        losses, errors = sums[:size], sums[size:].view(len(self.sources), -1, SUMS)
        loss = float((losses / counts.clamp(min=1)).sum())
        return GraphErrors(loss, len(found.numbers), error_rows(self.run, errors))


def evaluation_share(
    data: GraphData, sources: Sequence[PreparedSource], samples: int | None, layout: ResolvedLayout, reader: int
) -> tuple[Located, Int64Array, list[int]]:
    """Return the structures of an evaluation, those of data rank `reader` among them in the order in which it reads them,
    and how many of these each of its micro-batches has. samples: see `GraphEvaluator`."""
    found, model = spread_evenly(sources, samples), CostModel.of(data.cost)
    costs, ranks, groups = model.whole(found.atoms, found.edges), layout.data_ranks, branch_groups(layout)
    deal = None if groups is None else assign_by_head_group(groups, found.source)
    if data.microbatch_cost is not None:
        budget = int(data.microbatch_cost * layout.cp / model.unit)
        division = divide_within_budget(costs, ranks, costs, budget, deal)
    else:
        division = divide_by_cost(costs, ranks, -(-len(costs) // (ranks * layout.microbatch)), deal)
    mine = division.rows(reader)
    return found, mine, np.bincount(division.part[mine], minlength=division.loads.shape[1]).tolist()


def error_rows(run: MaterialsRun, errors: Tensor) -> list[ErrorRow]:
    """Return rows of the quantities that a data set has labels of. errors: [sources, Q, SUMS], see `error_sums`."""
    rows = []
    for source, table in zip(run.data.sources, errors.tolist(), strict=True):
        quantities = predicted_quantities(run.model)
        for place, (quantity, (absolute, squared, numbers)) in enumerate(zip(quantities, table, strict=True)):
            if not numbers or quantity.one_class is not None:
                continue
            mae, rmse = absolute / numbers, (squared / numbers) ** 0.5
            row = ErrorRow(source.name, quantity.name, quantity.unit, mae, rmse, int(numbers))
            if quantity.classes:
                # Rows of its classes follow it.
                of_classes = table[place + 1 : place + 1 + quantity.classes]
                found = [right / (right + wrong) for right, wrong, _ in of_classes if right + wrong]
                row = replace(row, accuracy=1.0 - mae, f1=sum(found) / len(found))
            rows.append(row)
    return rows


SUMS = 3
"""Sums of each quantity: absolute errors, squared errors, and how many numbers these are sums of."""


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
    scores: slice | None = None
    """Numbers of the head that it is read from; None for the label's components."""
    classes: int = 0
    """Number of classes; 0 of a number."""
    one_class: int | None = None
    """The class whose finds are counted; None counts errors."""


def predicted_quantities(config: MaterialsModel) -> list[Quantity]:
    """Return all that the model predicts, forces and stress included where it has an energy, learned or not."""
    found: list[Quantity] = []
    if config.energy is not None:
        found.append(Quantity("energy", "energy_G", "eV/atom"))
        found.append(Quantity("forces", "forces_N3", "eV/A"))
        found.append(Quantity("stress", "stress_G33", "eV/A^3"))
    if config.charges is not None:
        found.append(Quantity("charges", "charges_N", "e"))
    if config.dipole is not None:
        found.append(Quantity("dipole", "dipole_G3", "e*A"))
    for field, label in PROPERTY_LABELS.items():
        head: PropertyHead | None = getattr(config, field)
        for column, (name, scores) in enumerate(zip(head.names, head.columns, strict=True) if head else ()):
            count = head.classes[name].count if head and name in head.classes else 0
            found.append(Quantity(name, label, "", column, scores, count))
            found += [Quantity(name, label, "", column, scores, count, number) for number in range(count)]
    return found


def error_sums(
    config: MaterialsModel,
    predicted: Predictions,
    labels: Labels,
    *,
    source_G: Tensor,
    sources: int,
    graph_N: Tensor,
    target_E: Tensor,
    atoms_G: Tensor,
) -> Tensor:
    """Return sums by data set and quantity over the labels that are there: float64 [sources, Q, SUMS].

    source_G: int64, the data set of each graph. Components of forces, stresses and dipoles count one each.
    """
    rows = []
    for quantity in predicted_quantities(config):
        sums = torch.zeros((sources, SUMS), dtype=torch.float64, device=source_G.device)
        label, value = getattr(labels, quantity.label), getattr(predicted, quantity.label)
        if label is not None and value is not None:
            if quantity.column is not None and quantity.scores is not None:
                label, value = label[:, quantity.column], value[:, quantity.scores]
                value = value.argmax(1) if quantity.classes else value[:, 0]
            there, error = _as_rows(~label.isnan()), _as_rows(value.double() - label.double())
            if quantity.label == "energy_G":
                error = error / atoms_G.clamp(min=1)[:, None]
            # Not a product with the mask: NaN times 0 is NaN.
            error = torch.where(there, error, 0.0)
            source = rows_of_graphs(quantity.label, source_G, graph_N, target_E)
            each = torch.stack((error.abs().sum(1), error.square().sum(1), there.sum(1).double()), dim=1)
            if quantity.classes:
                each = _count_class(label, value, quantity.one_class)
            sums = sums.index_add(0, source, each)
        rows.append(sums)
    return torch.stack(rows, dim=1)


def _count_class(label: Tensor, value: Tensor, number: int | None) -> Tensor:
    """Return for each row whether its class was missed, again, and whether it is known; of one class: twice whether it was
    found rightly, whether it was found wrongly or missed, and whether it is the row's."""
    there, right = ~label.isnan(), label == value
    if number is None:
        counted = (there & ~right, there & ~right, there)
        return torch.stack(counted, dim=1).double()
    is_one, said = label == number, there & (value == number)
    return torch.stack((2.0 * (is_one & said), (is_one ^ said).double(), is_one.double()), dim=1)


def _as_rows(values: Tensor) -> Tensor:
    """One row for each graph or atom."""
    return values.flatten(1) if values.dim() > 1 else values[:, None]
