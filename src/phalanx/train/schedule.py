"""Learning rate as a pure function of the step, so that nothing of it has to be saved."""

from __future__ import annotations

import math

from phalanx.config.schema import Optimizer


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1, in a run of `total_steps`.

    Linear warm-up reaches the peak at `warmup_steps`. cosine and linear then fall to `min_lr_ratio` of it at the last step;
    wsd (Hu et al. 2024, section 4) stays at the peak and falls linearly over the last `decay_fraction` of all steps.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    decay_start = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        decay_start = max(decay_start, total_steps - round(optimizer.decay_fraction * total_steps))
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, total_steps - decay_start)))
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "wsd": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[optimizer.schedule]
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * shape)
