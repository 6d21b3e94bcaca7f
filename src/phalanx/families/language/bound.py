"""A decoder bound to its run, as far as that takes no torch: what layouts and data are checked with."""

from __future__ import annotations

from phalanx.config.layers import MixtureConfig
from phalanx.families.family import DataModel
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.open_tokens import (
    describe_tokens,
    open_training,
    require_tokenizer,
    tokenizer_files,
)
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.evaluation.icl_tasks import load_run_tasks
from phalanx.families.language.sizes import active_parameter_count, model_flops_per_token
from phalanx.nn.declared_layers import gate_block
from phalanx.nn.splits import SplitCount


class BoundLanguage(DeclaredLanguage, DataModel):
    """A decoder bound to its run; `trained.TrainedLanguage` is the one that answers every room."""

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

    def active_parameter_count(self) -> int:
        """Return the parameters that compute a token: of a mixture without those of experts that it is not sent to."""
        return active_parameter_count(self.model)

    def expert_slices(self) -> SplitCount:
        """Return the groups of gate and up rows of an expert; 1 for dense models."""
        hidden = next((x.mlp.hidden for x in self.model.layer_kinds() if isinstance(x.mlp, MixtureConfig)), 1)
        return SplitCount("model.experts.d_ff", hidden // gate_block(hidden), gate_block(hidden))

    def dispatched_bytes(self) -> int:
        """Return the bytes of a token's rows for its experts; 0 for dense models."""
        mixture = self.model.experts
        width = {"fp64": 8, "fp32": 4}.get(self.run.layout.precision, 2)
        return 0 if mixture is None else mixture.active * self.model.d_model * width

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

    def check_inputs(self) -> str:
        """See `families.family.DataModel`."""
        training = open_training(self.run)
        if load_run_tasks(self.run):
            require_tokenizer(tokenizer_files(training).files, training)
        return describe_tokens(training)
