"""Errors of materials models on a split: structures are read once for all models that run side by side.

Over several ranks each takes structures of about the same cost, and all of them get the whole result, in one order
whatever the number of ranks and however structures were batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from phalanx.ensemble.members import ALONE, Member, Share
from phalanx.ensemble.residuals import Float32Array, Int64Array, Residuals
from phalanx.errors import CheckpointError, DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.balance import CostModel, divide_within_budget
from phalanx.families.materials.data.graph_batches import Collator, GraphBatch
from phalanx.families.materials.data.graph_shards import Located, PreparedSource, Split, open_prepared, spread_evenly
from phalanx.families.materials.data.trained_elements import trained_elements, untrained_by_source
from phalanx.families.materials.ensemble.joint_predictions import NetworkStack
from phalanx.families.materials.evaluation.network_predictions import load_network, require_materials
from phalanx.families.materials.evaluation.prediction_errors import Quantity, predicted_quantities
from phalanx.families.materials.inputs import columns_of
from phalanx.families.materials.model.losses import Predictions, learned_tasks, split_labels
from phalanx.families.materials.model_config import PROPERTY_HEADS
from phalanx.families.registry import bind
from phalanx.layout.resolve import one_rank_microbatch

Progress = Callable[[int, int], None]
Array = TypeVar("Array", Float32Array, Int64Array)


def member_residuals(
    members: Sequence[Member],
    split: Split,
    device: torch.device,
    *,
    samples: int | None = None,
    side_by_side: int | None = None,
    share: Share = ALONE,
    progress: Progress = lambda done, total: None,
) -> list[Residuals]:
    """Return errors of all members on a split, one entry for each data set and quantity that has labels. Every rank calls
    it.

    samples: structures over all sources, spread evenly over each; None takes all. side_by_side: most members on a device at
    a time; by default as many as keep members times structures within what a micro-batch of training holds. progress:
    called with structures times members done, of this rank, and in all.

    Raises DataError where the split is empty or holds an element that a member does not know, CheckpointError for a member
    that cannot be read or whose predictions are not finite.
    """
    runs = [materials_run(member) for member in members]
    sources = open_prepared(runs[0].data, split)
    found = spread_evenly(sources, samples)
    if not len(found.item):
        raise DataError(
            f"the {split} split in {runs[0].data.prepared} is empty; prepare with data.{split}_fraction above 0"
        )
    reader = _Reader(sources, runs, split, found, device)
    collected = _Collected(len(sources), predicted_quantities(runs[0].model))
    abreast = side_by_side or reader.fitting_members()
    one_branch = len(runs[0].model.branches) == 1
    total, done = len(members) * len(reader.rows(1, share)[0]), 0
    for first in range(0, len(members), abreast):
        chosen = members[first : first + abreast]
        stack = NetworkStack([load_network(member.checkpoint, device).model for member in chosen])
        collected.begin(len(chosen))
        rows, counts = reader.rows(len(chosen), share)
        start = 0
        for count in counts:
            batch, structures = reader.read(rows[start : start + count])
            x, inputs = batch.inputs()
            if one_branch:
                # A single branch takes all data sets, whatever their numbers.
                inputs["source_G"] = torch.zeros_like(batch.source_G)
            labels, seen = split_labels(inputs)
            forces, stress = labels.forces_N3 is not None, labels.stress_G33 is not None
            collected.add(stack.predict(x, **seen, forces=forces, stress=stress), batch, structures)
            start, done = start + count, done + count * len(chosen)
            progress(done, total)
    return _join_residuals(collected, members, runs[0], share)


def untrained_elements(
    members: Sequence[Member], split: Split, samples: int | None = None
) -> dict[str, dict[int, int]]:
    """Count, by source and atomic number, structures that `member_residuals` takes with an element that the branch of the
    source was not trained on in some member, of those that say what they were trained on."""
    run = materials_run(members[0])
    sources = open_prepared(run.data, split)
    found, names = spread_evenly(sources, samples), [branch.name for branch in run.model.branches]
    known = [trained for trained in (trained_elements(member.checkpoint) for member in members) if trained is not None]
    return untrained_by_source(sources, found, names, known) if known else {}


def materials_run(member: Member) -> MaterialsRun:
    """Return the run of a member.

    Raises CheckpointError for a model of another family, and for one whose predictions have no mean over members.
    """
    run = require_materials(member.run, member.checkpoint)
    heads = [getattr(run.model, name) for name in PROPERTY_HEADS]
    if run.model.graph is not None or any(head is not None and head.classes for head in heads):
        raise CheckpointError(
            f"{member.checkpoint}: ensembles are of numbers of atoms, and its model has graph or classes; phalanx errors "
            "measures each of such models"
        )
    return run


class _Reader:
    """Batches of held-out structures that fit beside the members."""

    def __init__(
        self,
        sources: list[PreparedSource],
        runs: Sequence[MaterialsRun],
        split: Split,
        found: Located,
        device: torch.device,
    ) -> None:
        self._collate = Collator(sources, columns_of(runs[0], open_prepared(runs[0].data, "train")))
        self._found = found
        self._device = device
        # All members predict each structure, so the one that knows fewest elements decides.
        self._heaviest = min(run.model.max_atomic_number for run in runs)
        self._split = split
        data = runs[0].data
        self._cost = CostModel.of(data.cost)
        self._costs = self._cost.whole(found.atoms, found.edges)
        mean = float(self._costs.mean()) * self._cost.unit
        # Runs without a budget hold a micro-batch of structures of mean cost.
        self._budget = min(run.data.microbatch_cost or mean * one_rank_microbatch(bind(run)) for run in runs)
        self._members = len(runs)

    def fitting_members(self) -> int:
        """Return how many members the largest structure leaves room for side by side, at least one."""
        return max(1, min(self._members, int(self._budget / (float(self._costs.max()) * self._cost.unit))))

    def rows(self, members: int, share: Share) -> tuple[Int64Array, list[int]]:
        """Return this rank's structures, batch by batch, and how many each batch takes for so many members abreast."""
        most = max(1, int(self._budget / members / self._cost.unit))
        division = divide_within_budget(self._costs, share.ranks, self._costs, most)
        mine = np.flatnonzero(division.rank == share.rank)
        part = division.part[mine]
        mine = mine[np.argsort(part, kind="stable")]
        # Ranks wait for each other only at the end, so that each may leave out micro-batches that are empty.
        counts = np.bincount(part)
        return mine, counts[counts > 0].tolist()

    def read(self, rows: Int64Array) -> tuple[GraphBatch, Int64Array]:
        """Return the batch of these structures, and the item of each."""
        found = self._found.take(rows)
        batch = self._collate(found, (len(rows),))
        heaviest = int(batch.species_N.max()) if len(batch.species_N) else 0
        if heaviest > self._heaviest:
            raise DataError(
                f"a structure of the {self._split} split has atomic number {heaviest}; a member knows elements up to "
                f"model.max_atomic_number={self._heaviest} only"
            )
        return batch.to(self._device), found.item


