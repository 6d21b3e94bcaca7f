"""How layouts reach into a model family: building its parts split over ranks, and running one as a stage.

A family's module `layout.<family>` holds one object that does both. What a family declares about itself as data is in
`families.family`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.config.schema import Run
from phalanx.data.batch import Batch
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.data_parallel.sharding import WholeParameters
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.nn.splits import ModelChunk


@dataclass(frozen=True)
class BuildContext:
    """What the building of every part of a model has in common. `run` is a run of the family's kind."""

    run: Any
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


class FamilyLayout(Protocol):
    """One family under parallelism."""

    compiles_blocks: bool
    """Whether blocks can be compiled one by one."""

    def build(self, building: BuildContext, part: ModelChunk) -> tuple[nn.Module, TensorSplits]:
        """A part on meta, split over `tp` and `cp`; and which part of which parameter this rank keeps, by local name.

        The module has `part`, `config`, `dtype` and, where they belong to it, `embedding`, `blocks` and `head`.
        """

    def stage(self, building: BuildContext, part: nn.Module, index: int) -> Stage:
        """Runs a built part."""

    def example_batch(self, run: Any, samples: int, device: torch.device) -> Batch:
        """Samples without content, in the shapes that training has."""

    def choose_attention(self, run: Any, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
        """The attention kernel for these shapes on this device; called on one rank, which tells the others."""


def family_layout(run: Run) -> FamilyLayout:
    """The family of `run` under parallelism, imported only now."""
    family: FamilyLayout = import_module(f"phalanx.families.{run.model.family}.layout").LAYOUT
    return family
