"""What a materials run reads: its training stream, its held-out structures, and what using the model needs of the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import ValidationError

from phalanx.config.model import Model
from phalanx.data.batch_stream import BatchStream
from phalanx.errors import DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.cost_fitting import Balancer, BalancerState
from phalanx.families.materials.data.balance import (
    divide_by_cost,
    divide_in_turn,
    step_balance,
    summarise_balance,
)
from phalanx.families.materials.data.given_graphs import FEATURES
from phalanx.families.materials.data.graph_batches import Columns, graph_columns
from phalanx.families.materials.data.graph_shards import PreparedSource, open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.in_memory.structure_store import StructureStore
from phalanx.families.materials.data.trained_elements import TrainedElements, elements_of, write_elements
from phalanx.families.materials.evaluation.prediction_errors import (
    SUMS,
    GraphErrors,
    GraphEvaluator,
    error_rows,
    evaluation_share,
    predicted_quantities,
)
from phalanx.families.materials.fitted_units import settle_units
from phalanx.families.materials.graph_parallel.cut_batches import ShareStream, cutting_of
from phalanx.families.materials.model.losses import learned_tasks
from phalanx.families.materials.model_config import (
    GRAPH_LEVELS,
    PROPERTY_HEADS,
    PROPERTY_LABELS,
    MaterialsModel,
    PropertyHead,
)
from phalanx.families.materials.step_kernels import kernel_notes
from phalanx.files import write_atomically
from phalanx.layout.apply import ParallelModel
from phalanx.layout.data_parallel.task_heads import branch_groups
from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.resizing import Resizes, match_rows
from phalanx.printable import write_stderr
from phalanx.remote_files import is_kept_elsewhere, weights_path
from phalanx.training.checkpointing import damaged_field
from phalanx.training.inputs import ExpectedEvaluation, Inputs, TrainableModel, Verification
from phalanx.training.metrics import RankTimes

BALANCE = "balance.json"
"""File of a run directory that says how evenly ranks share the work."""
_BALANCED_STEPS = 100


@dataclass(frozen=True)
class GraphInputs(Inputs):
    """Opened structures of a run."""

    balancer: Balancer | None = None
    """What divides structures by measured times, in a run on several ranks."""
    graphs: GraphBatchStream | None = None
    """Whole batches, of a run with several readers."""
    elements: TrainedElements | None = None
    """Atomic numbers that each branch will know when this run is over, where that can be said."""

    def watch(self, applied: ParallelModel) -> None:
        """See `Inputs.watch`."""
        if self.balancer is not None:
            self.balancer.watch(applied.stages[0])

    def after(self, step: int) -> Callable[[], RankTimes] | None:
        """See `Inputs.after`."""
        return None if self.balancer is None else self.balancer.after(step)

    def state(self) -> dict[str, Any]:
        """See `Inputs.state`."""
        return {} if self.balancer is None else self.balancer.state()

    def check(self, state: dict[str, Any], where: str) -> None:
        """See `Inputs.check`."""
        try:
            BalancerState.model_validate(state)
        except ValidationError as error:
            raise damaged_field(where, error) from error

    def restore(self, state: dict[str, Any]) -> None:
        """See `Inputs.restore`."""
        if self.balancer is not None:
            self.balancer.restore(state)

    def write(self, run_dir: Path) -> None:
        """Write the elements, and how evenly the first steps are divided, by the cost model; beside it, structures assigned
        by number alone."""
        if self.elements is not None:
            write_elements(self.elements, run_dir)
        # A single reader has nobody to share with.
        if self.graphs is None:
            return
        order, ranks, steps = self.graphs.order, self.graphs.ranks, range(1, _BALANCED_STEPS + 1)
        costs = [order.cost.whole(found.atoms, found.edges) for found in map(order.batch, steps)]
        content = {
            "ranks": ranks,
            "cost": asdict(order.cost),
            "by_cost": summarise_balance(step_balance(self.graphs.declared_division(step)) for step in steps).as_dict(),
            "by_number": summarise_balance(step_balance(divide_in_turn(cost, ranks, 1)) for cost in costs).as_dict(),
        }
        if self.graphs.branches is not None:
            apart = summarise_balance(step_balance(divide_by_cost(cost, ranks, 1)) for cost in costs)
            content["by_cost_without_branch_groups"] = apart.as_dict()
        write_atomically(run_dir / BALANCE, json.dumps(content, indent=1) + "\n")


class MaterialsInputs(TrainableModel):
    """See `training.inputs.TrainableModel`."""

    run: MaterialsRun

    def settle(self, run_dir: Path) -> Self:
        """Return the model with units that the run file leaves to the data; see `fitted_units`."""
        return self.rebind(settle_units(self.run, run_dir))

    def open_inputs(self, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
        """See `TrainableModel`."""
        run = self.run
        training = open_prepared(run.data, "train")
        _require_embedded_elements(run.model, training)
        if first:
            _tell_missing_references(run, training)
            _tell_periodic_dipoles(run, training)
            _require_whole_cells(run, training)
        columns = columns_of(run, training)
        held_out = open_prepared(run.data, "validation")
        store = None
        if run.data.store == "memory":
            store = _open_store(run, training, held_out, layout, mesh)
        budget, pin_memory = run.data.microbatch_cost, device.type != "cpu"
        graphs = GraphBatchStream(
            graph_order(training, run.data, seed=run.training.seed, global_batch=layout.global_batch),
            columns,
            parts=layout.accumulation,
            # What one device computes at a time is a share of a micro-batch.
            budget=None if budget is None else budget * layout.cp,
            oversized_alone=run.data.oversized == "alone",
            share_by=run.data.share_by,
            rank=mesh.data_rank,
            ranks=layout.data_ranks,
            branches=branch_groups(layout),
            store=store,
            prefetch=run.data.prefetch,
            # Whole batches that are cut stay in plain memory; their shares are pinned.
            pin_memory=pin_memory and layout.cp == 1,
        )
        stream: BatchStream = graphs
        if layout.cp > 1:
            stream = ShareStream(graphs, layout.accumulation, cutting_of(run, mesh.cp), pin_memory=pin_memory)
        held = None if store is None else store.held_out
        evaluator = GraphEvaluator(run, held_out, columns, device, run.evaluation.samples, held)
        # One rank is enough to read all files once.
        near = [source for source in training if not is_kept_elsewhere(source.path)]
        verification = Verification(near if run.data.verify and first else [])
        start = run.training.init_from
        known = elements_of(
            [source.manifest.statistics for source in training],
            run.model.branches,
            None if start is None else weights_path(start),
        )
        words = _count_in_words(training)
        if layout.data_ranks == 1:
            return GraphInputs(stream, evaluator, verification, in_words=words, elements=known)
        balancer = None
        by_block = run.model.energy is None and mesh.shards.size > 1
        # Where ranks wait for each other at every gather or exchange, a rank's own time cannot be told from that.
        if not by_block and mesh.cp.size == 1:
            # Sums over measured shares would not come out the same to the bit a second time.
            fits = run.data.share_by == "cost" and not run.training.deterministic
            every = run.data.fit_cost_every if fits else None
            waits = layout.zero >= 2 and mesh.shards.size > 1
            balancer = Balancer(graphs, mesh, device, every=every, each_waits=waits)
        return GraphInputs(
            stream, evaluator, verification, in_words=words, balancer=balancer, graphs=graphs, elements=known
        )

    def resizes(self, path: Path, before: Model) -> Resizes:
        """See `TrainableModel`: elements go by atomic number, rows of a head's last layer by the property's name."""
        model = self.run.model
        if not isinstance(before, MaterialsModel):
            return []
        found: Resizes = []
        if before.max_atomic_number != model.max_atomic_number:
            # Row 0 belongs to no element, and is matched too.
            there, here = ([str(z) for z in range(one.max_atomic_number + 1)] for one in (before, model))
            rows = match_rows(there, here, "elements")
            tables = ("*.elements.weight", "*.contraction.*", "*.skip_element.*", "*.message_element.*")
            found += [(pattern, rows) for pattern in tables]
        for name in PROPERTY_HEADS:
            old, new = getattr(before, name), getattr(model, name)
            if old is not None and new is not None and _output_names(old) != _output_names(new):
                rows = match_rows(_output_names(old), _output_names(new), "properties")
                found.append((f"head.{name}.copies.*.{new.layers - 1}.*", rows))
        return found

    def notes_of_kernels(self, device: torch.device) -> Sequence[str]:
        """See `TrainableModel`."""
        return kernel_notes(self.run, device, self.precision.compute_dtype)

    def check_inputs(self) -> str:
        """See `families.family.DataModel`."""
        run = self.run
        return _count_in_words(open_prepared(run.data, "train"))

    def expected_evaluation(self) -> ExpectedEvaluation | None:
        """See `TrainableModel`. Of a source that may lack labels, validation is taken to have some of each."""
        run = self.run
        sources = open_prepared(run.data, "validation")
        if not any(len(source) for source in sources):
            return None
        labelled = []
        for source in sources:
            manifest = source.manifest
            by_column = {label: getattr(manifest, head) for head, label in PROPERTY_LABELS.items()}
            labelled.append(
                [
                    len(source) > 0 and quantity.name in by_column.get(quantity.label, manifest.labels)
                    for quantity in predicted_quantities(run.model)
                ]
            )
        sums = torch.tensor(labelled, dtype=torch.float64)[:, :, None].expand(-1, -1, SUMS)
        errors = GraphErrors(0.0, 0, error_rows(run, sums))
        return ExpectedEvaluation(errors.as_dict(), frozenset(("loss", "mae", "rmse")))


def _require_embedded_elements(model: MaterialsModel, sources: Sequence[PreparedSource]) -> None:
    """Raise DataError where a source has an element that the model's embedding has no row for."""
    for source in sources:
        heaviest = max(source.manifest.statistics.elements)
        if heaviest > model.max_atomic_number:
            raise DataError(
                f"{source.path} has atomic number {heaviest}, model.max_atomic_number={model.max_atomic_number} is "
                f"less; set model.max_atomic_number={heaviest} or more"
            )


