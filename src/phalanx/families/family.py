"""What a model says about itself once it is bound to a run: the facts that layouts, training and planning ask for.

A family's class derives from this one and from those of the rooms that it takes part in: `layout.family.LayoutModel`,
`planner.trace.traced_model.TracedModel`, `training.inputs.TrainableModel` and `verification.family.VerifiableModel`.
`registry.bind` makes the one object that answers for a run; it is handed down from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from phalanx.config.schema import Run
from phalanx.nn.initial import InitRules
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.splits import SplitCount


class BoundModel(ABC):
    """A model of one family, bound to the run that describes it. Cheap to make: nothing is built or opened."""

    axes: frozenset[str]
    """The degrees of parallelism that may be more than 1."""
    cuts_structures: bool = False
    """Whether ranks of `cp` share out the atoms of structures; else positions of samples, which attention joins."""
    streams_weights: bool = False
    """Whether blocks can compute with some heads or features of their matrices at a time (`layout.gather=stream`)."""
    position_unit: str
    """What a position is, for a person who reads how many are trained on a second."""
    vanishing: tuple[str, ...] = ()
    """Patterns of the parameters whose gradients are 0 by the laws of the model, and computed as rounding errors."""

    absent: ClassVar[str] = "model.family={family} takes no part in this"
    """Why a run of `family` is refused where a class of bound models is asked for that the family's does not derive from."""

    run: Run
    """Of the family's own kind: a family's class declares this attribute with that type."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def rebind(self, run: Run) -> Self:
        """Return the model of another run of the same family."""
        return type(self)(run)

    @abstractmethod
    def positions(self) -> SplitCount:
        """Positions of a sample in the residual stream, and the field that decides."""

    @abstractmethod
    def initial_rules(self) -> InitRules:
        """Initial values by parameter name, first match wins."""

    @abstractmethod
    def parameter_kind(self, name: str) -> ParameterKind:
        """The kind of the parameter `name`."""

    @abstractmethod
    def split_counts(self) -> list[SplitCount]:
        """What a tensor-parallel degree must divide."""

    def split_rows(self) -> SplitCount | None:
        """Rows of a table that tensor-parallel ranks share out unevenly, of which each must get one; by default none."""
        return None

    def context_heads(self) -> SplitCount:
        """Heads that context parallelism by exchange shares out over `tp` and `cp`; by default one."""
        return SplitCount("heads", 1)

    def needs_bias(self) -> bool:
        """Whether attention adds a bias or a mask besides the causal one, which a ring computes slowly; by default not."""
        return False

    @abstractmethod
    def block_costs(self) -> tuple[float, float]:
        """What the embedding and the head cost beside one block, in blocks."""

    def tied(self) -> dict[str, str]:
        """Parameters that are copies of others wherever both are not in one part, by name; by default none."""
        return {}

    def branches(self) -> int:
        """Heads of which each serves a part of the samples; by default 1, which serves all."""
        return 1

    def branch_costs(self) -> list[float]:
        """What the samples of each branch cost in a mean step, in any unit."""
        return [1.0]

    @abstractmethod
    def parameter_count(self) -> int:
        """Parameters of the whole model."""

    @abstractmethod
    def flops_per_sample(self) -> float:
        """Model FLOPs of one sample, forward and backward, by the convention of `training.flops`."""
