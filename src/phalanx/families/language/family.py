"""The language family's answers to what layouts, training and verification ask (`families.family`)."""

from __future__ import annotations

from phalanx.config.schema import LanguageRun
from phalanx.families.language import declare, sizes
from phalanx.nn.initial import InitRules
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.splits import SplitCount


class LanguageFamily:
    """See `families.family.Family`."""

    axes = frozenset(("dp_replicate", "dp_shard", "tp", "cp", "pp"))
    cuts_structures = False
    vanishing: tuple[str, ...] = ()
    position_unit = "tok"

    def positions(self, run: LanguageRun) -> SplitCount:
        """Tokens."""
        return SplitCount("data.sequence_length", run.data.sequence_length)

    def initial_rules(self, run: LanguageRun) -> InitRules:
        """See `declare`."""
        return declare.initial_rules(run.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `declare`."""
        return declare.parameter_kind(name)

    def split_counts(self, run: LanguageRun) -> list[SplitCount]:
        """See `declare`."""
        return declare.tensor_split_counts(run.model)

    def split_rows(self, run: LanguageRun) -> SplitCount:
        """The vocabulary."""
        return SplitCount("model.vocab_size", run.model.vocab_size)

    def context_heads(self, run: LanguageRun) -> SplitCount:
        """Key and value heads."""
        return SplitCount("model.n_kv_heads", run.model.kv_heads)

    def needs_bias(self, run: LanguageRun) -> bool:
        """ALiBi and document masks."""
        return run.model.positions == "alibi" or run.data.document_mask

    def block_costs(self, run: LanguageRun) -> tuple[float, float]:
        """See `declare`."""
        return declare.relative_block_costs(run.model, run.data.sequence_length)

    def tied(self, run: LanguageRun) -> dict[str, str]:
        """The output head's copy of the token table."""
        return declare.TIED if run.model.tied_head else {}

    def branches(self, run: LanguageRun) -> int:
        """One: all samples pass the same head."""
        return 1

    def branch_costs(self, run: LanguageRun) -> list[float]:
        """Of that one."""
        return [1.0]

    def parameter_count(self, run: LanguageRun) -> int:
        """See `sizes`."""
        return sizes.parameter_count(run.model)

    def flops_per_sample(self, run: LanguageRun) -> float:
        """Of `data.sequence_length` tokens."""
        length = run.data.sequence_length
        return float(length * sizes.model_flops_per_token(run.model, length, run.training.flops))


FAMILY = LanguageFamily()
