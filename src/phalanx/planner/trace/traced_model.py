"""What cost models ask of a bound model: its parts on meta, what they are called with, and what a run of it computes with.

A part's costs depend on a `Setting` alone, so that layouts with equal settings are traced once: a `PartTracer` is a model
bound to a setting, as `TracedModel` is one bound to a run. See docs/architecture.md, the families.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from phalanx.config.families import check_parameter_count
from phalanx.config.model import BlockModel
from phalanx.config.schema import Run
from phalanx.data.batch_stream import Batch
from phalanx.families.family import DeclaredModel
from phalanx.families.registry import bind, bound_class
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import LayoutModel, Stage, named_parameters
from phalanx.layout.mesh import Axis
from phalanx.layout.spec import LayoutTable, Recompute, ResolvedLayout
from phalanx.layout.streamed_weights.stream_pairs import Stream
from phalanx.nn.adapters import EVERY_PARAMETER, TrainedParameters, add_adapters
from phalanx.nn.experts import choose_expert_products
from phalanx.nn.float8_linear import Float8Product
from phalanx.nn.layers import Linear, Norm, choose_products, separate_gradients
from phalanx.nn.parameters import ParameterKind
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.accelerator_kernels import fused_rms_norm
from phalanx.planner.trace.expert_loads import PRIOR, ExpertLoads
from phalanx.planner.trace.operations import ExpertShare
from phalanx.planner.trace.recorder import Recorder

FloatArray = npt.NDArray[np.float64]
PartName = Literal["embedding", "block", "leading", "head"]
"""`block` is one of the last blocks; `leading` one of the first where these are others (`BlockModel.leading_layers`)."""
BLOCKS: tuple[PartName, ...] = ("block", "leading")
Kernel = Literal["flash", "cudnn", "efficient", "flex", "math", "cpu"]
"""Attention as accelerators compute it; `cpu` is what an uncompiled run on the CPU does."""
MODEL_PARTS = {
    "embedding": ModelChunk(range(0), first=True, last=False),
    "block": ModelChunk(range(1), first=False, last=False),
    "leading": ModelChunk(range(1), first=False, last=False),
    "head": ModelChunk(range(0), first=False, last=True),
}
"""The parts as those of a model."""


@dataclass(frozen=True)
class MicrobatchPasses:
    """The forward passes of a step that one micro-batch goes through, where one stage is the whole model."""

    trained: int = 1
    """Forward passes each of which a backward pass follows; see `Stage.training_passes`."""
    forecasts: int = 0
    """Forward passes that nothing is kept of."""

    @property
    def linked(self) -> bool:
        """Whether gradients go from one pass back to another."""
        return self.trained > 1

    @property
    def continued(self) -> bool:
        """Whether a trained pass starts from what other passes gave."""
        return self.trained + self.forecasts > 1

    def kind(self) -> MicrobatchPasses:
        """Return the fewest passes in which the parts of a model cost as in these."""
        return MicrobatchPasses(min(self.trained, 2), 1 if self.continued else 0)


ONE_PASS = MicrobatchPasses()


@dataclass(frozen=True)
class Setting:
    """Everything the costs of a part depend on, besides the micro-batch."""

    model: BlockModel
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
    ep: int = 1
    """Ranks over which experts are sharded, whole ones each."""
    expert_tp: int = 1
    """Ranks over which each expert is sharded; more than 1 where ranks have one expert each."""
    ep_chunks: int = 1
    """Parts of the tokens whose rows travel to experts one after the other, where `ep` is more than 1."""
    ep_node: int = 1
    """Ranks of a node that rows for its experts come to first; 1 where they go to the ranks of their experts at once."""
    loads: ExpertLoads = PRIOR
    """How evenly routers use experts."""
    share: ExpertShare | None = None
    """What a traced rank has in place of what `ep` and `loads` say; null traces once for all of these."""
    casts_experts: bool = False
    """Whether experts are kept in the main format and cast in every pass, since no other rank has them."""
    joint_gradients: bool = True
    """Whether a node of the backward pass may give gradients of inputs and of weights at once."""
    quantises_once: bool = True
    """Whether weights in 8 bits are made once a step, and not in each pass."""
    trained: TrainedParameters = EVERY_PARAMETER
    """Which parameters are trained, and the adapters of linear layers."""
    passes: MicrobatchPasses = ONE_PASS
    """Passes of a micro-batch. How they are joined costs something at both ends of the model alone."""

    def freezes(self, name: str) -> bool:
        """Return whether the parameter `name` of a part is trained in no block: parts stand for all blocks of their kind."""
        _, number, inner = name.split(".", 2) if name.startswith("blocks.") else ("", "", "")
        if not number:
            return self.trained.freezes(name)
        return all(self.trained.freezes(f"blocks.{block}.{inner}") for block in range(self.model.n_layers))

    def unspread(self) -> Setting:
        """Return the setting of what holds no experts: however these are spread, it costs the same."""
        return replace(self, ep=1, expert_tp=1, ep_chunks=1, ep_node=1, casts_experts=False)

    def apart(self) -> Setting:
        """Return the setting of schedules that split input and weight gradients: blocks are not compiled then."""
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
    """Whether it is never gathered whole; see `planner.trace.streamed_block`."""
    expert: bool = False
    """Whether it belongs to experts, which are sharded over the ranks of `ep`."""
    matrix: bool = False
    """Whether an optimizer may treat it as one matrix or several."""
    frozen: bool = False
    """Whether it is not trained: it has neither gradients nor optimizer state."""
    quantised: bool = False
    """Whether it is a weight whose products are those of 8-bit numbers."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """What data-parallel sharding cuts."""
        return self.shape[0]

    def sharded_count(self, ranks: int) -> int:
        """Return the elements on one of `ranks` data-parallel ranks: whole rows, as many on each, padding included."""
        # FSDP2 cuts dim 0 and pads it, so that every rank exchanges as much.
        return -(-self.rows // ranks) * (self.count // self.rows)


class PartTracer(DeclaredModel):
    """The parts of a model on meta, in one setting; a family's class derives from its `DeclaredModel` too."""

    model: BlockModel

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.model, setting.length)
        self.setting = setting

    @abstractmethod
    def build_stage(self, name: PartName, share: SequenceShare, stream: Stream | None) -> Stage:
        """Build a stage of one part on meta, as the first rank of every axis has it, parameters in their compute format.

        stream: streams the matrices of blocks; None leaves them whole.
        """

    @abstractmethod
    def whole_part(self, part: ModelChunk) -> nn.Module:
        """Build a part on meta, as one device has it."""

    @abstractmethod
    def example_batch(self, name: PartName, stage: Stage, samples: int) -> dict[str, Tensor]:
        """Return the arguments of a stage of this part, on meta."""

    def expert_share(self) -> ExpertShare:
        """Return the share of a block's experts that a rank of `ep` has; by default there are none."""
        return ExpertShare(self.setting.ep * self.setting.expert_tp, 0, Fraction(1), self.setting.expert_tp)

    def random_drops(self) -> bool:
        """Return whether training drops anything at random behind the matrices of a block; by default not."""
        return False


