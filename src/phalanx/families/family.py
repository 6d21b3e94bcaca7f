"""What layouts, training and planning ask of a model: what its shape alone declares, and what a run of it adds.

A family answers each question once, in the class that has what the answer needs: `DeclaredModel` where the shape and the
positions of a sample do, `BoundModel` where it takes more of the run file. The bound class derives from the family's
declared one and from the classes of the rooms that it takes part in: `layout.layout_model.LayoutModel`,
`planner.trace.traced_model.TracedModel`, `training.inputs.TrainableModel` and `verification.family.VerifiableModel`.
`registry.bind` makes the one object that answers for a run; it is handed down from there. Sizes that must be known without
torch are in `config.families.Sizes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fnmatch import fnmatchcase
from typing import ClassVar, Self

from phalanx.config.check import batch_sizes
from phalanx.config.families import sizes_of
from phalanx.config.model import Model
from phalanx.config.schema import Run
from phalanx.nn.parameters import InitRules, MatrixRows, MatrixRules, ParameterKind
from phalanx.nn.splits import SplitCount, Splits


class DeclaredModel(ABC):
    """What a model declares about its parameters and modules, as data.

    Nothing here depends on the rest of a run file: a family's bound model, and its tracer for the planner, which knows no
    run, derive from the same class.
    """

    model: Model
    """Section of the run file; a family's class declares this attribute with the type of its own."""

    def __init__(self, model: Model, length: int) -> None:
        """Keep the shape. length: positions of a sample in the residual stream."""
        self.model = model
        self.length = length

    @abstractmethod
    def initial_rules(self) -> InitRules:
        """Return initial values by parameter name; the first pattern that matches counts."""

    @abstractmethod
    def parameter_kind(self, name: str) -> ParameterKind:
        """Return the kind of the parameter `name`."""

    def rate_ratio(self, name: str) -> float:
        """Return the factor of the learning rate of the parameter `name` that the model's width asks for; by default 1."""
        return 1.0

    def matrices(self) -> MatrixRules:
        """Return which parameters of kind "matrix" an optimizer may treat as matrices, and of which these are composed.

        By default all but those of embedding and head, each one matrix.
        """
        return [("embedding.*", None), ("head.*", None), ("*", MatrixRows())]

    def matrix_rows(self, name: str) -> MatrixRows | None:
        """Return the matrices of the parameter `name`; None where it is none."""
        if self.parameter_kind(name) != "matrix":
            return None
        return next((rows for pattern, rows in self.matrices() if fnmatchcase(name, pattern)), None)

    def splits(self) -> Splits:
        """Return how modules may be split over tensor-parallel ranks (see `nn.splits`); by default none may."""
        return []

    def split_counts(self) -> list[SplitCount]:
        """Return what a tensor-parallel degree must divide; by default nothing."""
        return []

    def split_features(self) -> list[SplitCount] | None:
        """Return the features of the matrices of blocks that `tp` splits, by the field that says how many; None where the
        model does not say."""
        return None

    @abstractmethod
    def block_costs(self) -> tuple[float, float]:
        """Return the floating-point operations of the embedding and of the head, in those of one block."""

    def tied(self) -> dict[str, str]:
        """Return parameters that are copies of others wherever both are not in one model chunk, by name; by default none."""
        return {}


class BoundModel(DeclaredModel):
    """A model of one family, bound to the run that describes it. Cheap to make: nothing is built or opened.

    What is asked here needs no torch, so that layouts are checked without it: `LayoutModel` and what derives from it do.
    """

    axes: frozenset[str]
    """The degrees of parallelism that may be more than 1."""
    cuts_structures: bool = False
    """Whether `cp` divides the atoms of structures; else positions of samples, which attention joins."""
    streams_weights: bool = False
    """Whether blocks can compute with some heads or features of their matrices at a time (`layout.gather=stream`)."""
    offloads_activations: bool = True
    """Whether the backward pass reads what blocks keep once, so that it may lie in host memory until then."""
    position_unit: str
    """What a position is, for a person who reads how many are trained on a second."""
    vanishing: tuple[str, ...] = ()
    """Patterns of the parameters whose gradients are 0 by the laws of the model, and computed as rounding errors."""

    absent: ClassVar[str] = "model.family={family} takes no part in this"
    """Why a run of `family` is refused where a class of bound models is asked for that the family's does not derive from."""

    run: Run
    """Run file of the family's own kind: a family's class declares this attribute with that type."""

    def __init__(self, run: Run) -> None:
        self.run = run
        super().__init__(run.model, self.positions().count)

    def rebind(self, run: Run) -> Self:
        """Return the model of another run of the same family."""
        return type(self)(run)

    @abstractmethod
    def positions(self) -> SplitCount:
        """Return the positions of a sample in the residual stream, and the field that decides."""

    def split_rows(self) -> SplitCount | None:
        """Return the rows of a table that `tp` shards unevenly, of which each rank must get one; by default none."""
        return None

    def context_heads(self) -> SplitCount:
        """Return the heads that Ulysses context parallelism assigns to ranks of `tp` and `cp`; by default one."""
        return SplitCount("heads", 1)

    def experts(self) -> SplitCount | None:
        """Return the experts of each mixture; by default None: there are none."""
        return None

    def expert_slices(self) -> SplitCount:
        """Return the parts of each expert that stay together, which `expert_tp` shards; by default 1."""
        return SplitCount("experts", 1)

    def dispatched_bytes(self) -> int:
        """Return the bytes that one position sends to its experts in each mixture; by default 0."""
        return 0

    def counts_sequences(self) -> str:
        """Return the field, with its value, that has blocks count over whole sequences, none of whose positions may be
        elsewhere; by default none."""
        return ""

    def expert_parameters(self) -> int:
        """Return the parameters of all experts that `ep` shards; by default 0."""
        return 0

    def needs_bias(self) -> bool:
        """Return whether attention adds a bias or a mask besides the causal one, which a ring computes slowly; by default
        not."""
        return False

    def unstreamable(self) -> str:
        """Return the field that keeps the model's matrices from being streamed, with its value; by default none."""
        return ""

    def branches(self) -> int:
        """Return the number of task heads of which each serves some of the samples; by default 1, which serves all."""
        return 1

    def branch_costs(self) -> list[float]:
        """Return the cost of each task head's samples in a mean step, in any unit."""
        return [1.0]

    def parameter_count(self) -> int:
        """Return the trainable parameters of the whole model, by the family's `Sizes`."""
        return sizes_of(self.model).parameter_count(self.model)

    def active_parameter_count(self) -> int:
        """Return the parameters that compute a position; by default all of them."""
        return self.parameter_count()

    def positions_through(self, step: int) -> int:
        """Return the positions of all samples of the first `step` optimizer steps; by default samples have as many."""
        return batch_sizes(self.run).samples_through(step) * self.positions().count

    def relative_flops(self, step: int) -> float:
        """Return the FLOPs of a sample of optimizer step `step` over `flops_per_sample`; by default all cost the same."""
        return 1.0

    @abstractmethod
    def flops_per_sample(self) -> float:
        """Return the model FLOPs of one sample, forward and backward, by the convention of `training.flops`."""


class DataModel(BoundModel):
    """A bound model whose data can be looked for."""

    absent: ClassVar[str] = "model.family={family} cannot be trained: its class opens no data"

    @abstractmethod
    def check_inputs(self) -> str:
        """Look for every source of the run file, without reading it, and return in words how much there is to train on.

        Raises DataError, or ConfigError, for what training would refuse of what can be seen so.
        """
