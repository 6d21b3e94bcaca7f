"""A run cut short to be measured: some steps of the real thing, without what lies between steps."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run

_QUIET = (
    *("checkpoint.every=null", "checkpoint.last=false", "evaluation.every=null", "evaluation.samples=8"),
    *("evaluation.prompt=null", "training.tensorboard=false", "training.wandb=null", "training.mlflow=null"),
    *("training.resume=never", "data.verify=false", "training.profile=null", "training.memory_snapshot=null"),
    *("training.on_nonfinite=stop", "training.run_dir=null"),
)
"""What it leaves out."""
_RATE_SHARE = 0.01
"""Of the run's learning rate. A large rate without a warm-up throws a new model about, and rounding grows from step to step
until the losses of layouts have nothing in common."""


def short_run(run: Run, steps: int, words: Sequence[str] = ()) -> Run:
    """`run` for `steps` steps at a small and constant learning rate, changed by further `section.field=value` words.

    Raises ConfigError where those are wrong.
    """
    quiet = [word for word in _QUIET if _has(run, word)]
    # A schedule is a function of the number of steps, and may want more of them for its warm-up alone.
    rate = (
        f"optimizer.lr={run.optimizer.lr * _RATE_SHARE!r}",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
    )
    return parse_run(dump_run(run), "the run file", [*quiet, *rate, f"training.steps={steps}", *words])


def _has(run: Run, word: str) -> bool:
    """Whether runs of this kind have the field that an override names."""
    section, field = word.partition("=")[0].split(".")
    return hasattr(getattr(run, section), field)
