"""The language family as cost models see it: its parts on meta, what they are called with, and their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.model import LanguageModel
from phalanx.config.schema import LanguageRun
from phalanx.families.language import declare
from phalanx.families.language.declare import tensor_splits
from phalanx.families.language.layout import LanguageStage, loss_chunk_tokens
from phalanx.families.language.model.decoder import Decoder
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.context_parallel.split_context import split_context
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.layout.streamed_weights.stream_pairs import Stream, Streamed, stream_matrices
from phalanx.nn.attention import Attention
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.layers import Norm
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.accelerator import core_attention, fused_rms_norm
from phalanx.planner.trace.family import MODEL_PARTS, Kernel, PartName, Setting, sdpa_choice
from phalanx.planner.trace.recorder import Recorder
from phalanx.precision import PRECISIONS


def setting_of(run: LanguageRun, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
    """The setting of `run` in `layout` on accelerators."""
    return Setting(
        model=run.model,
        length=run.data.sequence_length,
        tp=layout.tp,
        cp=layout.cp,
        context=layout.context,
        recompute=run.layout.recompute,
        precision=run.layout.precision,
        attention=attention,
        compile=compiled,
        chunk_tokens=loss_chunk_tokens(run, torch.device("meta"), layout.tp),
        document_mask=run.data.document_mask,
        z_loss=run.training.z_loss,
    )


def likely_kernel(run: LanguageRun, *, rocm: bool) -> Kernel:
    """The attention kernel a run will use: the one it names, or what `auto` finds fastest on such devices as a rule."""
    requested, precision = run.training.attention, run.layout.precision
    biased = run.model.positions == "alibi" or run.data.document_mask
    measured = requested == "auto" and not rocm and precision != "fp64"
    if requested == "flex" or (biased and measured):
        return "flex"
    return sdpa_choice(requested, precision, biased=biased, rocm=rocm)


def build_stage(name: PartName, setting: Setting, share: SequenceShare, stream: Stream | None) -> Stage:
    """See `family.CostFamily`."""
    model, dtype = _model(setting), PRECISIONS[setting.precision].compute_dtype
    with torch.device("meta"):
        part = Decoder(
            model, dtype=dtype, chunk_tokens=setting.chunk_tokens, z_loss=setting.z_loss, part=MODEL_PARTS[name]
        )
    stream_matrices(part, tensor_splits(model), share.tp, stream)
    core = core_attention(setting.attention)
    for module in part.modules():
        if isinstance(module, Attention):
            module.attend = core
    split_context(part, share, core)
    if name != "block":
        # Built once a stage: it belongs to the blocks.
        part.attention_context = _no_context
    elif setting.attention == "flex":
        _without_bias(part)
    elif stream is not None:
        _with_one_bias(part)
    if name == "block" and stream is not None:
        _with_slopes_of_chunks(part)
    return LanguageStage(part.to(dtype), 0, share, seed=0, length=setting.length)


def _no_context(*_: Any, **_keywords: Any) -> Any:
    return None


def _without_bias(part: Decoder) -> None:
    """FlexAttention computes its bias: nothing is kept for it."""
    build = part.attention_context

    def context(*arguments: Any, **keywords: Any) -> Any:
        made: Any = build(*arguments, **keywords)
        return made._replace(bias=None) if hasattr(made, "bias") else made

    part.attention_context = context


def _with_one_bias(part: Decoder) -> None:
    """A bias for one head in place of those of a chunk's heads: what they share is counted with what blocks share."""
    build = part.attention_context

    def context(*arguments: Any, **keywords: Any) -> Any:
        made: Any = build(*arguments, **keywords)
        bias = getattr(made, "bias", None)
        return made if bias is None else made._replace(bias=bias[:, :1])

    part.attention_context = context


def _with_slopes_of_chunks(part: Decoder) -> None:
    """As many slopes for a ring as the heads of all chunks, of which a chain that is traced has its own number."""
    build = part.attention_context
    chain = next(m.chain for m in part.modules() if isinstance(m, Streamed) and isinstance(m, Attention))
    each = part.config.n_heads // part.config.kv_heads

    def context(*arguments: Any, **keywords: Any) -> Any:
        made: Any = build(*arguments, **keywords)
        slopes = getattr(made, "slopes_H", None)
        return made if slopes is None else made._replace(slopes_H=slopes.new_empty(chain.plan.units * each))

    part.attention_context = context


class _FusedNorm(Norm):
    """RMSNorm as the single kernel that uncompiled runs on accelerators have."""

    recorder: Recorder

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> same shape."""
        return fused_rms_norm(x, self.weight, self.recorder) if self.kind == "rmsnorm" else super().forward(x)


def fuse_norms(stage: Stage, recorder: Recorder) -> None:
    """Let the norms of a stage on meta run as on accelerators; PyTorch would take them apart."""
    for module in stage.modules():
        if isinstance(module, Norm):
            # Behind the module's own class, so that whatever it adds to a norm stays.
            kind: Any = type(module)
            module.__class__ = _FusedNorm if kind is Norm else type(kind.__name__, (kind, _FusedNorm), {})
            module.recorder = recorder  # type: ignore[assignment]


def example_batch(name: PartName, stage: Stage, setting: Setting, samples: int) -> dict[str, Tensor]:
    """What a stage of this part is called with, on meta."""
    shape = (samples, setting.length)
    x = torch.empty(shape, dtype=torch.int64, device="meta")
    if name != "embedding":
        hidden = stage.hidden_shape(samples)
        x = torch.empty(hidden, dtype=stage.part.dtype, device="meta", requires_grad=True)
    batch = {
        "x": x,
        "targets_BS": torch.empty(shape, dtype=torch.int64, device="meta"),
        "sample_indices_B": torch.empty(samples, dtype=torch.int64, device="meta"),
    }
    if setting.document_mask:
        batch["document_ids_BS"] = torch.empty(shape, dtype=torch.int32, device="meta")
    return batch


def whole_part(setting: Setting, part: ModelChunk) -> nn.Module:
    """See `family.CostFamily`."""
    with torch.device("meta"):
        return Decoder(_model(setting), part=part)


def relative_block_costs(setting: Setting) -> tuple[float, float]:
    """See `family.CostFamily`."""
    return declare.relative_block_costs(_model(setting), setting.length)


def tied(model: LanguageModel) -> dict[str, str]:
    """See `family.CostFamily`."""
    return declare.TIED if model.tied_head else {}


def chunk_tokens(run: LanguageRun, tp: int) -> int:
    """See `family.CostFamily`."""
    return loss_chunk_tokens(run, torch.device("meta"), tp)


def sample_bytes(run: LanguageRun) -> int:
    """Token ids, targets and, where attention heeds them, documents."""
    return run.data.sequence_length * (8 + 8 + 4 * run.data.document_mask)


def parameter_kind(name: str) -> ParameterKind:
    """See `family.CostFamily`."""
    return declare.parameter_kind(name)


def _model(setting: Setting) -> LanguageModel:
    assert isinstance(setting.model, LanguageModel)
    return setting.model