def _open_store(
    run: MaterialsRun,
    training: Sequence[PreparedSource],
    held_out: Sequence[PreparedSource],
    layout: ResolvedLayout,
    mesh: Mesh,
) -> StructureStore:
    """Return the store of the training structures, with those that evaluations read here. Every rank calls it."""
    validation = []
    if any(len(source) for source in held_out):
        found, mine, _ = evaluation_share(run.data, held_out, run.evaluation.samples, layout, mesh.data_rank)
        chosen = found.take(mine)
        validation = [(source, np.sort(chosen.item[chosen.source == number])) for number, source in enumerate(held_out)]
    return StructureStore(training, reader=mesh.data_rank, ranks=run.data.store_ranks, held_out=validation)


def _count_in_words(training: list[PreparedSource]) -> str:
    return f"{sum(len(source) for source in training):,} structures"


def columns_of(run: MaterialsRun, sources: Sequence[PreparedSource], *, all_needed: bool = True) -> Columns:
    """Return what batches must hold for this model. all_needed: see `graph_columns`."""
    model = run.model
    _check_features(run, sources)
    return graph_columns(
        sources,
        tasks=[task.label for task in learned_tasks(model)],
        properties={head: getattr(model, head).names for head in PROPERTY_HEADS if getattr(model, head)},
        all_needed=all_needed,
    )


