"""A moving average of the weights, as sharded as they are: what is evaluated is smoother than the last step's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phalanx.config.schema import AverageOfWeights
from phalanx.optimizers.optimizer_kind import local_part

AVERAGES = "ema."
"""What the names of averages begin with in a checkpoint."""


class WeightAverage:
    """The average of this rank's parameters; begins as a copy of them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AverageOfWeights) -> None:
        self.parameters = parameters
        self.config = config
        # Like the parameters, not views of them: shards and tensor-parallel parts keep their places in a checkpoint.
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the present weights."""
        for name, parameter in self.parameters.items():
            local_part(self.tensors[name]).copy_(local_part(parameter))

    @torch.no_grad()
    def add_step(self, step: int, updated: Tensor) -> None:
        """Add the weights after optimizer step `step`, where one is due and the step changed them.

        updated: whether the step changed the weights, bool, 0-dim, on the device.
        """
        if step % self.config.every:
            return
        # Computed on the device: asking for the answer here would make the host wait for the whole step.
        weight = (1.0 - self.config.decay) * updated.double()
        for name, parameter in self.parameters.items():
            average = local_part(self.tensors[name])
            average.lerp_(local_part(parameter.detach()), weight.to(average.dtype))
