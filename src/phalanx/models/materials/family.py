"""The materials family's answers to what layouts, training and verification ask (`models.family`)."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.families import MaterialsRun
from phalanx.data.graphs.manifest import read_manifest
from phalanx.models.initial import InitRules
from phalanx.models.kinds import ParameterKind
from phalanx.models.materials import declare, sizes
from phalanx.models.splits import SplitCount


class MaterialsFamily:
    """See `models.family.Family`."""

    axes = frozenset(("dp_replicate", "dp_shard"))
    """Matrices are small and structures many: data parallelism alone, with all that ZeRO and FSDP share out."""
    vanishing = ("head.charges.copies.*.bias", "head.dipole.copies.*.bias")
    """What the last one adds to all atoms of a structure is taken off again, and has no dipole."""
    position_unit = "structures"

    def positions(self, run: MaterialsRun) -> SplitCount:
        """One: a sample is a structure, whatever its size."""
        return SplitCount("structures a sample", 1)

    def initial_rules(self, run: MaterialsRun) -> InitRules:
        """See `declare`."""
        return declare.initial_rules(run.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `declare`."""
        return declare.parameter_kind(name)

    def split_counts(self, run: MaterialsRun) -> list[SplitCount]:
        """Nothing is split."""
        return declare.tensor_split_counts(run.model)

    def split_rows(self, run: MaterialsRun) -> None:
        """Nothing is split."""

    def context_heads(self, run: MaterialsRun) -> SplitCount:
        """Nothing is split."""
        return SplitCount("model.attention.heads", run.model.attention.heads if run.model.attention else 1)

    def needs_bias(self, run: MaterialsRun) -> bool:
        """Attention among the atoms of a structure is masked to them."""
        return run.model.attention is not None

    def block_costs(self, run: MaterialsRun) -> tuple[float, float]:
        """See `declare`; there are no pipelines to balance by it."""
        return declare.relative_block_costs(run.model, run.model.mean_neighbors)

    def tied(self, run: MaterialsRun) -> dict[str, str]:
        """Nothing."""
        return {}

    def parameter_count(self, run: MaterialsRun) -> int:
        """See `sizes`."""
        return sizes.parameter_count(run.model)

    def flops_per_sample(self, run: MaterialsRun) -> float:
        """Of a mean structure of the prepared training data, sources weighed as they are read.

        Raises DataError where a source is not prepared: nothing else knows how large structures are.
        """
        total, weights = 0.0, 0.0
        for source in run.data.sources:
            counts = read_manifest(Path(run.data.prepared) / source.name).splits["train"]
            number = max(counts.structures, 1)
            weight = float(number) if source.weight is None else source.weight
            total += weight * sizes.model_flops(run.model, counts.atoms / number, counts.edges / number)
            weights += weight
        return total / weights


FAMILY = MaterialsFamily()