class TracedModel(LayoutModel):
    """A bound model whose steps depend on nothing but the run file, so that they can be planned for."""

    absent: ClassVar[str] = (
        "model.family={family}: phalanx plan needs blocks of one size; what a batch of graphs costs depends on "
        "the graphs. phalanx train runs it without a plan: docs/guides/materials.md says in which layouts"
    )

    tracer: ClassVar[type[PartTracer]]
    """Traces the parts of such models."""
    loads: ExpertLoads = PRIOR
    """How evenly routers are taken to use experts, where there are any."""

    @property
    def config(self) -> BlockModel:
        """The model's section of the run file."""
        assert isinstance(self.run.model, BlockModel)
        return self.run.model

    def setting_of(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """Return what the costs of parts in `layout` depend on. attention: the kernel. compiled: whether blocks may be."""
        setting = self.gathered_setting(layout, attention=attention, compiled=compiled)
        setting = replace(setting, trained=TrainedParameters.of(self.run.training))
        if layout.gather == "stream":
            # Chunks are computed one by one from Python, outside any compiled program.
            setting = replace(setting, streamed=layout.shards, compile=False)
        if layout.ep > 1:
            # Experts that are sharded with nobody are not cast as they are gathered, so every pass casts them.
            apart = bool(layout.table.lone_experts[0]) and self.precision.copies_parameters
            setting = replace(setting, ep=layout.ep, expert_tp=layout.expert_tp, casts_experts=apart)
            setting = replace(setting, ep_chunks=layout.ep_chunks, ep_node=layout.ep_node)
        return setting.apart() if layout.splits_backward else setting

    def sample_shapes(self) -> list[tuple[Self, float]]:
        """Return this model as it runs on samples of each shape, with the share of optimizer steps that have such samples.

        By default all samples are alike. What is asked of this model itself is of the largest.
        """
        return [(self, 1.0)]

    @property
    def passes(self) -> MicrobatchPasses:
        """The passes of a micro-batch; by default one."""
        return ONE_PASS

    def expert_load(self, layout: ResolvedLayout) -> Fraction:
        """Return the rows that arrive at the busiest rank of `ep` over those that leave it; by default as many."""
        return Fraction(1)

    def load_spread_bytes(self, layouts: LayoutTable) -> FloatArray:
        """Return one standard deviation of the bytes that rows for a rank's experts take, [layouts]; by default 0."""
        return np.zeros(len(layouts))

    @abstractmethod
    def gathered_setting(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """Return the setting of `layout` with weights gathered whole and gradients of inputs and weights made together."""

    @abstractmethod
    def likely_kernel(self, *, rocm: bool) -> Kernel:
        """Return the attention kernel of the run: the one it names, or what `auto` mostly finds fastest on such devices."""

    def chunk_tokens(self, tp: int) -> int:
        """Return the tokens whose logits are held at once, where there are logits; else any number."""
        return Setting.chunk_tokens

    @abstractmethod
    def sample_bytes(self) -> int:
        """Return the bytes of one sample's inputs and targets on the device."""

    @abstractmethod
    def example_batch(self, samples: int, device: torch.device) -> Batch:
        """Return samples without content, in the shapes that training has."""

    def bytes_between_passes(self) -> int:
        """Return the bytes of one sample that passes of its micro-batch hand to one another; by default 0."""
        return 0

    def dry_run_fields(self, device: torch.device, tp: int) -> dict[str, Any]:
        """Return the fields of `training` that a run on `device` decides by itself, as it decides them; by default none."""
        return {}

    def dry_run_attention(self) -> AttentionChoice:
        """Return the attention of a dry run that keeps what an accelerator's kernel keeps.

        By default SDPA: without a mask the CPU's fused attention keeps what accelerators' do, its result and one number a
        row and head.
        """
        return AttentionChoice("sdpa")


def bind_planned(run: Run) -> TracedModel:
    """Return the bound model of a run to plan for.

    Raises ConfigError, with the reason, for families whose steps depend on more than the run file, and for models of
    impossible size.
    """
    model = bind(run, TracedModel)
    check_parameter_count(run.model)
    return model


def part_tracer(setting: Setting) -> PartTracer:
    """Return the tracer of the parts of `setting`'s model."""
    return bound_class(setting.model.family, TracedModel).tracer(setting)


def sdpa_choice(requested: str, precision: str, *, biased: bool, rocm: bool) -> Kernel:
    """Return the kernel of SDPA that runs where `requested` is tried first: one that does not cover a case gives way.

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


def build_stage(name: PartName, setting: Setting, stream: Stream | None = None) -> Stage:
    """Build a stage of one part, as the first rank of every axis has it, with parameters in the format they are used in."""
    tracer = part_tracer(setting)
    # the first rank of either axis stands for all: none holds more
    tp, cp = (
        Axis(axis, 0, size, None, tuple(range(size)), axis) for axis, size in (("tp", setting.tp), ("cp", setting.cp))
    )
    stage = tracer.build_stage(name, SequenceShare(cp, tp, setting.context), stream)
    # Adapters are added as the names of their layers are asked for.
    list(add_adapters(stage.part, setting.trained.adapters))
    for parameter_name, parameter in named_parameters(stage.part, tracer.tied()).items():
        parameter.requires_grad_(not setting.freezes(parameter_name))
    if not setting.joint_gradients:
        separate_gradients(stage)
    # Embedding and head keep the plain product in every precision.
    if name in BLOCKS:
        choose_products(stage.part.blocks, PRECISIONS[setting.precision], torch.device("meta"))
        choose_expert_products(stage.part.blocks, PRECISIONS[setting.precision], torch.device("meta"))
        if setting.quantises_once:
            _hold_quantised(stage)
    return stage


def _hold_quantised(stage: Stage) -> None:
    """Give the layers of a stage on meta their weights in 8 bits, which are there when a pass begins."""
    for layer in stage.modules():
        if isinstance(layer, Linear) and isinstance(layer.multiply, Float8Product):
            # Other ranks have a say in the scales, and none in their shapes.
            alone = replace(layer.multiply, input_group="", output_group="")
            layer.held = alone.hold_weight(layer.weight.detach())


def example_batch(name: PartName, stage: Stage, setting: Setting, samples: int) -> dict[str, Tensor]:
    """See `PartTracer`."""
    return part_tracer(setting).example_batch(name, stage, samples)


def fuse_norms(stage: Stage, recorder: Recorder) -> None:
    """Let the norms of a stage on meta run as on accelerators, by one kernel; PyTorch would take RMSNorm apart."""
    for module in stage.modules():
        if isinstance(module, Norm):
            # Behind the module's own class, so that whatever it adds to a norm stays.
            kind: Any = type(module)
            module.__class__ = _FusedNorm if kind is Norm else type(kind.__name__, (kind, _FusedNorm), {})
            module.recorder = recorder  # type: ignore[assignment]


class _FusedNorm(Norm):
    """RMSNorm as the single kernel that uncompiled runs on accelerators have."""

    recorder: Recorder

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of [..., width]; the result has the same shape."""
        return fused_rms_norm(x, self.weight, self.recorder) if self.kind == "rmsnorm" else super().forward(x)


def part_parameters(stage: Stage, setting: Setting) -> tuple[PartParameter, ...]:
    """Return the parameters of a stage of one part."""
    tracer = part_tracer(setting)
    tied = tracer.tied()
    spread = {id(parameter) for parameter in expert_parameters(stage)} if setting.ep > 1 else set()
    whole = tracer.whole_part(stage.part.part)
    list(add_adapters(whole, setting.trained.adapters))
    # What `tp` splits is not declared again here: a rank's part has another shape than one device's.
    shapes = {name: parameter.shape for name, parameter in named_parameters(whole, tied).items()}
    layers = [module for module in stage.modules() if isinstance(module, Linear)]
    quantised = {id(layer.weight) for layer in layers if isinstance(layer.multiply, Float8Product)}
    return tuple(
        PartParameter(
            name,
            tuple(p.shape),
            tracer.parameter_kind(name),
            split=p.shape != shapes[name],
            expert=id(p) in spread,
            matrix=p.dim() == 2 and tracer.matrix_rows(name) is not None,
            frozen=setting.freezes(name),
            quantised=id(p) in quantised,
        )
        for name, p in named_parameters(stage.part, tied).items()
    )


def quantised_layers(module: nn.Module) -> list[Linear]:
    """Return the layers of `module` whose weights are there in 8 bits when a pass begins."""
    return [layer for layer in module.modules() if isinstance(layer, Linear) and layer.held is not None]


def expert_parameters(stage: Stage) -> list[nn.Parameter]:
    """Return the parameters of the experts of a stage."""
    return [parameter for one in stage.expert_networks() for parameter in one.parameters()]
