"""What layouts ask of a bound model: to build its parts split over ranks, and to run one as a stage.

What a model declares about itself as data is in `families.family`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.families.family import BoundModel
from phalanx.layout.attention import AttentionChoice
from phalanx.layout.hybrid_stop.streamed_weights import Stream
from phalanx.layout.place import TensorSplits
from phalanx.layout.share import SequenceShare
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.nn.splits import ModelPart


@dataclass(frozen=True)
class Building:
    """What the building of every part of a model has in common."""

    device: torch.device
    """Where the part will compute; it is built on meta."""
    attention: AttentionChoice
    share: SequenceShare
    branches: range | None = None
    """Branches whose heads this rank holds (`layout.multitask`); None for all."""
    stream: Stream | None = None
    """Streams the matrices of blocks, where the layout asks for it; see
    `layout.hybrid_stop.streamed_weights.stream_matrices`."""
    gathered: bool = False
    """Whether parameters are shared out and gathered when they are used."""


class LayoutModel(BoundModel):
    """A bound model under parallelism."""

    compiles_blocks: bool = True
    """Whether blocks can be compiled one by one."""

    @abstractmethod
    def build(self, building: Building, part: ModelPart) -> tuple[nn.Module, TensorSplits]:
        """A part on meta, split over `tp` and `cp`; and which part of which parameter this rank keeps, by local name.

        The module has `part`, `config`, `dtype` and, where they belong to it, `embedding`, `blocks` and `head`.
        """

    @abstractmethod
    def stage(self, building: Building, part: nn.Module, index: int) -> Stage:
        """Runs a built part."""

    def choose_attention(self, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
        """The attention kernel for these shapes on this device; called on one rank, which tells the others.

        By default nothing is chosen: models that write attention out themselves run it as they write it.
        """
        return AttentionChoice("sdpa")
