"""Runs shortened to be measured: real steps, without what people read and what lies between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run

QUIET = (
    *("evaluation.every=null", "evaluation.prompt=null", "training.tensorboard=false", "training.wandb=null"),
    *("training.mlflow=null", "training.run_dir=null", "training.on_nonfinite=stop", "training.profile=null"),
    *("training.memory_snapshot=null", "data.verify=false"),
)
"""Overrides of every trial and measurement."""
_SHORT = (
    *QUIET,
    *("checkpoint.every=null", "checkpoint.last=false", "evaluation.samples=8", "training.resume=never"),
)
_RATE_SHARE = 0.01


def applicable_overrides(run: Run, overrides: Iterable[str]) -> list[str]:
    """Return the `section.field=value` overrides whose field runs of this family have."""
    found = []
    for override in overrides:
        section, field = override.partition("=")[0].split(".")
        if hasattr(getattr(run, section), field):
            found.append(override)
    return found


def short_run(run: Run, steps: int, overrides: Sequence[str] = ()) -> Run:
    """Return `run` cut to `steps` steps at a small constant learning rate, with further `section.field=value` overrides.

    Raises ConfigError where an override is wrong.
    """
    rate = (
        # Without a warm-up the whole rate throws a new model about, and rounding grows from step to step until the losses
        # of equivalent layouts have nothing in common.
        f"optimizer.lr={run.optimizer.lr * _RATE_SHARE!r}",
        # A schedule is a function of the number of steps; its warm-up alone may be longer than the short run.
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
    )
    words = [*applicable_overrides(run, _SHORT), *rate, f"training.steps={steps}", *overrides]
    return parse_run(dump_run(run), "the run file", words)
