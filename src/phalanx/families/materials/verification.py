"""Materials runs to verify with: structures that are a function of their number, and networks small enough for a laptop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.counter_random import sample_bits, sample_normals
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.balance import assign_by_head_group
from phalanx.families.materials.data.given_graphs import FEATURES
from phalanx.families.materials.data.graph_batches import FEATURE_FIELDS, LABELS, GraphBatch
from phalanx.families.materials.data.neighbours import device_edges
from phalanx.families.materials.model.losses import learned_tasks
from phalanx.families.materials.model_config import PROPERTY_LABELS, MaterialsModel
from phalanx.layout.data_parallel.task_heads import branch_groups
from phalanx.layout.spec import ResolvedLayout
from phalanx.verification.family import VerifiableModel

_LARGEST = 9
"""Atoms of the largest structure."""
_SPACING = 0.4
"""Distance of atoms before they are moved, in cutoffs."""
_NEIGHBOURS = 8.4
"""Mean of the neighbours that atoms of these structures have, whatever the cutoff."""
_ABSENT = (6, 7)
"""Sample numbers, modulo 8, without a structure: neighbours, so that whole shares of ranks are empty, not micro-batches
alone."""
_BRANCHES = 3
_HEADS = 2


class MaterialsVerification(VerifiableModel):
    """See `verification.family.VerifiableModel`."""

    run: MaterialsRun

    def samples(self, step: int, first: int, count: int, global_batch: int) -> GraphBatch:
        """Return molecules and crystals of 1 to 9 atoms; some sample numbers have none, and some structures lack some
        labels.

        So ranks differ in structures, atoms and targets, and some have nothing to do: an average over ranks in place of
        a sum over targets shows, and so does a rank that leaves a collective out. Positions are float64.
        """
        return _make_structures(self.run, torch.arange(first, first + count) + (step - 1) * global_batch)

    def branch_samples(self, step: int, layout: ResolvedLayout, rank: int) -> GraphBatch:
        """Return the samples of a rank, assigned by number of structures among the ranks of each branch: uneven, and some
        ranks have none."""
        groups = branch_groups(layout)
        assert groups is not None
        numbers = torch.arange(layout.global_batch) + (step - 1) * layout.global_batch
        source = np.asarray(numbers % len(self.run.model.branches))
        dealt = assign_by_head_group(groups, source)(np.ones_like(source), groups.ranks)
        return _make_structures(self.run, numbers[torch.from_numpy(dealt) == rank])

    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Return small widths, few layers, elements and branches; backbone, heads, losses and kinds of attention as they
        are."""
        # Sub-groups are sized for each branch that there is.
        branches = _BRANCHES if self.run.layout.branch_groups == "off" else len(self.run.model.branches)
        model = self.run.model
        changes: dict[str, Any] = {
            "preset": None,
            "n_layers": min(model.n_layers, 3),
            "d_model": 8,
            "n_radial": min(model.n_radial, 5),
            "max_atomic_number": min(model.max_atomic_number, 8),
            # Of these structures, not of the run's: products of messages in the wrong units grow to 1e13 in MACE, and its
            # saturated head then leaves some gradients that are nothing but what such numbers are rounded by.
            "mean_neighbors": _NEIGHBOURS,
            "branches": [branch.model_dump() for branch in model.branches[:branches]],
        }
        if model.attention is not None:
            changes["attention"] = {**model.attention.model_dump(), "heads": _HEADS}
        if model.body == "gatv2":
            changes["gatv2"] = {"heads": _HEADS}
        if model.body == "dimenet++":
            changes["dimenet"] = {
                "angular": min(model.dimenet.angular, 3),
                "triplet_width": 6,
                "basis_width": 4,
            }
        if model.body == "nequip":
            changes["nequip"] = {"degree": min(model.nequip.degree, 2), "radial_width": 8}
        if model.body == "mace":
            degree = min(model.mace.degree, 2)
            hidden = min(model.mace.hidden_degree, degree)
            changes["mace"] = {
                **model.mace.model_dump(),
                "degree": degree,
                "hidden_degree": hidden,
                "radial_width": 8,
            }
        return {"model": MaterialsModel.model_validate({**model.model_dump(), **changes}).model_dump()}

    def fitted_to_samples(self) -> dict[str, dict[str, Any]]:
        """See `VerifiableModel`: training would count the neighbours in its data; none are read here."""
        if "mean_neighbors" in self.run.model.model_fields_set:
            return {}
        return {"model": {"mean_neighbors": _NEIGHBOURS}}


@dataclass(frozen=True)
class _Rows:
    """What labels and features of nodes, of edges or of whole graphs are drawn for, in draws as large as any graph needs."""

    most: int
    """Rows of the largest graph."""
    graph: Tensor
    """Graph of each row that there is."""
    in_graph: Tensor
    """Number of each row within its graph."""


