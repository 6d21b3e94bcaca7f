"""Bits that flip in a real run, in weights, gradients and activations of one rank at a time, by a plan drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from phalanx.layout.place import as_place
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics

PLACES = ("weight", "gradient", "activation")


@dataclass
class Flip:
    """One to four bits of one number of one rank."""

    step: int
    place: str
    rank: int
    bits: list[int]


def draw_flips(seed: int, trials: int, first: int, every: int, ranks: int) -> list[Flip]:
    """Return the flips of a run of so many ranks, the first in step `first`."""
    draw = random.Random(seed)
    found = []
    for trial in range(trials):
        bits = draw.sample(range(32), draw.randint(1, 4))
        found.append(Flip(first + trial * every, PLACES[trial % len(PLACES)], draw.randrange(ranks), bits))
    return found


class BitFlips(Callback):
    """Flips bits by `draw_flips`; see there. log: file to which ranks append each flip that happened."""

    def __init__(self, log: str, trials: int, first: int, every: int, seed: int = 0) -> None:
        self.log = Path(log)
        self.plan = (seed, trials, first, every)
        self.random = random.Random(seed)
        self.now = 0

    def on_start(self, context: TrainingContext) -> None:
        """Take this rank's flips, and lie in wait for gradients and activations."""
        flips = draw_flips(*self.plan, context.world_size)
        self.flips = {flip.step: flip for flip in flips if flip.rank == context.rank}
        self.parameters = list(context.parameters.values())
        register_module_forward_hook(self.spoil_activation)

    def on_step_begin(self, step: int) -> None:
        """Take note of the step."""
        self.now = step

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Flip bits of a weight behind the update."""
        self.flip("weight", lambda: as_place(self.random.choice(self.parameters).detach()).local)

    def spoil_gradient(self, gradient: Tensor) -> Tensor | None:
        """Flip bits of the gradient of what a layer gave, from which those of its parameters are formed."""
        wrong = gradient.clone()
        return wrong if self.flip("gradient", lambda: wrong) else None

    def spoil_activation(self, module: torch.nn.Module, inputs: object, output: object) -> Tensor | None:
        """Flip bits of what a layer gives, or of its gradient."""
        if not isinstance(output, Tensor) or output.dim() < 3 or output.dtype != torch.float32:
            return None
        if output.requires_grad:
            output.register_hook(self.spoil_gradient)
        wrong = output.clone()
        return wrong if self.flip("activation", lambda: wrong) else None

    def flip(self, place: str, choose: Callable[[], Tensor]) -> bool:
        """Flip bits of a number of the tensor that `choose` gives, where it is time; return whether it was."""
        flip = self.flips.get(self.now)
        if flip is None or flip.place != place:
            return False
        # Once: a step that is done again is spared.
        del self.flips[self.now]
        numbers = choose().view(-1).view(torch.int32)
        number = self.random.randrange(len(numbers))
        for bit in flip.bits:
            # The sign bit of a signed 32-bit number.
            numbers[number] ^= 1 << bit if bit < 31 else -(1 << 31)
        with self.log.open("a") as file:
            file.write(json.dumps(asdict(flip)) + "\n")
        return True
