"""What trials and measurements leave out of a run: what is written for people, and what watches it."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.config.schema import Run

QUIET = (
    *("evaluation.every=null", "evaluation.prompt=null", "training.tensorboard=false", "training.wandb=null"),
    *("training.mlflow=null", "training.run_dir=null", "training.on_nonfinite=stop", "training.profile=null"),
    *("training.memory_snapshot=null", "data.verify=false"),
)
"""Overrides that all of them have."""


def applicable(run: Run, words: Iterable[str]) -> list[str]:
    """Those `section.field=value` words whose field runs of this family have."""
    found = []
    for word in words:
        section, field = word.partition("=")[0].split(".")
        if hasattr(getattr(run, section), field):
            found.append(word)
    return found
