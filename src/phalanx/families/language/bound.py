"""A decoder bound to its run: the object that answers every room (`families.family`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.config.layers import MixtureConfig
from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.cost import LanguageTracing
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.ensemble import build_language
from phalanx.families.language.inputs import LanguageInputs
from phalanx.families.language.layout import LanguageLayout
from phalanx.families.language.sizes import model_flops_per_token
from phalanx.families.language.verification import LanguageVerification
from phalanx.nn.layers import gate_block
from phalanx.nn.splits import SplitCount


class BoundLanguage(
    DeclaredLanguage, LanguageLayout, LanguageTracing, LanguageInputs, LanguageVerification, EnsembleModel
):
    """A decoder bound to its run; each room's questions are answered by the base of its name."""

    run: LanguageRun

    axes = frozenset(("dp_replicate", "dp_shard", "tp", "cp", "pp"))
    position_unit = "tok"
    streams_weights = True

    def positions(self) -> SplitCount:
        """Return the tokens of a sample."""
        return SplitCount("data.sequence_length", self.run.data.sequence_length)

    def split_rows(self) -> SplitCount:
        """Return the rows of the vocabulary."""
        return SplitCount("model.vocab_size", self.model.vocab_size)

    def context_heads(self) -> SplitCount:
        """Return the key and value heads."""
        return SplitCount("model.n_kv_heads", self.model.kv_heads)

    def experts(self) -> SplitCount | None:
        """Return the experts of each mixture; None for dense models."""
        mixture = self.model.experts
        return None if mixture is None else SplitCount("model.experts.count", mixture.count)

    def expert_slices(self) -> SplitCount:
        """Return the groups of gate and up rows of an expert; 1 for dense models."""
        hidden = next((x.mlp.hidden for x in self.model.layer_kinds() if isinstance(x.mlp, MixtureConfig)), 1)
        return SplitCount("model.experts.d_ff", hidden // gate_block(hidden), gate_block(hidden))

    def counts_sequences(self) -> str:
        """Return the capacity of experts: who comes first is known where the whole sequence is; see `BoundModel`."""
        experts = self.model.experts
        if experts is None or experts.capacity_factor is None:
            return ""
        return f"model.experts.capacity_factor={experts.capacity_factor}"

    def expert_parameters(self) -> int:
        """Return the parameters of the routed experts of all layers."""
        mixtures = ((layer.mlp, count) for layer, count in self.model.layer_kinds().items())
        return sum(count * mlp.expert_parameters() for mlp, count in mixtures if isinstance(mlp, MixtureConfig))

    def needs_bias(self) -> bool:
        """Return whether there is a document mask or more of the model's own: ALiBi, windows, caps or sinks."""
        return self.run.data.document_mask or self.model.biases_attention(self.length)

    def unstreamable(self) -> str:
        """Return the option of attention that needs all heads of a rank at once; see `BoundModel`."""
        if self.model.qk_norm == "whole":
            return "model.qk_norm=whole"
        if self.model.latent is not None:
            return "model.latent"
        return "model.attention_sinks=true" if self.model.attention_sinks else ""

    def flops_per_sample(self) -> float:
        """Return the model FLOPs of `data.sequence_length` tokens."""
        return float(self.length * model_flops_per_token(self.model, self.length, self.run.training.flops))

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