class _Collected:
    """Errors as they come in, by source and quantity; members in groups, one after another."""

    def __init__(self, sources: int, wanted: Sequence[Quantity]) -> None:
        self.keys = [(source, quantity) for source in range(sources) for quantity in wanted]
        self.groups: list[list[list[tuple[Float32Array, Int64Array]]]] = []
        self._sizes: list[int] = []

    def begin(self, members: int) -> None:
        """Take what comes now for errors of the next `members` members."""
        self.groups.append([[] for _ in self.keys])
        self._sizes.append(members)

    def add(self, predicted: Predictions, batch: GraphBatch, structures: Int64Array) -> None:
        """Add the errors of one batch. predicted: with a first dimension of members; structures: item of each graph."""
        structures_G = torch.from_numpy(structures).to(batch.graph_N.device)
        for (source, quantity), parts in zip(self.keys, self.groups[-1], strict=True):
            label, value = getattr(batch, quantity.label), getattr(predicted, quantity.label)
            if label is None or value is None:
                continue
            if quantity.column is not None:
                label, value = label[:, quantity.column], value[..., quantity.column]
            error = value.double() - label.double()
            if quantity.label == "energy_G":
                # Energies count per atom.
                error = error / torch.from_numpy(batch.atoms).to(error.device).clamp(min=1)
            here, whose = batch.source_G == source, structures_G
            if "_N" in quantity.label:
                here, whose = (of_graph.index_select(0, batch.graph_N) for of_graph in (here, whose))
            rows = label.reshape(len(label), -1)
            there = ~rows.isnan() & here[:, None]
            error_Mn = error.reshape(len(error), len(label), -1)[:, there]
            structure_n = whose[:, None].expand_as(rows)[there]
            parts.append((error_Mn.float().cpu().numpy(), structure_n.cpu().numpy()))

    def joined(self, key: int, share: Share) -> tuple[Float32Array, Int64Array]:
        """Return errors [M, n] and structures [n] of one key, of all ranks, ordered by structure."""
        errors, structures = [], np.zeros(0, np.int64)
        for group, size in zip(self.groups, self._sizes, strict=True):
            parts = group[key]
            mine = np.concatenate([part for part, _ in parts], axis=1) if parts else np.zeros((size, 0), np.float32)
            whose = np.concatenate([whose for _, whose in parts]) if parts else np.zeros(0, np.int64)
            if share.ranks > 1:
                mine, whose = _gather_columns(mine, share), _gather_columns(whose[None], share)[0]
            # By structure: the order must not tell how many ranks there were, or how structures were batched.
            order = np.argsort(whose, kind="stable")
            errors.append(mine[:, order])
            structures = whose[order]
        return np.concatenate(errors), structures


def _gather_columns(mine: Array, share: Share) -> Array:
    """Return what all ranks have [k, n], joined in the order of ranks."""
    size = torch.tensor([mine.shape[1]])
    sizes = [torch.zeros_like(size) for _ in range(share.ranks)]
    dist.all_gather(sizes, size)
    widest = int(torch.stack(sizes).max())
    # all_gather takes one shape of all ranks.
    padded = torch.zeros((mine.shape[0], widest), dtype=torch.from_numpy(mine[:, :0]).dtype)
    padded[:, : mine.shape[1]] = torch.from_numpy(mine)
    gathered = [torch.empty_like(padded) for _ in range(share.ranks)]
    dist.all_gather(gathered, padded)
    return np.concatenate([part.numpy()[:, : int(n)] for part, n in zip(gathered, sizes, strict=True)], axis=1)


def _join_residuals(
    collected: _Collected, members: Sequence[Member], run: MaterialsRun, share: Share
) -> list[Residuals]:
    learned = {task.label for task in learned_tasks(run.model)}
    found = []
    for number, (source, quantity) in enumerate(collected.keys):
        errors_Mn, structures_n = collected.joined(number, share)
        if not len(structures_n):
            continue
        strange = np.flatnonzero(~np.isfinite(errors_Mn).all(axis=1))
        if strange.size:
            raise CheckpointError(
                f"{members[strange[0]].checkpoint}: it predicts {quantity.name} that are no finite numbers; leave it out"
            )
        name = run.data.sources[source].name
        found.append(Residuals(name, quantity.name, quantity.unit, quantity.label in learned, errors_Mn, structures_n))
    return found
