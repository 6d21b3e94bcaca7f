"""What cost models ask of a model family: its parts on meta, what they are called with, and what a run of it computes with.

A family's module `cost.<family>` answers; what the answers have in common is here. See docs/architecture.md, the families.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from phalanx.config.model import LanguageModel, Model
from phalanx.config.schema import Run
from phalanx.config.weather import WeatherModel
from phalanx.errors import ConfigError
from phalanx.families.sizes import check_parameter_count
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.mesh import Axis
from phalanx.layout.recompute import Recompute
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage, named_parameters
from phalanx.layout.streamed_weights.stream_pairs import Stream
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.layers import separate_gradients
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.recorder import Recorder

PartName = Literal["embedding", "block", "head"]
Kernel = Literal["flash", "cudnn", "efficient", "flex", "math", "cpu"]
"""Attention as accelerators compute it; `cpu` is what an uncompiled run on the CPU does."""
PlannedModel = LanguageModel | WeatherModel
"""Models of the families that declare blocks."""

MODEL_PARTS = {
    "embedding": ModelChunk(range(0), first=True, last=False),
    "block": ModelChunk(range(1), first=False, last=False),
    "head": ModelChunk(range(0), first=False, last=True),
}
"""The parts as those of a model."""


@dataclass(frozen=True)
class Setting:
    """Everything the costs of a part depend on, besides the micro-batch."""

    model: PlannedModel
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
    streamed: int = 1
    """Ranks around which the chunks of a block's matrices go (`layout.gather=stream`); 1: blocks are gathered whole."""
    peer_copies: bool = False
    """Whether streamed chunks lie beside the allocator's memory."""
    joint_gradients: bool = True
    """Whether a node of the backward pass may give gradients of inputs and of weights at once."""

    def apart(self) -> Setting:
        """In a schedule that computes gradients of inputs and of weights apart: blocks are not compiled then."""
        return replace(self, compile=False, joint_gradients=False)


@dataclass(frozen=True)
class PartParameter:
    """One parameter of a part as a rank of the tensor-parallel axis holds it."""

    name: str
    """In the whole model, with block number 0."""
    shape: tuple[int, ...]
    kind: ParameterKind
    split: bool
    """Whether `tp` ranks hold different parts; else they hold it alike and add up its gradients."""

    streamed: bool = False
    """Whether it is never gathered whole; see `planner.trace.streamed`."""

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


