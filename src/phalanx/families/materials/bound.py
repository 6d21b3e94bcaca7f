"""The materials family bound to a run: what it declares, and the class that answers every room (`families.family`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.materials import declare, sizes
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_shards import read_manifest
from phalanx.families.materials.ensemble.build_ensemble import build_ensemble
from phalanx.families.materials.inputs import MaterialsInputs
from phalanx.families.materials.layout import MaterialsLayout
from phalanx.families.materials.model.heads import head_outputs
from phalanx.families.materials.verification import MaterialsVerification
from phalanx.nn.parameters import InitRules, ParameterKind
from phalanx.nn.splits import SplitCount


class BoundMaterials(MaterialsLayout, MaterialsInputs, MaterialsVerification, EnsembleModel):
    """A network of atoms bound to its run; the rooms' questions are answered by the modules beside this one."""

    run: MaterialsRun

    axes = frozenset(("dp_replicate", "dp_shard", "cp"))
    """Matrices are small and structures many: data parallelism, with all that ZeRO and FSDP share out; over `cp`, atoms of
    structures that are too large for one device."""
    cuts_structures = True
    vanishing = ("head.charges.copies.*.bias", "head.dipole.copies.*.bias", "head.dipole_vectors.gate.bias")
    """What the last layer's bias adds to all atoms of a structure is taken off again, and has no dipole. The gate's weighs
    the sum of all atoms' vectors, of which EGNN's first steps leave less than a thousandth."""
    position_unit = "structures"

    selects_members = True

    def positions(self) -> SplitCount:
        """One: a sample is a structure, whatever its size."""
        return SplitCount("structures a sample", 1)

    def initial_rules(self) -> InitRules:
        """See `declare`."""
        return declare.initial_rules(self.run.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `declare`."""
        return declare.parameter_kind(name)

    def split_counts(self) -> list[SplitCount]:
        """Nothing is split."""
        return declare.tensor_split_counts(self.run.model)

    def context_heads(self) -> SplitCount:
        """Nothing is split."""
        return SplitCount("model.attention.heads", self.run.model.attention.heads if self.run.model.attention else 1)

    def needs_bias(self) -> bool:
        """Attention among the atoms of a structure is masked to them."""
        return self.run.model.attention is not None

    def block_costs(self) -> tuple[float, float]:
        """See `declare`; there are no pipelines to balance by it."""
        return declare.relative_block_costs(self.run.model, self.run.model.mean_neighbors)

    def branches(self) -> int:
        """Those of the model, unless all its heads are shared."""
        unshared = any(not getattr(self.run.model, name).shared for name in head_outputs(self.run.model))
        return len(self.run.model.branches) if unshared else 1

    def branch_costs(self) -> list[float]:
        """By `data.cost`, of the prepared training data, sources weighed as they are read.

        Raises DataError where a source is not prepared: nothing else knows how large structures are.
        """
        costs = []
        for source in self.run.data.sources:
            counts = read_manifest(Path(self.run.data.prepared) / source.name).splits["train"]
            cost = self.run.data.cost
            total = cost.node * counts.atoms + cost.edge * counts.edges + cost.graph * counts.structures
            costs.append(total if source.weight is None else source.weight * total / max(counts.structures, 1))
        return costs

    def flops_per_sample(self) -> float:
        """Of a mean structure of the prepared training data, sources weighed as they are read.

        Raises DataError where a source is not prepared: nothing else knows how large structures are.
        """
        total, weights = 0.0, 0.0
        for source in self.run.data.sources:
            counts = read_manifest(Path(self.run.data.prepared) / source.name).splits["train"]
            number = max(counts.structures, 1)
            weight = float(number) if source.weight is None else source.weight
            total += weight * sizes.model_flops(self.run.model, counts.atoms / number, counts.edges / number)
            weights += weight
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
