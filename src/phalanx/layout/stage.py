"""One part of a model on this rank: takes whole samples and computes this rank's share of their positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.batch_stream import Batch
from phalanx.layout.share import SequenceShare
from phalanx.layout.working_copy import WorkingCopy
from phalanx.torch_compat import common as compat


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
        self.working: WorkingCopy | None = None
        """Joins the parameters that compute with the masters, where the two differ."""
        self.step: int | None = None
        """Optimizer step, which dropout depends on; None leaves dropout out."""
        self.scale: Tensor | float = 1.0
        """What the losses are multiplied by before their gradient is formed."""
        self.alone = False
        """Whether nothing follows gradients as they are formed, no sum over ranks and no copy: a stage that has them with
        its losses may then add them to the parameters' itself."""
        self.gradients_added = False
        """Whether it did so in the last forward pass, whose losses then ask for no backward pass."""

    @abstractmethod
    def forward(self, x: Tensor, sample_indices_B: Tensor, **inputs: Tensor) -> Tensor:
        """Summed losses of this rank's targets, [tasks], or hidden activations [B, S/(cp*tp), D].

        x: what the batch gives in the first stage, the stage before's result in others. inputs: what the batch gives every
        stage, of whole samples. sample_indices: global sample numbers, [B].
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
        """Those of heads that not all ranks hold (`layout.multitask`), and therefore nobody else's to shard."""
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
