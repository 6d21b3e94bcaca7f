"""One part of a model on this rank: takes whole samples and computes this rank's share of their positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.batch_stream import Batch
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.data_parallel.low_precision import LowPrecisionParameters
from phalanx.torch_compat import common as compat


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
    """Runs `part` on micro-batches. The last stage of a model gives losses, the others hidden activations."""

    loss_is_whole: bool
    """Whether every tensor-parallel rank holds the loss of all its positions; else each holds a part of it."""
    shares_table: bool = False
    """Whether both ends of the model use one parameter, which then is sharded with neither."""
    one_unit: bool = False
    """Whether parameters are gathered and freed all together: the forward pass then contains a backward pass of its own."""
    recomputes: bool = False
    """Whether the part itself sees to `layout.recompute`."""
    rows_are_positions: bool = True
    """Whether blocks give [B, S, D], rows of samples at their positions."""

    def __init__(self, part: nn.Module, index: int, share: SequenceShare, seed: int, length: int) -> None:
        super().__init__()
        self.part: Any = part
        self.index = index
        """Place among the model's stages."""
        self.share = share
        self.seed = seed
        self.length = length
        """Positions a sample."""
        self.low_precision: LowPrecisionParameters | None = None
        """Joins the parameters that compute with the main parameters, where the two differ."""

    @abstractmethod
    def forward(
        self, x: Tensor, sample_indices_B: Tensor, *, training: TrainingPass | None = None, **inputs: Tensor
    ) -> Tensor:
        """Return the summed losses of this rank's targets, [tasks], or hidden activations [B, S/(cp*tp), D].

        Losses that require no gradient in a training pass say that the stage has added the gradients to those of its
        parameters already, which it may do where `training.adds_gradients`.

        x: what the batch gives in the first stage, the stage before's result in others. inputs: what the batch gives every
        stage, of whole samples. sample_indices: global sample numbers, [B]. training: None leaves dropout out.
        """

    @abstractmethod
    def example_input(self, samples: int) -> Tensor:
        """What the first stage takes, without content, on the device of the moment."""

    def hidden_shape(self, samples: int) -> torch.Size:
        """Shape of the activations between stages."""
        rows = self.length // (self.share.cp.size * self.share.tp.size)
        return torch.Size((samples, rows, self.part.config.d_model))

    def cut(self, batch: Batch, microbatches: int) -> Batch:
        """What of `batch`, still in host memory, this rank computes with, in `microbatches` (see `Batch.split`); by default
        all of it, of which `forward` takes the rank's positions."""
        return batch

    def branch_parameters(self) -> set[nn.Parameter]:
        """Return the parameters of task heads that not all ranks hold (`data_parallel.task_heads`); FSDP2 skips them."""
        return set()

    def compile_loss(self) -> None:
        """Compile what of the loss is worth it."""


def named_parameters(part: nn.Module, tied: dict[str, str]) -> dict[str, nn.Parameter]:
    """The parameters of a part by their names in the whole model: a copy of a shared table goes by the table's name."""
    return {whole_name(name, tied): parameter for name, parameter in part.named_parameters()}


def whole_name(name: str, tied: dict[str, str]) -> str:
    """The name in the whole model of a part's parameter `name`."""
    name = compat.full_name(name)
    return tied.get(name, name)
