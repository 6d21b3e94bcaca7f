"""What layouts ask of a bound model: to build its parts split over ranks, and to run one as a stage.

What a model declares about itself as data is in `families.family`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import nn

from phalanx.families.family import BoundModel
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.data_parallel.sharding import WholeParameters
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.nn.splits import ModelChunk


@dataclass(frozen=True)
class BuildContext:
    """What the building of every part of a model has in common."""

    device: torch.device
    """Where the part will compute; it is built on meta."""
    attention: AttentionChoice
    share: SequenceShare
    branches: range | None = None
    """Branches whose heads this rank holds (`layout.data_parallel.task_heads`); None for all."""
    sharding: WholeParameters = field(default_factory=WholeParameters)
    """Splits the parameters of a chunk that is built: see `WholeParameters.split_parameters`."""
    gathered: bool = False
    """Whether parameters are sharded and gathered when they are used."""


class LayoutModel(BoundModel):
    """A bound model under parallelism."""

    compiles_blocks: bool = True
    """Whether blocks can be compiled one by one."""

    @abstractmethod
    def build(self, building: BuildContext, part: ModelChunk) -> tuple[nn.Module, TensorSplits]:
        """A part on meta, split over `tp` and `cp`; and which part of which parameter this rank keeps, by local name.

        The module has `part`, `config`, `dtype` and, where they belong to it, `embedding`, `blocks` and `head`.
        """

    @abstractmethod
    def build_stage(self, building: BuildContext, part: ModelChunk, index: int) -> tuple[Stage, TensorSplits]:
        """Return the stage, number `index` of the model, that runs a part as `build` gives it; and the latter's splits."""

    def choose_attention(self, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
        """The attention kernel for these shapes on this device; called on one rank, which tells the others.

        By default nothing is chosen: models that write attention out themselves run it as they write it.
        """
        return AttentionChoice("sdpa")
