"""The materials family bound to a run: the class that answers every room (`families.family`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_shards import Counts, prepared_folder, read_manifest
from phalanx.families.materials.declare import DeclaredMaterials
from phalanx.families.materials.ensemble.build_ensemble import build_ensemble
from phalanx.families.materials.inputs import MaterialsInputs
from phalanx.families.materials.layout import MaterialsLayout
from phalanx.families.materials.model.heads import head_outputs
from phalanx.families.materials.sizes import model_flops
from phalanx.families.materials.verification import MaterialsVerification
from phalanx.nn.splits import SplitCount


class BoundMaterials(DeclaredMaterials, MaterialsLayout, MaterialsInputs, MaterialsVerification, EnsembleModel):
    """A network of atoms bound to its run; the rooms' questions are answered by the modules beside this one."""

    run: MaterialsRun

    axes = frozenset(("dp_replicate", "dp_shard", "cp"))
    """Matrices are small and structures many: data parallelism, with all that ZeRO and FSDP shard; over `cp`, atoms of
    structures that are too large for one device (graph parallelism), unless nodes are pooled: which ones stay would have to
    be agreed on."""
    cuts_structures = True
    offloads_activations = False
    """Forces are a derivative: the backward pass goes through what blocks keep twice."""
    vanishing = (
        "head.charges.copies.*.bias",
        "head.electrostatics.copies.*.bias",
        "head.dipole.copies.*.bias",
        "head.dipole_vectors.gate.bias",
    )
    """What the last layer's bias adds to all atoms of a structure is taken off again, and has no dipole. The gate's weighs
    the sum of all atoms' vectors, of which EGNN's first steps leave less than a thousandth."""
    position_unit = "structures"

    selects_members = True

    def __init__(self, run: MaterialsRun) -> None:
        super().__init__(run)
        if run.model.pooling is not None:
            self.axes = frozenset(("dp_replicate", "dp_shard"))

    def positions(self) -> SplitCount:
        """Return 1: a sample is a structure, whatever its size."""
        return SplitCount("structures a sample", 1)

    def context_heads(self) -> SplitCount:
        """Return the heads of global attention, of which none is split."""
        return SplitCount("model.attention.heads", self.run.model.attention.heads if self.run.model.attention else 1)

    def needs_bias(self) -> bool:
        """Return whether there is global attention: it is masked to the atoms of a structure."""
        return self.run.model.attention is not None

    def branches(self) -> int:
        """Return the number of data sets with heads of their own; 1 where all heads are shared."""
        unshared = any(not getattr(self.run.model, name).shared for name in head_outputs(self.run.model))
        return len(self.run.model.branches) if unshared else 1

    def branch_costs(self) -> list[float]:
        """Return the costs by `data.cost` of the prepared training data, sources weighed as they are read.

        Raises DataError where a source is not prepared: nothing else knows how large structures are.
        """
        cost = self.run.data.cost
        return [
            weight * (cost.node * counts.atoms + cost.edge * counts.edges + cost.graph * counts.structures)
            for weight, counts in self._weighted_sources()
        ]

    def flops_per_sample(self) -> float:
        """Return the FLOPs of a mean structure of the prepared training data, sources weighed as they are read.

        Raises DataError where a source is not prepared: nothing else knows how large structures are.
        """
        total, weights = 0.0, 0.0
        for weight, counts in self._weighted_sources():
            # By structures read: a source counts as often as its structures come.
            number = max(counts.structures, 1)
            total += weight * number * model_flops(self.run.model, counts.atoms / number, counts.edges / number)
            weights += weight * number
        return total / weights

    def build_ensemble(
        self,
        members: Sequence[Member],
        options: EnsembleOptions,
        device: torch.device,
        share: Share,
        progress: Progress,
    ) -> Ensemble:
        """Choose members, weight and calibrate them on the validation split, and score them on the test split."""
        return build_ensemble(members, options, device, share, progress)

    def _weighted_sources(self) -> Iterator[tuple[float, Counts]]:
        """Yield how often a structure of each source is read, relative to other sources, and the training split's counts."""
        for source in self.run.data.sources:
            counts = read_manifest(prepared_folder(self.run.data, source)).splits["train"]
            # A weight is a share of the samples: divided by the source's size it says how often each structure is read.
            yield (1.0 if source.weight is None else source.weight / max(counts.structures, 1)), counts
