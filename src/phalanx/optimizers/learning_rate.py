"""Learning rate as a pure function of the step, so that nothing of it has to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.config.schema import Optimizer

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1.0 - progress,
}
"""How far above its minimum the rate is, 1 to 0, by the progress of its decay, 0 to 1, for each `optimizer.schedule`."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """The learning rates of a run of `total_steps` optimizer steps.

    Linear warm-up reaches the peak at `warmup_steps`. cosine and linear then fall to `min_lr_ratio` of it at the last step;
    wsd (Hu et al. 2024, section 4) stays at the peak and falls linearly over the last `decay_fraction` of all steps.
    """

    config: Optimizer
    total_steps: int

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * step / config.warmup_steps
        decay_start = config.warmup_steps
        if config.schedule == "wsd":
            # Rounded to the nearest step: rounding up would add one wherever the product is not exact.
            decay_start = max(decay_start, self.total_steps - round(config.decay_fraction * self.total_steps))
        progress = min(1.0, max(0.0, (step - decay_start) / max(1, self.total_steps - decay_start)))
        above_minimum = DECAYS[config.schedule](progress)
        return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * above_minimum)
