"""How far a layout may be from one rank: rounding errors, and nothing else.

A layout changes the order of sums. The sum of n terms in another order differs by about sqrt(n) eps of their size, and what
goes wrong in one layer is carried, and grows a little, through each further layer on the way back from the loss. Hence

    bound(l) = K * sqrt(T) * C^(L + 1 - l) * eps

with T the targets that a gradient sums over, L the layers, l the layer (0 the embedding, L + 1 the head), eps the spacing
of the format's numbers at 1; C and its exponent follow Megatron-LM's gradient tests. Wrong arithmetic is not of this size:
a gradient left out, counted twice or scaled is off by parts of itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SCALE = 16.0
"""K of the bound."""
GROWTH_PER_LAYER = 1.03
"""C of the bound."""


@dataclass(frozen=True)
class Bound:
    """Largest relative errors (2-norm of the difference over the 2-norm of the one-rank value)."""

    dtype: torch.dtype
    layers: int
    targets: int

    @property
    def eps(self) -> float:
        """Spacing at 1 of the format of activations."""
        return torch.finfo(self.dtype).eps

    @property
    def loss(self) -> float:
        """Bound for a loss, and for a gradient norm."""
        return SCALE * math.sqrt(self.targets) * self.eps

    def gradient(self, name: str) -> float:
        """Return the bound for the gradient of the parameter, or the activations behind the module, `name`."""
        return self.loss * GROWTH_PER_LAYER ** (self.layers + 1 - layer_of(name, self.layers))

    def parameter(self, name: str, *, gain: float) -> float:
        """Return the bound for a parameter after updates.

        gain: change of the parameter for a change of its gradient, both relative.
        """
        return self.gradient(name) * gain + 8.0 * torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps

    def __str__(self) -> str:
        return (
            f"{SCALE:g} * sqrt({self.targets} targets) * {GROWTH_PER_LAYER:g}^(layers to the loss) * {self.eps:.3g}, "
            f"at most {self.gradient('embedding'):.2g}"
        )


def layer_of(name: str, layers: int) -> int:
    """Return the layer of a module or parameter: 0 for the embedding, 1 to `layers` for blocks, then the head."""
    first, *rest = name.split(".")
    if first == "blocks":
        return int(rest[0]) + 1
    return 0 if first == "embedding" else layers + 1
