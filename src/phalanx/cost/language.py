"""The language family as cost models see it: its parts on meta, what they are called with, and their parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.config.schema import LanguageRun
from phalanx.cost.accelerator import core_attention, fused_rms_norm
from phalanx.cost.recorder import Recorder
from phalanx.layout.apply import named_parameters
from phalanx.layout.context import split_context
from phalanx.layout.language import LanguageStage, loss_chunk_tokens
from phalanx.layout.mesh import Axis
from phalanx.layout.precision import PRECISIONS
from phalanx.layout.recompute import Recompute
from phalanx.layout.share import SequenceShare
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.layout.tensor import split_tensors
from phalanx.models.kinds import ParameterKind
from phalanx.models.language.attention import Attention
from phalanx.models.language.declare import TIED, parameter_kind, tensor_splits
from phalanx.models.language.decoder import Decoder
from phalanx.models.language.layers import Norm
from phalanx.models.splits import ModelPart

PartName = Literal["embedding", "block", "head"]
Kernel = Literal["flash", "cudnn", "efficient", "flex", "math", "cpu"]
"""Attention as accelerators compute it; `cpu` is what an uncompiled run on the CPU does."""


@dataclass(frozen=True)
class Setting:
    """Everything the costs of a part depend on, besides the micro-batch."""

    model: LanguageModel
    length: int
    """Positions a sample."""
    tp: int = 1
    cp: int = 1
    context: str = "ring"
    recompute: Recompute = "none"
    precision: str = "bf16"
    attention: Kernel = "flash"
    compile: bool = True
    chunk_tokens: int = 4096
    """Tokens whose logits are held at once."""
    document_mask: bool = False
    z_loss: float = 0.0


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
    requested = run.training.attention
    if requested in ("cudnn", "flash", "efficient", "math", "flex"):
        return requested
    if run.layout.precision == "fp64":
        return "math"
    biased = run.model.positions == "alibi" or run.data.document_mask
    if biased and requested == "auto" and not rocm:
        return "flex"
    return "efficient" if biased or run.layout.precision == "fp32" else "flash"


@dataclass(frozen=True)
class PartParameter:
    """One parameter of a part as a rank of the tensor-parallel axis holds it."""

    name: str
    """In the whole model, with block number 0."""
    shape: tuple[int, ...]
    kind: ParameterKind
    split: bool
    """Whether `tp` ranks hold different parts; else they hold it alike and add up its gradients."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """What data-parallel sharding cuts."""
        return self.shape[0]

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies every token."""
        return self.kind == "matrix"

    def sharded_count(self, ranks: int) -> int:
        """Elements that one of `ranks` data-parallel ranks holds: whole rows, as many on each, padding included."""
        return -(-self.rows // ranks) * (self.count // self.rows)


_PARTS = {
    "embedding": ModelPart(range(0), first=True, last=False),
    "block": ModelPart(range(1), first=False, last=False),
    "head": ModelPart(range(0), first=False, last=True),
}


def _share(setting: Setting) -> SequenceShare:
    tp, cp = (
        Axis(name, 0, size, None, tuple(range(size)), name) for name, size in (("tp", setting.tp), ("cp", setting.cp))
    )
    return SequenceShare(cp, tp, setting.context)


def build_stage(name: PartName, setting: Setting) -> Stage:
    """A stage that consists of one part, as the first rank of every axis has it, with parameters as they are used."""
    share, dtype = _share(setting), PRECISIONS[setting.precision]
    with torch.device("meta"):
        part = Decoder(
            setting.model, dtype=dtype, chunk_tokens=setting.chunk_tokens, z_loss=setting.z_loss, part=_PARTS[name]
        )
    split_tensors(part, tensor_splits(setting.model), share.tp)
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
    stage = LanguageStage(part.to(dtype), 0, share, seed=0, length=setting.length)
    stage.step = 1
    return stage


def _no_context(*_: Any, **_keywords: Any) -> Any:
    return None


def _without_bias(part: Decoder) -> None:
    """FlexAttention computes its bias: nothing is kept for it."""
    build = part.attention_context

    def context(*arguments: Any, **keywords: Any) -> Any:
        made: Any = build(*arguments, **keywords)
        return made._replace(bias=None) if hasattr(made, "bias") else made

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


def part_parameters(stage: Stage, setting: Setting) -> tuple[PartParameter, ...]:
    """The parameters of a stage of one part."""
    with torch.device("meta"):
        whole = Decoder(setting.model, part=stage.part.part)
    tied = TIED if setting.model.tied_head else {}
    shapes = {name: parameter.shape for name, parameter in named_parameters(whole, tied).items()}
    return tuple(
        PartParameter(name, tuple(p.shape), parameter_kind(name), split=p.shape != shapes[name])
        for name, p in named_parameters(stage.part, tied).items()
    )
