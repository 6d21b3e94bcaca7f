"""What layouts and families know of each other: how a model is built on a rank, and how its parameters are sharded.

A family derives its bound model from `LayoutModel`, and what runs a built model chunk from `Stage`. Which axes there
are, and what is sharded over them, it never sees: it is handed a `BuildContext`, whose `sharding` does that. What a model
declares about itself as data is in `families.family`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.data.batch_stream import Batch
from phalanx.families.family import BoundModel
from phalanx.kernels.float8 import QuantisedCopy
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.data_parallel.low_precision import LowPrecisionParameters
from phalanx.layout.expert_parallel.token_exchange import Stages
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.split_layers import split_tensors
from phalanx.nn.adapters import DOWN, UP, Adapters, add_adapters
from phalanx.nn.layers import Linear, quantise_weights
from phalanx.nn.precision import Precision, find_precision
from phalanx.nn.splits import ModelChunk, Splits
from phalanx.torch_compat import common as compat


class WholeShapes(NamedTuple):
    """Shapes of what a whole model holds, by name."""

    parameters: dict[str, tuple[int, ...]]
    state: dict[str, tuple[int, ...]]
    """What is saved beside the parameters."""


class LayoutModel(BoundModel):
    """A bound model under parallelism."""

    compiles_blocks: bool = True
    """Whether blocks can be compiled one by one."""

    @property
    def precision(self) -> Precision:
        """Return the number formats that `layout.precision` names."""
        return find_precision(self.run.layout.precision, self.run.layout.fp8_gradients)

    @abstractmethod
    def build(self, building: BuildContext, part: ModelChunk) -> tuple[nn.Module, TensorSplits]:
        """Build a model chunk on meta, split over `tp` and `cp`.

        Returns the module, which has `part`, `config`, `dtype` and, where they belong to it, `embedding`, `blocks` and
        `head`; and which part of which parameter this rank keeps, by local name.
        """

    @cached_property
    def whole_shapes(self) -> WholeShapes:
        """Shapes in the whole model: what its checkpoints hold."""
        # A rank alone holds the whole model; on meta that takes no memory.
        share = SequenceShare(Axis("cp"), Axis("tp"), "ring")
        adapters = Adapters.of(self.run.training.lora)
        context = BuildContext(torch.device("meta"), AttentionChoice("sdpa"), share, adapters=adapters)
        part, _ = self.build(context, ModelChunk(range(self.run.model.n_layers)))
        found = named_parameters(part, self.tied()), saved_state(part)
        return WholeShapes(*({name: tuple(tensor.shape) for name, tensor in each.items()} for each in found))

    @abstractmethod
    def build_stage(self, building: BuildContext, part: ModelChunk, index: int) -> tuple[Stage, TensorSplits]:
        """Build a model chunk as `build` does, within what runs it. index: its place among the model's stages."""

    def choose_attention(self, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
        """Choose the attention kernel for these shapes on this device; called on one rank, which tells the others.

        By default nothing is chosen: models that write attention out themselves run it as they write it.
        """
        return AttentionChoice("sdpa")


class WholeParameters:
    """Data parallelism of a rank that shares its data with nobody, and the interface of every other kind.

    Decides how a rank gets the parameters it computes with, and who reduces their gradients. `apply` and `execute` know this
    interface alone. The kinds that derive from it:

        FullySharded         FSDP2, its exchanges made by collectives or by copy engines (`data_parallel.fully_sharded`)
        StreamedSharding     FSDP2, but the matrices of blocks travel round a ring of ranks (`streamed_weights`)
    """

    def __init__(self) -> None:
        self._quantised: list[Linear] = []
        """Layers whose weights are quantised once a step."""

    def split_parameters(self, model: nn.Module, splits: Splits, tp: Axis) -> TensorSplits:
        """Cut the parameters of `model`, still on meta, down to this rank's over `tp`, before FSDP2 sees them.

        Returns which part of which parameter this rank keeps.
        """
        return split_tensors(model, splits, tp)

    def shard_stage(self, stage: Stage) -> None:
        """Shard the parameters of `stage` over the data-parallel ranks, in place; `stage` is on meta still."""
        layers = [module for module in stage.modules() if isinstance(module, Linear)]
        self._quantised += [layer for layer in layers if layer.rows_product is not None]

    def prepare_microbatch(self, stage: nn.Module, *, last: bool) -> None:
        """Say what `stage` communicates in the next micro-batch. last: whether it is the last of this optimizer step."""

    def begin_sums(self, stage: Stage) -> None:
        """Let layers of `stage` add gradients of their weights, in products, to the sums over micro-batches."""
        if stage.low_precision is not None:
            stage.low_precision.begin_sums(stage.summing_layers)

    def end_sums(self, stage: Stage) -> None:
        """Let the layers give autograd each gradient again, and drop what no reduction has taken."""
        if stage.low_precision is not None:
            stage.low_precision.end_sums()

    def finish_gradients(self) -> None:
        """Complete the gradients of a step after its last micro-batch."""

    def publish_parameters(self, written: Collection[Tensor] = ()) -> None:
        """Let what is gathered from now on be the present parameters; to be called whenever they have changed.

        written: numbers of `quantised_copies` that the optimizer has written.
        """
        quantise_weights(self._quantised, written)

    @property
    def quantised_copies(self) -> dict[Tensor, QuantisedCopy]:
        """Copies in 8 bits that an optimizer may write, by their main parameters."""
        return {layer.weight: layer.quantised_copy for layer in self._quantised if layer.quantised_copy is not None}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers for exchanges on this rank that are not the allocator's."""
        return 0


@dataclass(frozen=True)
class BuildContext:
    """What the building of every chunk of a model has in common on this rank."""

    device: torch.device
    """Where the chunk will compute; it is built on meta."""
    attention: AttentionChoice
    share: SequenceShare
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    """Ranks over which the experts of a mixture, and each expert, are sharded."""
    expert_tp: int = 1
    """Ranks of `ep`, neighbours, over which each expert is sharded."""
    ep_chunks: int = 1
    """Parts of a micro-batch's tokens that travel to their experts one after the other."""
    ep_stages: Stages | None = None
    """Groups in which rows go to the node of their expert, and on from there; None where they go at once."""
    branches: range | None = None
    """Task heads that this rank holds, by number (`layout.data_parallel.task_heads`); None for all."""
    sharding: WholeParameters = field(default_factory=WholeParameters)
    """Splits the parameters of a chunk that is built; see `WholeParameters.split_parameters`."""
    gathered: bool = False
    """Whether parameters are sharded, and gathered when they are used."""
    adapters: Adapters | None = None
    """Low-rank adapters that linear layers get."""

    def split_parameters(self, model: nn.Module, splits: Splits) -> TensorSplits:
        """Cut the parameters of `model`, still on meta, down to this rank's over `tp`, and add the adapters of its layers.

        Returns which part of which parameter this rank keeps.
        """
        kept = self.sharding.split_parameters(model, splits, self.share.tp)
        for layer in add_adapters(model, self.adapters):
            split = kept.get(f"{layer}.weight")
            if split is not None:
                # A layer with some outputs has those rows of B and all of A; one with some inputs the other way round.
                kept[f"{layer}.{UP if split.dim == 0 else DOWN}"] = split
        return kept


@dataclass(frozen=True)
class TrainingPass:
    """What a forward pass needs to know of the optimizer step that it belongs to."""

    step: int
    """Number of the optimizer step, from 1; dropout is a function of it."""
    scale: Tensor | float = 1.0
    """Factor of the losses before their gradient is formed: one number, or one a task."""
    adds_gradients: bool = False
    """Whether the stage may add gradients to those of its parameters during the forward pass, because nothing (neither a
    sum over ranks nor a copy into other parameters) follows a gradient as autograd forms it."""


class Stage(nn.Module, ABC):
    """Runs a model chunk, `part`, on micro-batches: takes whole samples and computes this rank's share of their positions.

    The last stage of a model gives losses, the others hidden activations.
    """

    loss_is_whole: bool
    """Whether every tensor-parallel rank holds the loss of all its positions; else each holds a part of it."""
    shares_table: bool = False
    """Whether both ends of the model use one parameter, which then is sharded with neither."""
    one_unit: bool = False
    """Whether parameters are gathered and freed all together: the forward pass then contains a backward pass of its own."""
    recomputes: bool = False
    """Whether the chunk itself sees to `layout.recompute`."""
    sample_shapes: int = 1
    """Shapes that samples come in, a step at a time; blocks are compiled for each apart."""
    rows_are_positions: bool = True
    """Whether blocks give [B, S, D], rows of samples at their positions."""
    rows_per_sample: int = 1
    """Consecutive rows of a micro-batch that blocks compute for each sample."""

    def __init__(self, part: nn.Module, index: int, share: SequenceShare, seed: int, length: int) -> None:
        super().__init__()
        self.part: Any = part
        self.index = index
        """Place among the model's stages."""
        self.share = share
        self.seed = seed
        self.length = length
        """Positions of a sample."""
        self.low_precision: LowPrecisionParameters | None = None
        """Joins the parameters that compute with the main parameters, where the two differ."""

    @cached_property
    def summing_layers(self) -> list[Linear]:
        """Layers of blocks that can add gradients of their weights to a sum in a product.

        None where a forward pass contains a backward pass: what is added in place cannot be differentiated.
        """
        layers = [module for block in self.part.blocks for module in block.modules() if isinstance(module, Linear)]
        return [] if self.one_unit else [layer for layer in layers if layer.sums_gradients]

    @abstractmethod
    def forward(
        self, x: Tensor, sample_indices_B: Tensor, *, training: TrainingPass | None = None, **inputs: Any
    ) -> Tensor:
        """Return the summed losses of this rank's targets, [tasks], or hidden activations [B, S/(cp*tp), D].

        Losses that require no gradient in a training pass say that the stage has added the gradients to those of its
        parameters already, which it may do where `training.adds_gradients`.

        x: what the batch gives in the first stage, the stage before's result in others. inputs: what the batch gives every
        stage, of whole samples. sample_indices_B: global sample numbers. training: None leaves dropout out.
        """

    def training_passes(
        self, x: Tensor, sample_indices_B: Tensor, training: TrainingPass, inputs: dict[str, Any]
    ) -> Sequence[Callable[[], Tensor]]:
        """Return what runs the forward passes of one micro-batch, where one stage is the whole model; by default it is one.

        Each gives summed losses as `forward` does, and is called once the backward pass of the one before has been.
        """
        return [lambda: self(x, sample_indices_B, training=training, **inputs)]

    def sample_length(self, inputs: dict[str, Any]) -> int:
        """Return the positions of a sample of a micro-batch, from what the batch gives every stage; by default of all as
        many."""
        return self.length

    def hidden_shape(self, samples: int, length: int | None = None) -> torch.Size:
        """Return the shape of the activations between stages, [B, S/(cp*tp), D], with `rows_per_sample` rows a sample.

        length: positions of a sample; None is the usual number.
        """
        rows = (length or self.length) // (self.share.cp.size * self.share.tp.size)
        return torch.Size((samples * self.rows_per_sample, rows, self.part.config.d_model))

    def cut(self, batch: Batch, microbatches: int) -> Batch:
        """Return what of `batch`, still in host memory, this rank computes with, in `microbatches` (see `Batch.split`).

        By default that is all of it, of which `forward` takes the rank's positions.
        """
        return batch

    def finish_step(self, skip: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Update what the part keeps beside its parameters, after an optimizer step; by default nothing.

        Returns what its mixtures of experts did in the step, float64, in a shape that all stages of the model share, with
        0 in place of what other stages did (`training.expert_use` reads the sum); None where the model has none.

        skip: 1 where the step left the parameters alone, 0-dim. sum_over_ranks: adds up a tensor over all ranks that hold
        this part, whose samples or positions together are the global batch.
        """

    def discard_counts(self) -> None:
        """Forget what `finish_step` would take note of since the last step: a pass that is no part of training; by default
        nothing."""

    def expert_networks(self) -> list[nn.Module]:
        """Return the modules whose parameters are sharded over the ranks of `ep`; by default none."""
        return []

    def branch_parameters(self) -> set[nn.Parameter]:
        """Return the parameters of task heads that not all ranks hold (`data_parallel.task_heads`); FSDP2 skips them."""
        return set()

    def compile_loss(self) -> None:
        """Compile what of the loss is worth it; by default nothing."""


def named_parameters(part: nn.Module, tied: dict[str, str]) -> dict[str, nn.Parameter]:
    """Return the parameters of a model chunk by their names in the whole model.

    tied: names of copies of shared parameters, and the names that these go by.
    """
    return {whole_name(name, tied): parameter for name, parameter in part.named_parameters()}


def saved_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of `module` that are saved, by name."""
    # `state_dict` leaves out buffers that are not persistent, such as counts of the running step.
    saved = module.state_dict(keep_vars=True).keys() - dict(module.named_parameters()).keys()
    return {compat.full_name(name): buffer for name, buffer in module.named_buffers() if name in saved}


def whole_name(name: str, tied: dict[str, str]) -> str:
    """Return the name in the whole model of a chunk's parameter `name`."""
    name = compat.full_name(name)
    return tied.get(name, name)
