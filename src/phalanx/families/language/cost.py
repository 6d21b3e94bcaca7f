"""The language family as cost models see it: its parts on meta, what they are called with, and their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import LanguageModel
from phalanx.config.schema import Run
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.layout import LanguageStage, loss_chunk_tokens
from phalanx.layout.apply import cast_parameters
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.split_context import SequenceShare, split_context
from phalanx.layout.expert_parallel.token_exchange import BalancedExchange, Stages
from phalanx.layout.layout_model import Stage
from phalanx.layout.mesh import Axis
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.layout.streamed_weights.stream_pairs import Stream, Streamed, stream_matrices
from phalanx.nn.attention import Attention, AttentionCore, CausalAttention
from phalanx.nn.experts import ExpertNetworks, MixtureOfExperts
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.accelerator_kernels import core_attention
from phalanx.planner.trace.expert_loads import ExpertLoads, whole_rows
from phalanx.planner.trace.operations import ExpertShare
from phalanx.planner.trace.traced_model import (
    MODEL_PARTS,
    FloatArray,
    Kernel,
    PartName,
    PartTracer,
    Setting,
    TracedModel,
    sdpa_choice,
)


class LanguageParts(DeclaredLanguage, PartTracer):
    """The parts of decoders."""

    model: LanguageModel

    def build_stage(self, name: PartName, share: SequenceShare, stream: Stream | None) -> Stage:
        """See `PartTracer`."""
        model, dtype = self.model, PRECISIONS[self.setting.precision].compute_dtype
        chunk = MODEL_PARTS[name]
        if name == "block" and model.leading_layers:
            chunk = ModelChunk(range(model.n_layers - 1, model.n_layers), first=False, last=False)
        with torch.device("meta"):
            part = Decoder(
                model,
                dtype=dtype,
                chunk_tokens=self.setting.chunk_tokens,
                z_loss=self.setting.z_loss,
                part=chunk,
            )
        stream_matrices(part, self.splits(), share.tp, stream)
        self._split_experts(part)
        # PyTorch takes attention apart on meta: the kernel of the accelerator is put in its place, so that its costs show.
        core = _device_attention(model, self.setting.attention)
        for module in part.modules():
            if isinstance(module, CausalAttention):
                module.attend = core
        split_context(part, share, core)
        if self.setting.attention == "flex":
            # FlexAttention computes its bias: nothing is kept for it.
            _change_context(part, "bias", lambda bias: None)
        elif stream is not None:
            # The bias of one head, not of each head of a chunk: what chunks share is counted with what blocks share.
            _change_context(part, "bias", lambda bias: bias[:, :1])
        if name == "block" and stream is not None:
            # A ring has slopes for the heads of all chunks, of which the traced projection pair has its own number.
            pair = next(m.pair for m in part.modules() if isinstance(m, Streamed) and isinstance(m, Attention))
            group = model.layer(0).attention.group
            # The plan is asked when the block runs: a traced stage gets another one once it is built.
            _change_context(part, "slopes_H", lambda slopes_H: slopes_H.new_empty(pair.plan.units * group))
        cast_parameters(part, dtype)
        if self.setting.casts_experts:
            for module in part.modules():
                if isinstance(module, ExpertNetworks):
                    cast_parameters(module, PRECISIONS[self.setting.precision].main_dtype)
        return LanguageStage(part, 0, share, seed=0, length=self.setting.length)

    def expert_share(self) -> ExpertShare:
        """See `PartTracer`; whole rows of each sample arrive."""
        setting, experts = self.setting, self.model.experts
        if setting.share is not None or experts is None:
            return setting.share or super().expert_share()
        positions = setting.length // (setting.cp * setting.tp)
        load = expert_load(self.model, setting.loads, setting.ep, positions)
        local, slices = experts.count // setting.ep, setting.expert_tp
        return ExpertShare(setting.ep * slices, local, load, slices, (experts.d_ff or self.model.ff_size) // slices)

    def _split_experts(self, part: Decoder) -> None:
        """Keep a rank's experts, and let as many rows arrive as its share of them gets."""
        share = self.expert_share()
        if share.ranks == 1:
            return
        ep = Axis("ep", 0, share.ranks, None, tuple(range(share.ranks)), "ep")
        stages = None
        if self.setting.ep_node > 1:
            # How many of the ranks are on a node changes no size of what is traced.
            stages = Stages(
                replace(ep, name="ep_across", group_name="ep_across"), Axis("ep_within", group_name="ep_within")
            )
        exchange = BalancedExchange(ep, share.load, share.slices, self.setting.ep_chunks, stages, experts=share.local)
        for module in part.modules():
            if isinstance(module, MixtureOfExperts):
                module.exchange, experts = exchange, module.experts
                # As `split_experts` keeps them, in numbers that need not divide those of the model.
                with torch.device("meta"):
                    own = ExpertNetworks(share.local, experts.d_model, share.features)
                experts.gate_up, experts.down, experts.d_ff = own.gate_up, own.down, own.d_ff

    def whole_part(self, part: ModelChunk) -> nn.Module:
        """See `PartTracer`."""
        with torch.device("meta"):
            return Decoder(self.model, part=part)

    def example_batch(self, name: PartName, stage: Stage, samples: int) -> dict[str, Tensor]:
        """Return what a stage of this part is called with, on meta."""
        shape = (samples, self.setting.length)
        x = torch.empty(shape, dtype=torch.int64, device="meta")
        if name != "embedding":
            hidden = stage.hidden_shape(samples)
            x = torch.empty(hidden, dtype=stage.part.dtype, device="meta", requires_grad=True)
        batch = {
            "x": x,
            "targets_BS": torch.empty(shape, dtype=torch.int64, device="meta"),
            "sample_indices_B": torch.empty(samples, dtype=torch.int64, device="meta"),
        }
        if self.setting.document_mask:
            batch["document_ids_BS"] = torch.empty(shape, dtype=torch.int32, device="meta")
        return batch

    def random_drops(self) -> bool:
        """See `PartTracer`."""
        return self.model.dropout > 0.0


