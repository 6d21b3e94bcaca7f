"""Experts that no token goes to any more: they no longer learn, and their memory is wasted."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.training.expert_use import ExpertUse
from phalanx.training.logs import RunLog

DEAD_STEPS = 50
"""Steps in a row without a token after which an expert counts as dead."""
_NAMED = 8
"""Experts that a warning names before it only counts them."""


class DeadExperts:
    """Warns of experts that get no token for many steps."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        # Not kept in checkpoints: a resumed run counts anew, and warns a little later.
        self._idle: dict[tuple[int, int], int] = {}
        """Steps in a row without a token, by layer and expert."""

    def watch(self, step: int, use: Sequence[ExpertUse]) -> None:
        """Take note of a step; say once which experts have died with it."""
        for layer in use:
            died = []
            for expert, share in enumerate(layer.load):
                idle = 0 if share else self._idle.get((layer.layer, expert), 0) + 1
                self._idle[layer.layer, expert] = idle
                if idle == DEAD_STEPS:
                    died.append(expert)
            if died:
                some = ", ".join(map(str, died[:_NAMED])) + (f" and {len(died) - _NAMED} more" if died[_NAMED:] else "")
                text = (
                    f"layer {layer.layer}: no token went to expert{'s' * (len(died) > 1)} {some} for {DEAD_STEPS} steps; "
                    "raise model.experts.balance_weight, or balance by model.experts.bias_rate"
                )
                self._log.event("dead_experts", step, layer=layer.layer, experts=died, text=text)
                self._log.note(f"warning: step {step}: {text}")
