"""The language family bound to a run: what it declares, and the class that answers every room (`families.family`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.language import declare, sizes
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.cost import LanguageTracing
from phalanx.families.language.ensemble import build_language
from phalanx.families.language.inputs import LanguageInputs
from phalanx.families.language.layout import LanguageLayout
from phalanx.families.language.verification import LanguageVerification
from phalanx.nn.initial import InitRules
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.splits import SplitCount


class BoundLanguage(LanguageLayout, LanguageTracing, LanguageInputs, LanguageVerification, EnsembleModel):
    """A decoder bound to its run; the rooms' questions are answered by the modules beside this one."""

    run: LanguageRun

    axes = frozenset(("dp_replicate", "dp_shard", "tp", "cp", "pp"))
    position_unit = "tok"
    streams_weights = True

    def positions(self) -> SplitCount:
        """Tokens."""
        return SplitCount("data.sequence_length", self.run.data.sequence_length)

    def initial_rules(self) -> InitRules:
        """See `declare`."""
        return declare.initial_rules(self.run.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `declare`."""
        return declare.parameter_kind(name)

    def split_counts(self) -> list[SplitCount]:
        """See `declare`."""
        return declare.tensor_split_counts(self.run.model)

    def split_rows(self) -> SplitCount:
        """The vocabulary."""
        return SplitCount("model.vocab_size", self.run.model.vocab_size)

    def context_heads(self) -> SplitCount:
        """Key and value heads."""
        return SplitCount("model.n_kv_heads", self.run.model.kv_heads)

    def needs_bias(self) -> bool:
        """ALiBi and document masks."""
        return self.run.model.positions == "alibi" or self.run.data.document_mask

    def block_costs(self) -> tuple[float, float]:
        """See `declare`."""
        return declare.relative_block_costs(self.run.model, self.run.data.sequence_length)

    def tied(self) -> dict[str, str]:
        """The output head's copy of the token table."""
        return declare.TIED if self.run.model.tied_head else {}

    def parameter_count(self) -> int:
        """See `sizes`."""
        return sizes.parameter_count(self.run.model)

    def flops_per_sample(self) -> float:
        """Of `data.sequence_length` tokens."""
        length = self.run.data.sequence_length
        return float(length * sizes.model_flops_per_token(self.run.model, length, self.run.training.flops))

    def build_ensemble(
        self,
        members: Sequence[Member],
        options: EnsembleOptions,
        device: torch.device,
        share: Share,
        progress: Progress,
    ) -> Ensemble:
        """Join the members by the mean of their probabilities."""
        return build_language(members, device, samples=options.samples, share=share, progress=progress)
