"""What a run keeps on each device between and during steps, counted from its run file alone."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.families.family import BoundModel
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.precision import PRECISIONS
from phalanx.optimizers import find_optimizer


@dataclass(frozen=True)
class StateBytes:
    """Bytes one rank holds for its share of the training state. Activations come on top and are not counted here."""

    parameters: int
    """Master parameters."""
    working_copy: int
    """Parameters in the format of the arithmetic, on a rank that holds whole parameters."""
    gradients: int
    """Accumulated gradients; freed between steps."""
    optimizer: int
    """State of the optimizer, such as AdamW's two moments."""

    @property
    def between_steps(self) -> int:
        """What stays allocated from one step to the next."""
        return self.parameters + self.working_copy + self.optimizer

    @property
    def total(self) -> int:
        """What is held during the backward pass, besides activations."""
        return self.between_steps + self.gradients


def state_bytes(model: BoundModel, layout: ResolvedLayout) -> StateBytes:
    """Return the training state of one rank: main parameters, gradients and optimizer state, sharded over `dp_shard` ranks.

    Sharding pads a parameter whose first dim `dp_shard` does not divide; that padding is not counted.
    """
    precision = PRECISIONS[model.run.layout.precision]
    width = precision.main_dtype.itemsize
    count = model.parameter_count()
    share = -(-count * width // layout.dp_shard)
    copied = precision.copies_parameters and layout.dp_shard * layout.dp_replicate == 1
    return StateBytes(
        parameters=share,
        working_copy=precision.compute_dtype.itemsize * count * copied,
        gradients=share,
        optimizer=find_optimizer(model.run.optimizer).state_values * share,
    )