def _output_names(head: PropertyHead) -> list[str]:
    """Return a name for each number that a head gives: of classes one each."""
    return [
        f"{name} {number}" if name in head.classes else name
        for name, columns in zip(head.names, head.columns, strict=True)
        for number in range(columns.stop - columns.start)
    ]


def _check_features(run: MaterialsRun, sources: Sequence[PreparedSource]) -> None:
    """Refuse features of another width than the model's. Raises DataError naming the source."""
    graph = run.model.graph
    for source in sources if graph is not None else ():
        for level in GRAPH_LEVELS:
            there = len(source.manifest.statistics.features.get(FEATURES[level], ()))
            if there != getattr(graph, level):
                raise DataError(
                    f"{source.path}: {FEATURES[level]} are {there} numbers, model.graph.{level}={getattr(graph, level)}; "
                    f"set model.graph.{level}={there}, or name other arrays under graph of the source and prepare it again"
                )


def _require_whole_cells(run: MaterialsRun, sources: Sequence[PreparedSource]) -> None:
    """Refuse slabs and wires where charges act at any distance, before training comes upon one. Raises DataError."""
    if run.model.electrostatics is None:
        return
    for source in sources:
        for number in range(len(source.manifest.shards)):
            periodic_G3 = source.shard(number)["periodic"]
            partly = int((periodic_G3.any(axis=1) & ~periodic_G3.all(axis=1)).sum())
            if partly:
                raise DataError(
                    f"{source.path}: {partly:,} structures of shard {number} are periodic in one or two directions, for "
                    "which model.electrostatics has no sum; give them a third cell vector with empty space, or leave "
                    "model.electrostatics out"
                )


def _tell_missing_references(run: MaterialsRun, sources: Sequence[PreparedSource]) -> None:
    """Warn of each branch that has reference energies, but not of all elements whose energies it learns."""
    single = len(run.model.branches) == 1
    for number, branch in enumerate(run.model.branches):
        if run.model.energy is None or not branch.reference_energies:
            continue
        own = sources if single else sources[number : number + 1]
        energies = [source.manifest.statistics for source in own if "energy" in source.manifest.labels]
        present = frozenset[int]().union(*(known.elements for known in energies))
        missing = sorted(present - frozenset(map(int, branch.reference_energies)))
        if missing:
            write_stderr(
                f"warning: model.branches: {branch.name}.reference_energies has none of atomic number "
                f"{', '.join(map(str, missing))}, which its structures have: there an atom's energy begins at 0 eV; phalanx "
                "data prepare-graphs says what fits"
            )


def _tell_periodic_dipoles(run: MaterialsRun, sources: Sequence[PreparedSource]) -> None:
    """Write a line to stderr for each source, prepared by an older version, of whose dipoles some are not learned."""
    for source in sources:
        if run.model.dipole is None or "dipole" not in source.manifest.labels:
            continue
        left_out = 0
        for number in range(len(source.manifest.shards)):
            shard = source.shard(number)
            left_out += int((shard["periodic"].any(axis=1) & np.isfinite(shard["dipole"]).any(axis=1)).sum())
        if left_out:
            write_stderr(
                f"warning: {source.path}: {left_out:,} dipoles of periodic structures take no part in training and "
                "evaluation, as they depend on which images the atoms are written as; prepare it again without them"
            )
