"""What every model family declares about itself: the questions that layouts, training and verification ask, as data.

A family's module `models.<family>.family` holds one object that answers them for the runs of its kind.
"""

from __future__ import annotations

from typing import Any, Protocol

from phalanx.nn.initial import InitRules
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.splits import SplitCount


class Family(Protocol):
    """The declarations of one family. `run` is always a run of its kind (`config.families.RUNS`)."""

    axes: frozenset[str]
    """The degrees of parallelism that may be more than 1."""
    cuts_structures: bool
    """Whether ranks of `cp` share out the atoms of structures; else positions of samples, which attention joins."""
    position_unit: str
    """What a position is, for a person who reads how many are trained on a second."""

    vanishing: tuple[str, ...]
    """Patterns of the parameters whose gradients are 0 by the laws of the model, and computed as rounding errors."""

    def positions(self, run: Any) -> SplitCount:
        """Positions of a sample in the residual stream, and the field that decides."""

    def initial_rules(self, run: Any) -> InitRules:
        """Initial values by parameter name, first match wins."""

    def parameter_kind(self, name: str) -> ParameterKind:
        """The kind of the parameter `name`."""

    def split_counts(self, run: Any) -> list[SplitCount]:
        """What a tensor-parallel degree must divide."""

    def split_rows(self, run: Any) -> SplitCount | None:
        """Rows of a table that tensor-parallel ranks share out unevenly; each must get one."""

    def context_heads(self, run: Any) -> SplitCount:
        """Heads that context parallelism by exchange shares out over `tp` and `cp`."""

    def needs_bias(self, run: Any) -> bool:
        """Whether attention adds a bias or a mask besides the causal one, which a ring computes slowly."""

    def block_costs(self, run: Any) -> tuple[float, float]:
        """What the embedding and the head cost beside one block, in blocks."""

    def tied(self, run: Any) -> dict[str, str]:
        """Parameters that are copies of others wherever both are not in one part, by name."""

    def branches(self, run: Any) -> int:
        """Heads of which each serves a part of the samples; 1 where one serves all."""

    def branch_costs(self, run: Any) -> list[float]:
        """What the samples of each branch cost in a mean step, in any unit."""

    def parameter_count(self, run: Any) -> int:
        """Parameters of the whole model."""

    def flops_per_sample(self, run: Any) -> float:
        """Model FLOPs of one sample, forward and backward, by the convention of `training.flops`."""