class CostFamily(Protocol):
    """A family's module `cost.<family>`. `run` is a run of the family's kind, `setting` one of its models."""

    def setting_of(self, run: Any, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """The setting of `run` in `layout` on accelerators."""

    def likely_kernel(self, run: Any, *, rocm: bool) -> Kernel:
        """The attention kernel a run will use: the one it names, or what `auto` finds fastest on such devices as a rule."""

    def chunk_tokens(self, run: Any, tp: int) -> int:
        """Tokens whose logits are held at once, where there are logits."""

    def sample_bytes(self, run: Any) -> int:
        """Bytes of what one sample brings to the device."""

    def build_stage(self, name: PartName, setting: Setting, share: SequenceShare, stream: Stream | None) -> Stage:
        """A stage of one part on meta, as the first rank of every axis has it, parameters in the format they are used in.

        stream: streams the matrices of blocks; None leaves them whole.
        """

    def whole_part(self, setting: Setting, part: ModelChunk) -> nn.Module:
        """A part on meta, as one device has it."""

    def example_batch(self, name: PartName, stage: Stage, setting: Setting, samples: int) -> dict[str, Tensor]:
        """What a stage of this part is called with, on meta."""

    def fuse_norms(self, stage: Stage, recorder: Recorder) -> None:
        """Let norms that accelerators compute by one kernel run so; PyTorch would take them apart on meta."""

    def parameter_kind(self, name: str) -> ParameterKind:
        """The kind of the parameter `name`."""

    def relative_block_costs(self, setting: Setting) -> tuple[float, float]:
        """What the embedding and the head cost beside one block, in blocks; as `families.family.Family.block_costs`."""

    def tied(self, model: Any) -> dict[str, str]:
        """Parameters that are copies of others wherever both are not in one part, by name."""


_PLANNED = ("language", "weather")


def cost_family(model: Model) -> CostFamily:
    """The module of `model`'s family. Raises ConfigError for families that cannot be planned for."""
    require_planned(model)
    family: Any = import_module(f"phalanx.families.{model.family}.cost")
    return family  # type: ignore[no-any-return]


def is_planned(model: Model) -> bool:
    """Whether the family's steps depend on nothing but the run file, so that they can be planned for."""
    return model.family in _PLANNED


def require_planned(model: Model) -> None:
    """Raise ConfigError, with the reason, for families whose steps depend on more than the run file, and for models of
    impossible size."""
    if not is_planned(model):
        raise ConfigError(
            f"model.family={model.family}: phalanx plan needs blocks of one size; what a batch of graphs costs depends on "
            "the graphs. phalanx train runs it without a plan: docs/materials.md says in which layouts"
        )
    check_parameter_count(model)


def planned_model(run: Run) -> PlannedModel:
    """The model of a run that can be planned for. Raises ConfigError, with the reason, for others."""
    require_planned(run.model)
    assert isinstance(run.model, PlannedModel)
    return run.model


def setting_of(run: Run, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
    """See `CostFamily`."""
    setting = cost_family(run.model).setting_of(run, layout, attention=attention, compiled=compiled)
    if layout.gather == "stream":
        setting = replace(setting, streamed=layout.shards, compile=False)
    return setting.apart() if layout.splits_backward else setting


def likely_kernel(run: Run, *, rocm: bool) -> Kernel:
    """See `CostFamily`."""
    return cost_family(run.model).likely_kernel(run, rocm=rocm)


def sdpa_choice(requested: str, precision: str, *, biased: bool, rocm: bool) -> Kernel:
    """The kernel of SDPA that runs where `requested` is tried first: what does not cover a case gives way to what does.

    64-bit numbers are for the math kernel alone. Of 32-bit ones, and of biases, flash attention and cuDNN's know nothing,
    but that cuDNN's adds biases of 16 bits; AMD devices have no cuDNN.
    """
    if precision == "fp64" or requested == "math":
        return "math"
    if precision == "fp32" or requested == "efficient":
        return "efficient"
    if requested == "cudnn" and not rocm:
        return "cudnn"
    return "efficient" if biased else "flash"


def loss_chunks(run: Run, degrees: Iterable[int]) -> dict[int, int]:
    """Tokens whose logits are held at once, by tensor-parallel degree."""
    family = cost_family(run.model)
    return {tp: family.chunk_tokens(run, tp) for tp in degrees}


def build_stage(name: PartName, setting: Setting, stream: Stream | None = None) -> Stage:
    """A stage that consists of one part, as the first rank of every axis has it, with parameters as they are used."""
    stage = cost_family(setting.model).build_stage(name, setting, _share(setting), stream)
    if not setting.joint_gradients:
        separate_gradients(stage)
    return stage


def example_batch(name: PartName, stage: Stage, setting: Setting, samples: int) -> dict[str, Tensor]:
    """See `CostFamily`."""
    return cost_family(setting.model).example_batch(name, stage, setting, samples)


def fuse_norms(stage: Stage, setting: Setting, recorder: Recorder) -> None:
    """See `CostFamily`."""
    cost_family(setting.model).fuse_norms(stage, recorder)


def part_parameters(stage: Stage, setting: Setting) -> tuple[PartParameter, ...]:
    """The parameters of a stage of one part."""
    family = cost_family(setting.model)
    tied = family.tied(setting.model)
    whole = family.whole_part(setting, stage.part.part)
    shapes = {name: parameter.shape for name, parameter in named_parameters(whole, tied).items()}
    return tuple(
        PartParameter(name, tuple(p.shape), family.parameter_kind(name), split=p.shape != shapes[name])
        for name, p in named_parameters(stage.part, tied).items()
    )


def _share(setting: Setting) -> SequenceShare:
    tp, cp = (
        Axis(name, 0, size, None, tuple(range(size)), name) for name, size in (("tp", setting.tp), ("cp", setting.cp))
    )
    return SequenceShare(cp, tp, setting.context)
