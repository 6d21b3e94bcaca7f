"""How a model's mixtures of experts are used, by layer and step.

Read from the figures that every step brings with its loss (`layout.layout_model.Stage.finish_step`): nothing is measured
apart, and no host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.nn.experts import OTHER_FIGURES


@dataclass(frozen=True)
class ExpertUse:
    """Use of the experts of one layer in one step, over the whole global batch."""

    layer: int
    load: tuple[float, ...]
    """Share of the choices that each expert got; choices that it had no room for count."""
    entropy: float
    """Entropy of the load over its largest value: 1 where all experts get the same, 0 where one gets everything."""
    violation: float
    """Maximal violation: the largest load over the mean, less 1 (Wang et al. 2024, arXiv:2408.15664, section 4.1)."""
    dropped: float
    """Share of the choices that found no room (capacity_factor)."""
    balance_loss: float
    """Balance loss, mean per token; 0 where there is none."""
    z_loss: float
    """z loss of the router, mean per token; 0 where there is none."""


def measure_use(figures: Sequence[float], experts: int) -> tuple[ExpertUse, ...]:
    """Return the use of each layer with experts.

    figures: `nn.experts.Router.figures` of every layer, one behind another. experts: routed experts of a layer.
    """
    width = experts + OTHER_FIGURES
    rows = [figures[start : start + width] for start in range(0, len(figures), width)]
    # Layers without experts have counted nothing.
    return tuple(_measure_layer(layer, row[:experts], row[experts:]) for layer, row in enumerate(rows) if any(row))


def _measure_layer(layer: int, choices: Sequence[float], others: Sequence[float]) -> ExpertUse:
    tokens, dropped, balance, z = others
    # Recompute routes tokens twice, which doubles all figures alike.
    total = sum(choices)
    load = tuple(count / total for count in choices)
    entropy = -sum(share * math.log(share) for share in load if share) / math.log(len(load))
    return ExpertUse(layer, load, entropy, max(load) * len(load) - 1.0, dropped / total, balance / tokens, z / tokens)
