"""A search of layouts as its journal alone tells it: no planner, no model, and nothing that takes long to import."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.report.study_page import format_choice
from phalanx.study.store import StudyStore
from phalanx.study.trial import DEVICE, Trial, best_trial, count_failures

STUDY = "layout"
"""Name of the study inside its file."""
Row = dict[str, Any]


def read_search(path: Path) -> Row:
    """Return what `SearchResult.summary` does of a search that ended or goes on, but for what the planner expects.

    Raises StudyError where the file is no study.
    """
    store = StudyStore(path, STUDY, None)
    trials, about = store.trials(), store.about
    # without the planner a choice is told by the parameters that differ among trials, or by all where none does
    choices = [trial.values for trial in trials]
    seen = {name: {repr(values.get(name)) for values in choices} for name in {name for one in choices for name in one}}
    varying = {name for name, found in seen.items() if len(found) > 1} or set(seen)
    rows = {
        one.number: summarise_trial(
            one, format_choice({name: value for name, value in one.values.items() if name in varying}), None
        )
        for one in trials
    }
    best = best_trial(trials)
    # studies of earlier versions hold a digest of the run
    run = about.get("run")
    model = run.get("model", {}).get("preset") if isinstance(run, dict) else None
    return {
        "model": model or "model",
        "cluster": about.get("cluster", "unknown"),
        "devices": about.get("devices", 0),
        "where": about.get("where", "local"),
        "cluster_device": about.get("device", "unknown"),
        "measured_on": list_devices(trials),
        "storage": str(path),
        "points": None,
        "stopped": "",
        "trials": list(rows.values()),
        "failures": count_failures(trials),
        "best": None if best is None else rows[best.number],
        "next": [],
        "planned": None,
        "measured": None,
    }


def summarise_trial(trial: Trial, words: str, planned_s: float | None) -> Row:
    """Return the figures of a trial with units in the names. words: its choice; planned_s: by the planner."""
    outcome = trial.outcome
    return {
        "number": trial.number,
        "engine": trial.sampler,
        "values": dict(trial.values),
        "words": words,
        "state": "running" if outcome is None else outcome.cause,
        "step_s": outcome.value if outcome else None,
        "planned_s": planned_s,
        "expected_s": trial.note.get("expected_s"),
        "memory_bytes": outcome.memory_bytes if outcome else None,
        "loss": outcome.losses[-1] if outcome and outcome.losses else None,
        "said": outcome.words if outcome else "",
        "seconds": outcome.seconds if outcome else None,
        "device": outcome.more.get(DEVICE) if outcome else None,
    }


def list_devices(trials: Iterable[Trial]) -> list[str]:
    """Return the kinds of devices that trials ran on; none where no trial ended well, and of a simulation."""
    outcomes = [trial.outcome for trial in trials if trial.outcome is not None]
    return sorted({outcome.more[DEVICE] for outcome in outcomes if DEVICE in outcome.more})
