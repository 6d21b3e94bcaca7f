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


def short_run(run: Run, steps: int, words: Sequence[str] = ()) -> Run:
    """`run` for `steps` steps, changed by further `section.field=value` words. Raises ConfigError where those are wrong."""
    quiet = [word for word in _QUIET if _has(run, word)]
    return parse_run(dump_run(run), "the run file", [*quiet, f"training.steps={steps}", *words])


def _has(run: Run, word: str) -> bool:
    """Whether runs of this kind have the field that an override names."""
    section, field = word.partition("=")[0].split(".")
    return hasattr(getattr(run, section), field)
