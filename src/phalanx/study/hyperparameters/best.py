"""The run file of the best configuration of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.config.load import dump_run
from phalanx.errors import ConfigError
from phalanx.study.hyperparameters.run import load_study


def best_run_text(folder: Path, facts: dict[str, Any]) -> str:
    """A run file that trains the best configuration from the start, with all that trials leave out of a run.

    facts: of `tune_facts`. Raises ConfigError where no trial has a score.
    """
    best = facts["best"]
    if best is None:
        raise ConfigError("--write: no trial has a score, so there is no best configuration to write")
    note = (
        f"# Best of {len(facts['trials'])} trials: {facts['metric']} {best['score']:.6g} after {best['steps']} steps "
        f"(trial {best['number']}).\n"
    )
    return note + dump_run(load_study(folder)[1].run_of(best["values"]))
