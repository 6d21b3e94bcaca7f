"""The folder of a tuning study, and its configurations: choices of values, trained in parts from rung to rung.

STUDY/study.log     Optuna journal: each part of a configuration's training, from rung to rung, is a trial of it
STUDY/run.yaml      the run file that is tuned
STUDY/trials/NNNN   the run directory of each configuration
STUDY/jobs/N        log and outcome of each part
STUDY/sessions      who had which devices, and when
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.study.hyperparameters.asha import Standing
from phalanx.study.space import Scalar
from phalanx.study.store import StudyStore
from phalanx.study.trial import ATTEMPTS, Trial

JOURNAL, RUN, TRIALS, JOBS, SESSIONS = "study.log", "run.yaml", "trials", "jobs", "sessions"
_NAME = "tune"
_RUNG = "@"


@dataclass(frozen=True)
class FinishedTrial:
    """A configuration that has a score."""

    number: int
    score: float
    """Score at the highest rung that it reached; lower is better."""
    parameters: dict[str, Scalar]
    """Values that differ from the run file; empty for the run file as it stands where that lies outside the ranges."""
    run_dir: Path
    """A run directory with a checkpoint of step `steps`."""
    steps: int
    """Optimizer steps it has trained; those that were stopped early have fewer than the whole run."""


@dataclass
class Configuration:
    """A choice of values and all parts of its training."""

    key: str
    number: int
    """Number of its first part, which names its folder."""
    values: dict[str, Scalar]
    parts: list[Trial] = field(default_factory=list)
    """Parts in the order in which they began."""

    def standing(self) -> Standing:
        """Return how far the configuration has come, for ASHA."""
        found = Standing(self.number)
        for part in self.parts:
            rung = rung_of(part)
            if part.outcome is None or part.good:
                found.begun = max(found.begun, rung)
            if part.good:
                found.scores[rung] = part.value
            if part.failed:
                found.over = True
        return found

    @property
    def counted(self) -> bool:
        """Whether something is known of it or under way, or it is given up: some part was interrupted too often."""
        lost = Counter(part.key for part in self.parts if part.attempt_failed)
        return any(not part.interrupted for part in self.parts) or max(lost.values(), default=0) >= ATTEMPTS

    @property
    def failure(self) -> Trial | None:
        """The part that failed, if one did."""
        return next((part for part in self.parts if part.failed), None)

    @property
    def running(self) -> bool:
        """Whether a part of it runs."""
        return any(part.outcome is None for part in self.parts)


def part_key(key: str, rung: int) -> str:
    """Return the key of a part of a configuration: its training up to a rung."""
    return f"{key}{_RUNG}{rung}"


def rung_of(part: Trial) -> int:
    """Return the rung that a part leads to."""
    return int(part.key.rpartition(_RUNG)[2])


def group_configurations(parts: Sequence[Trial]) -> list[Configuration]:
    """Return the configurations of a study, in the order in which they began."""
    found: dict[str, Configuration] = {}
    for part in parts:
        key = part.key.rpartition(_RUNG)[0]
        one = found.setdefault(key, Configuration(key, part.number, dict(part.values)))
        one.parts.append(part)
    return list(found.values())


def open_store(folder: Path, about: dict[str, Any] | None) -> StudyStore:
    """Return the store in a study's folder. about: see `StudyStore`; None to read only.

    Raises ConfigError where the folder holds a study of something else, or none to read.
    """
    if about is None and not (folder / JOURNAL).exists():
        raise ConfigError(f"{folder} holds no study (there is no {JOURNAL}); name the --out folder of phalanx tune")
    return StudyStore(folder / JOURNAL, _NAME, about, folder=folder / JOBS, option="--out DIR")


def run_dir(folder: Path, number: int) -> Path:
    """Return the run directory of a configuration."""
    return folder / TRIALS / f"{number:04d}"


def finished_trials(folder: Path) -> list[FinishedTrial]:
    """Return the configurations of a study that have a score and did not fail later, the best (least) score first.

    Trials that early stopping paused are among them, with the steps they have. Raises ConfigError where `folder` holds no
    study.
    """
    store = open_store(folder, None)
    steps = store.about["rungs"]
    found = []
    for one in group_configurations(store.trials()):
        standing = one.standing()
        if standing.scores and not standing.over:
            rung = max(standing.scores)
            found.append(
                FinishedTrial(one.number, standing.scores[rung], one.values, run_dir(folder, one.number), steps[rung])
            )
    return sorted(found, key=lambda trial: (trial.score, trial.number))
