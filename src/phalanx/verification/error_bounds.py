"""How far a layout may be from one rank: by a formula in wide formats, by measured noise in 16 bits, by both in float32.

A layout changes the order of sums. The sum of n terms in another order differs by about sqrt(n) eps of their size, and what
goes wrong in one layer is carried, and grows a little, through each further layer on the way back from the loss. Hence in
float64 and float32

    bound(l) = K * sqrt(T) * C^(L + 1 - l) * eps

with T the targets that a gradient sums over, L the layers, l the layer (0 the embedding, L + 1 the head), eps the spacing
of the format's numbers at 1; C and its exponent follow Megatron-LM's gradient tests. Wrong arithmetic is not of this size:
a gradient left out, counted twice or scaled is off by parts of itself.

In bfloat16 and float16 this bound would be as large as what it is to find. There the noise of every tensor is measured: one
rank runs again with parameters that differ by less than their rounding, and with another split into micro-batches. Where
sums cancel, a tensor is noisier than its neighbours, and so is its bound (after TTrace, arXiv:2506.09280). In float32 the
noise counts where it is above the formula: devices add with atomic operations, in an order of its own each time, so that
gradients that nearly cancel differ from run to run of one rank.
What one rank cannot measure is that a layout rounds more often: where one rank rounds a sum once, p ranks round p parts and
add them up in the same format. That is p roundings of about the size of one, independent of each other, so that the error
grows by sqrt(p) at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.layout.spec import ResolvedLayout

_SCALE = 16.0
"""K of the bound."""
_GROWTH_PER_LAYER = 1.03
"""C of the bound."""
NOISE_RUNS = 4
"""Perturbed runs of one rank that noise is measured over."""
_MARGIN = 2.0
"""Times the measured noise that rounding may be."""
_LEAST_NOISE = 0.25
"""Least noise of any value, in spacings of its format: a few runs of a single number may agree by chance."""


class Bound(Protocol):
    """Largest relative errors (2-norm of the difference over the 2-norm of the one-rank value) that rounding explains."""

    def of(self, what: str, name: str, step: int, gain: float) -> float:
        """Return the bound for one check.

        what, name, step: see `compare_records.Check`. gain: change of a parameter in all steps for a change of its gradient,
        both relative; read for parameters alone.
        """


@dataclass(frozen=True)
class ErrorBound:
    """The bound of wide formats, by its formula."""

    dtype: torch.dtype
    """Number format of activations."""
    layers: int
    """Blocks of the model."""
    targets: int
    """Targets of a global batch, of the task that has most."""

    @property
    def eps(self) -> float:
        """Return the spacing of the numbers at 1 of the format of activations."""
        return torch.finfo(self.dtype).eps

    @property
    def in_16_bits(self) -> bool:
        """Return whether the format is one of 16 bits, in which the formula leaves room for anything."""
        return self.dtype.itemsize < 4

    @property
    def loss(self) -> float:
        """Return the bound for a loss."""
        return _SCALE * math.sqrt(self.targets) * self.eps

    def of(self, what: str, name: str, step: int, gain: float) -> float:
        """See `Bound`."""
        if what == "loss":
            return self.loss
        if what == "choices":
            return self.choices(name, step)
        if what == "state":
            # What follows from counts, in float32 at least.
            return 8.0 * torch.finfo(torch.float32).eps
        if what in ("gradient", "input gradient"):
            return self.gradient(name)
        if what == "parameter":
            wide = torch.promote_types(self.dtype, torch.float32)
            return self.gradient(name) * gain + 8.0 * torch.finfo(wide).eps
        # Activations are followed forward, and the farther from the embedding, the more may have gathered; the gradient's
        # norm holds the embedding's gradient.
        return self.gradient("embedding")

    def gradient(self, name: str) -> float:
        """Return the bound for the gradient of the parameter `name`."""
        return self.loss * _GROWTH_PER_LAYER ** (self.layers + 1 - layer_of(name, self.layers))

    def choices(self, router: str, step: int) -> float:
        """Return the bound for how far logits of a router are from those of one rank, in standard deviations of a token's.

        A logit is no sum over targets: it has the rounding of the layers before it, and in later steps that of the updates.
        """
        return step * _SCALE * _GROWTH_PER_LAYER ** layer_of(router, self.layers) * self.eps

    def __str__(self) -> str:
        return (
            f"{_SCALE:g} * sqrt({self.targets} targets) * {_GROWTH_PER_LAYER:g}^(layers to the loss) * {self.eps:.3g}, "
            f"at most {self.gradient('embedding'):.2g}"
        )


@dataclass(frozen=True)
class MeasuredBound:
    """The bound of float32 and less: for each tensor, what other runs of one rank differ by, times what a layout adds."""

    formula: ErrorBound
    """For what follows from counts, for the rounding of the format, and the least bound of choices and in float32."""
    noise: Mapping[tuple[str, str, int], float]
    """Largest error of any perturbed one-rank run, by kind, name and step of the check."""
    parts: int = 1
    """Parts that a layout splits a sum into, each of them rounded."""

    def of(self, what: str, name: str, step: int, gain: float) -> float:
        """See `Bound`."""
        if what == "state":
            return self.formula.of(what, name, step, gain)
        factor = _MARGIN * math.sqrt(self.parts)
        noise = self.noise[what, name, step]
        # The formula knows the format of the activations, and not that products may be of 8-bit numbers.
        if what == "choices" or not self.formula.in_16_bits:
            return max(self.formula.of(what, name, step, gain), factor * noise)
        least = _LEAST_NOISE * self.formula.eps
        if what == "loss":
            # A mean over targets, whose roundings are independent.
            least /= math.sqrt(self.formula.targets)
        return factor * max(noise, least)

    def __str__(self) -> str:
        noise = f"noise of the tensor, measured over {NOISE_RUNS} runs of one rank"
        measured = f"{_MARGIN:g} * sqrt(tp * cp * expert_tp) * {noise}"
        return measured if self.formula.in_16_bits else f"{measured}; at least {self.formula}"


def parts_of_sums(layout: ResolvedLayout) -> int:
    """Return into how many parts `layout` splits a sum over features or positions; each is rounded by itself."""
    return layout.tp * layout.cp * layout.expert_tp


def layer_of(name: str, layers: int) -> int:
    """Return the layer of a module or parameter: 0 for the embedding, 1 to `layers` for blocks, then the head."""
    first, *rest = name.split(".")
    if first == "blocks":
        return int(rest[0]) + 1
    return 0 if first == "embedding" else layers + 1
