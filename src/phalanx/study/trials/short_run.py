"""A run cut short to be measured: some steps of the real thing, without what lies between steps."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.study.trials.quiet import QUIET, applicable

_SHORT = (
    *QUIET,
    *("checkpoint.every=null", "checkpoint.last=false", "evaluation.samples=8", "training.resume=never"),
)
"""What it leaves out."""
_RATE_SHARE = 0.01
"""Of the run's learning rate. A large rate without a warm-up throws a new model about, and rounding grows from step to step
until the losses of layouts have nothing in common."""


def short_run(run: Run, steps: int, words: Sequence[str] = ()) -> Run:
    """`run` for `steps` steps at a small and constant learning rate, changed by further `section.field=value` words.

    Raises ConfigError where those are wrong.
    """
    # A schedule is a function of the number of steps, and may want more of them for its warm-up alone.
    rate = (
        f"optimizer.lr={run.optimizer.lr * _RATE_SHARE!r}",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
    )
    return parse_run(
        dump_run(run), "the run file", [*applicable(run, _SHORT), *rate, f"training.steps={steps}", *words]
    )