def _draw_labels(
    model: MaterialsModel, numbers: Tensor, rows: dict[str, _Rows], cells_G33: Tensor
) -> dict[str, Tensor]:
    """Return random labels of all that the model learns, by field; some structures lack some of them."""
    heads = {label: getattr(model, head) for head, label in PROPERTY_LABELS.items()}
    labels = {}
    for name in (task.label for task in learned_tasks(model)):
        shape: tuple[int, ...] = {"forces_N3": (3,), "stress_G33": (3, 3), "dipole_G3": (3,)}.get(name, ())
        head = heads.get(name)
        if head is not None:
            shape = (len(head.names),)
        drawn = rows[name.rsplit("_", 1)[1][0]]
        values = sample_normals(name, numbers, drawn.most * math.prod(shape)).view(len(numbers), drawn.most, *shape)
        for column, known in enumerate(head.names if head is not None else ()):
            if head is not None and known in head.classes:
                classes = sample_bits(known, numbers, drawn.most) % head.classes[known].count
                values[:, :, column] = classes.to(values.dtype)
        # Missing in every fourth structure, another one for each label.
        values[numbers % 4 == LABELS.index(name) % 4] = torch.nan
        if name == "stress_G33":
            values[cells_G33.abs().sum((1, 2)) == 0.0] = torch.nan
        labels[name] = values[drawn.graph, drawn.in_graph]
    return labels


def _draw_features(model: MaterialsModel, numbers: Tensor, rows: dict[str, _Rows]) -> dict[str, Tensor]:
    """Return random features of nodes, edges and graphs, by field; none for models of atoms."""
    features = {}
    for level, name in FEATURES.items() if model.graph is not None else ():
        width = getattr(model.graph, level)
        field = FEATURE_FIELDS[name]
        drawn = rows[field.rsplit("_", 1)[1][0]]
        values = sample_normals(name, numbers, drawn.most * max(width, 1)).view(len(numbers), drawn.most, -1)
        features[field] = values[drawn.graph, drawn.in_graph, :width]
    return features


def _make_structures(run: MaterialsRun, numbers: Tensor) -> GraphBatch:
    """Return structures with these global sample numbers."""
    numbers = numbers[~torch.isin(numbers % 8, torch.tensor(_ABSENT))]
    model, graphs = run.model, len(numbers)
    atoms_G = 1 + sample_bits("atoms", numbers, 1)[:, 0] % _LARGEST
    graph_N = torch.repeat_interleave(atoms_G)
    in_graph_N = torch.arange(len(graph_N)) - (atoms_G.cumsum(0) - atoms_G)[graph_N]
    step_length = _SPACING * model.cutoff
    cells_G33 = torch.eye(3, dtype=torch.float64) * (3.3 * step_length)
    cells_G33 = cells_G33 + 0.1 * step_length * sample_normals("cells", numbers, 9).view(-1, 3, 3)
    # A third of them are molecules; graphs whose edges are given know no cells.
    molecules_G = numbers % 3 == 0 if model.graph is None else torch.ones_like(numbers, dtype=torch.bool)
    cells_G33 = torch.where(molecules_G[:, None, None], 0.0, cells_G33)
    # The points of a cube of three a side.
    positions_N3 = torch.stack((in_graph_N % 3, in_graph_N // 3 % 3, in_graph_N // 9), dim=1).double() * step_length
    moves_GN = sample_normals("positions", numbers, 3 * _LARGEST).view(graphs, _LARGEST, 3)
    positions_N3 = positions_N3 + 0.1 * step_length * moves_GN[graph_N, in_graph_N]
    species = 1 + sample_bits("species", numbers, _LARGEST) % model.max_atomic_number
    edges = device_edges(positions_N3, cells_G33, model.cutoff, graph_N=graph_N)
    graph_E = graph_N[edges.edges_2E[1]]
    per_graph = torch.zeros(graphs, dtype=torch.int64).index_add_(0, graph_E, torch.ones_like(graph_E))
    in_graph_E = torch.arange(len(graph_E)) - (per_graph.cumsum(0) - per_graph)[graph_E]
    rows = {
        "N": _Rows(_LARGEST, graph_N, in_graph_N),
        "E": _Rows(_LARGEST * (_LARGEST - 1), graph_E, in_graph_E),
        "G": _Rows(1, torch.arange(graphs), torch.zeros(graphs, dtype=torch.int64)),
    }
    labels = _draw_labels(model, numbers, rows, cells_G33)
    given: dict[str, Any] = dict.fromkeys(LABELS) | labels | _draw_features(model, numbers, rows)
    return GraphBatch(
        **given,
        species_N=species[graph_N, in_graph_N] * (model.graph is None),
        positions_N3=positions_N3,
        graph_N=graph_N,
        edges_2E=edges.edges_2E,
        shifts_E3=edges.shifts_E3,
        cells_G33=cells_G33,
        source_G=numbers % len(model.branches),
        total_charge_G=(numbers % 2).double(),
        multiplicity_G=1.0 + (numbers % 3).double(),
        sample_indices=numbers,
        atoms=np.asarray(atoms_G),
        edges=np.asarray(per_graph),
        graphs_by_part=(graphs,),
        tasks=tuple(task.label for task in learned_tasks(model)),
    )