class LanguageTracing(TracedModel):
    """See `planner.trace.traced_model.TracedModel`."""

    run: LanguageRun
    tracer = LanguageParts

    def rebind(self, run: Run) -> Self:
        """See `BoundModel`; what is known of the loads of experts stays."""
        model = super().rebind(run)
        model.loads = self.loads
        return model

    def expert_load(self, layout: ResolvedLayout) -> Fraction:
        """See `TracedModel`; so that what arrives of each sample are whole rows."""
        rows = self.run.data.sequence_length // (layout.cp * layout.tp)
        return expert_load(self.run.model, self.loads, layout.ep, rows)

    def gathered_setting(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """Return the setting of `run` in `layout` on accelerators."""
        return Setting(
            model=self.run.model,
            length=self.run.data.sequence_length,
            tp=layout.tp,
            cp=layout.cp,
            context=layout.context,
            recompute=layout.recompute,
            precision=self.run.layout.precision,
            attention=attention,
            compile=compiled,
            chunk_tokens=loss_chunk_tokens(self.run, torch.device("meta"), layout.tp),
            document_mask=self.run.data.document_mask,
            z_loss=self.run.training.z_loss,
            loads=self.loads,
        )

    def load_spread_bytes(self, layouts: LayoutTable) -> FloatArray:
        """See `TracedModel`: of each row two copies sorted by expert, its result, and the hidden features thrice."""
        experts, found = self.run.model.experts, np.zeros(len(layouts))
        if experts is None:
            return found
        width = PRECISIONS[self.run.layout.precision].compute_dtype.itemsize
        hidden = experts.d_ff or self.run.model.ff_size
        rows = layouts.microbatch * (self.run.data.sequence_length // (layouts.cp * layouts.tp)) * experts.active
        for ep in np.unique(layouts.ep).tolist():
            found[layouts.ep == ep] = self.loads.busiest_spread(experts.count, ep)
        # Ranks that share an expert get all of its rows, and have a part of its features each.
        rows, features = rows * layouts.expert_tp, hidden / layouts.expert_tp
        # Layers route on their own: what all of them keep together varies less than any one.
        blocks = np.where(layouts.has("recompute", "none"), self.run.model.n_layers / layouts.pp, 1.0)
        return np.asarray(found * rows * width * 3 * (self.run.model.d_model + features) * np.sqrt(blocks))

    def likely_kernel(self, *, rocm: bool) -> Kernel:
        """Return the attention kernel a run will use: the one it names, or what `auto` mostly finds fastest there."""
        requested, precision = self.run.training.attention, self.run.layout.precision
        biased = self.needs_bias()
        measured = requested == "auto" and not rocm and precision != "fp64"
        if requested == "flex" or (biased and measured):
            return "flex"
        if self.run.model.changes_softmax:
            return "math"
        return sdpa_choice(requested, precision, biased=biased, rocm=rocm)

    def chunk_tokens(self, tp: int) -> int:
        """See `TracedModel`."""
        return loss_chunk_tokens(self.run, torch.device("meta"), tp)

    def sample_bytes(self) -> int:
        """Return the bytes of token ids, targets and, where attention heeds them, documents."""
        return self.run.data.sequence_length * (8 + 8 + 4 * self.run.data.document_mask)

    def dry_run_fields(self, device: torch.device, tp: int) -> dict[str, Any]:
        """See `TracedModel`; how many logits there are at once depends on the device."""
        return {"loss_chunk_tokens": loss_chunk_tokens(self.run, device, tp)}

    def dry_run_attention(self) -> AttentionChoice:
        """See `TracedModel`; masks and biases are kept as the kernel that such a run takes keeps them."""
        kernel = self.likely_kernel(rocm=False)
        core = _math_attention if kernel == "math" else _device_attention(self.run.model, kernel)
        return AttentionChoice(kernel, core=core)


def _device_attention(model: LanguageModel, kernel: Kernel) -> AttentionCore:
    """Return attention of `model` as `kernel` computes it on an accelerator."""
    core = core_attention(kernel)
    return core if model.latent is None else partial(_attend_padded, core)


def _attend_padded(core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    """Compute attention with values as wide as keys: traced kernels have one width."""
    missing = key.shape[-1] - value.shape[-1]
    return core(query, key, F.pad(value, (0, missing)), context)[..., : value.shape[-1]]


def expert_load(model: LanguageModel, loads: ExpertLoads, ep: int, positions: int) -> Fraction:
    """Return the rows that arrive at the busiest rank of `ep` over those that leave it: whole rows of each sample.

    positions: of a sample on this rank.
    """
    if model.experts is None or ep == 1:
        return Fraction(1)
    return whole_rows(loads.busiest(model.experts.count, ep), positions * model.experts.active)


def _math_attention(query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    """Compute attention in separate operations, which PyTorch would not choose for CPU tensors."""
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        context.bias,
        0.0,
        context.bias is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )[0]
    return out


def _change_context(part: Decoder, field: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Put `change` of a tensor into what the layers of `part` have in common, where their context has that field."""
    build = part.attention_context

    def context(*arguments: Any, **keywords: Any) -> Any:
        made: Any = build(*arguments, **keywords)
        value = getattr(made, field, None)
        return made if value is None else made._replace(**{field: change(value)})

    part.attention_context = context
