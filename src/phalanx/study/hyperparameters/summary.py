"""A study as plain values: what `--json` prints, and what words and page are made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.study.hyperparameters.job import computing
from phalanx.study.hyperparameters.packing import UNPACKED, Device
from phalanx.study.hyperparameters.run import load_study
from phalanx.study.hyperparameters.sampler import projected
from phalanx.study.hyperparameters.simulator import SimulatedTrial, Simulation
from phalanx.study.hyperparameters.space import TuneSpace
from phalanx.study.hyperparameters.study import SESSIONS, Configuration, configurations, open_study, run_dir, rung_of
from phalanx.study.hyperparameters.timeline import Span, Window, bars, device_use, idle_share
from phalanx.study.trials.importance import CAUTION, measured_importance
from phalanx.study.trials.trial import FAILURES, INTERRUPTED, Trial

_LEAST_TRIALS = 6
"""Trials with a score below which nothing is said of what matters."""

Row = dict[str, Any]


def tune_facts(folder: Path) -> Row:
    """Everything about a study, with units in the names. Raises ConfigError where `folder` holds none."""
    study = open_study(folder, None)
    run, space = load_study(folder)
    known = configurations(study.trials())
    rungs: list[int] = study.about["rungs"]
    standings = {one.number: one.standing() for one in known}
    rows = [_row(one, folder, rungs) for one in known]
    scored = sorted((row for row in rows if row["score"] is not None and row["failed"] is None), key=_by_score)
    default = space.default()
    return {
        "study": str(folder),
        "model": run.model.preset or run.model.family,
        "metric": study.about["metric"],
        "rungs": rungs,
        "eta": study.about["eta"],
        "trials": rows,
        "best": scored[0] if scored else None,
        "unfinished": unfinished_words(rows, rungs, study.about["eta"]) if scored else "",
        "default": next((row for row in rows if row["values"] == default and row["score"] is not None), None),
        "order": [row["number"] for row in scored],
        "stopped": _stopped(rows, rungs),
        "failures": _failures(known),
        "importance": _importance(space, known, projected(list(standings.values()), len(rungs))),
        "devices": _devices(folder, known),
        "without_packing": _without(known, rungs, study.about["eta"] or 2),
        "costs": _costs(known),
    }


def unfinished_words(rows: list[Row], rungs: list[int], eta: int | None) -> str:
    """What the best score is not, where no trial trained to the end: the score of a whole run."""
    longest = max(row["steps"] for row in rows)
    if longest >= rungs[-1]:
        return ""
    promotion = (
        "" if eta is None else f"; one in {eta} trials goes on from each rung, so more trials (tune.trials) reach it"
    )
    return f"no trial reached step {rungs[-1]}, the longest got to step {longest}: the best is best so early{promotion}"


def _by_score(row: Row) -> tuple[float, int]:
    return row["score"], row["number"]


def _row(one: Configuration, folder: Path, rungs: list[int]) -> Row:
    standing = one.standing()
    rung = max(standing.scores, default=None)
    failed = one.failure
    seconds = sum(part.outcome.seconds for part in one.parts if part.outcome is not None)
    memories = [part.outcome.memory_bytes for part in one.parts if part.outcome and part.outcome.memory_bytes]
    return {
        "number": one.number,
        "values": one.values,
        "engine": one.parts[0].engine,
        "score": None if rung is None else standing.scores[rung],
        "steps": 0 if rung is None else rungs[rung],
        "scores": {str(rungs[at]): score for at, score in sorted(standing.scores.items())},
        "state": _state(one),
        "failed": None if failed is None or failed.outcome is None else failed.outcome.cause,
        "said": "" if failed is None or failed.outcome is None else failed.outcome.words,
        "seconds": seconds,
        "memory_bytes": max(memories, default=None),
        "run_dir": str(run_dir(folder, one.number)),
    }


def _state(one: Configuration) -> str:
    failed = one.failure
    if failed is not None and failed.outcome is not None:
        return failed.outcome.cause
    if one.running:
        return "running"
    return "scored" if one.standing().scores else INTERRUPTED


def _stopped(rows: list[Row], rungs: list[int]) -> list[Row]:
    """For each rung: how many reached it, and how many of these stay there."""
    found = []
    for steps in rungs:
        reached = [row for row in rows if str(steps) in row["scores"]]
        stayed = [row for row in reached if row["steps"] == steps and row["failed"] is None]
        found.append({"steps": steps, "reached": len(reached), "stopped": len(stayed)})
    return found


def _failures(known: list[Configuration]) -> dict[str, int]:
    causes = [
        part.outcome.cause
        for one in known
        for part in one.parts
        if part.outcome is not None and (part.outcome.cause in FAILURES or part.outcome.cause == INTERRUPTED)
    ]
    return {cause: causes.count(cause) for cause in sorted(set(causes))}


def _importance(space: TuneSpace, known: list[Configuration], scores: dict[int, float]) -> Row | None:
    """What matters by the trials that have a score, with error bars."""
    ranges = space.ranges
    rows = [one for one in known if one.number in scores and one.values and set(one.values) <= set(ranges)]
    codes = np.array(
        [[ranges[name].position(one.values[name]) if name in one.values else -1.0 for name in ranges] for one in rows]
    )
    if len(rows) < _LEAST_TRIALS or not np.ptp(codes, axis=0).any():
        return None
    values = np.array([scores[one.number] for one in rows])
    logarithmic = bool((values > 0).all())
    found = measured_importance(list(ranges), codes, np.log(values) if logarithmic else values)
    parts = zip(found.names, found.importance, found.low, found.high, found.ranks, strict=True)
    return {
        "trials": found.trials,
        "of": "logarithm of the score" if logarithmic else "score",
        "caution": CAUTION,
        "importance": [
            {"name": name, "mean": float(mean), "low": float(low), "high": float(high), "ranks": ranks.tolist()}
            for name, mean, low, high, ranks in parts
        ],
    }


def _devices(folder: Path, known: list[Configuration]) -> Row:
    sessions = [json.loads(file.read_text()) for file in sorted((folder / SESSIONS).glob("*.json"))]
    windows = [Window(tuple(one["devices"]), one["begin"], one["end"]) for one in sessions]
    spans = [span for one in known for part in one.parts for span in _spans(folder, one.number, part)]
    uses = device_use(windows, spans)
    lines = bars(windows, spans)
    begin = min((window.begin for window in windows), default=0.0)
    return {
        "idle": idle_share(uses),
        "sessions": len(sessions),
        "packing": [one["packing"] for one in sessions],
        "slots": max((one["slots"] for one in sessions), default=0),
        "seconds": sum(window.end - window.begin for window in windows),
        "each": [
            {
                "device": use.device,
                "idle": use.idle,
                "held_s": use.held_s,
                "busy_s": use.busy_s,
                "shared_s": use.shared_s,
                "parts": use.trials,
                "bar": lines[use.device],
            }
            for use in uses
        ],
        "windows": [[window.begin - begin, window.end - begin, list(window.devices)] for window in windows],
        "spans": [[span.device, span.begin - begin, span.end - begin, span.label] for span in spans],
    }


def _spans(folder: Path, number: int, part: Trial) -> list[Span]:
    """When a part computed; one that still runs, up to its last step."""
    if part.outcome is not None:
        spans = part.outcome.more.get("spans", [])
        return [Span(device, begin, end, str(number)) for device, begin, end in spans]
    log = run_dir(folder, number) / "metrics.jsonl"
    found = computing(log.parent, 0.0, log.stat().st_mtime) if log.exists() and "device" in part.note else None
    return [] if found is None else [Span(part.note["device"], *found, label=str(number))]


def _costs(known: list[Configuration]) -> Row | None:
    """How far off the expected times were, and how different trials are."""
    pairs = []
    for part in (part for one in known for part in one.parts if part.good):
        assert part.outcome is not None
        spans = part.outcome.more.get("spans", [])
        if len(spans) == 1 and part.note.get("expected_s"):
            pairs.append((rung_of(part), part.note["expected_s"], spans[0][2] - spans[0][1]))
    if not pairs:
        return None
    off = sorted(abs(math.log(measured / expected)) for _, expected, measured in pairs)
    first = [measured for rung, _, measured in pairs if rung == 0]
    return {
        "parts": len(pairs),
        "median_factor": math.exp(off[len(off) // 2]),
        "median_factor_last_half": math.exp(_median([abs(math.log(m / e)) for _, e, m in pairs[len(pairs) // 2 :]])),
        "longest_to_shortest": max(first) / min(first) if first else None,
    }


def _without(known: list[Configuration], rungs: list[int], eta: int) -> Row | None:
    """The same trials on the same devices without packing, simulated from what each took; None where too little is known.

    A step is taken to be as much faster alone as trials shared the device on a CPU, and by the root of that elsewhere.
    """
    scores = projected([one.standing() for one in known], len(rungs))
    trials, starts, devices = [], [], set()
    for one in known:
        # Of a part that moved, or that found nothing left to do, no time of a step is known.
        ended = [part.outcome.more for part in one.parts if part.outcome is not None]
        measured = [more for more in ended if more.get("step_s") and more.get("start_s") is not None]
        if one.number not in scores or not measured:
            continue
        more = measured[-1]
        device = more["spans"][0][0]
        alone = more["step_s"] / more["sharing"] ** (1.0 if " cpu " in device else 0.5)
        trials.append(SimulatedTrial(alone, 0.0, scores[one.number], alone))
        starts.append(more["start_s"])
        devices.add(device)
    if len(trials) < _LEAST_TRIALS:
        return None
    packing = replace(UNPACKED, start_s=_median(starts))
    places = [Device(name) for name in sorted(devices)]
    found = Simulation(trials, places, packing, rungs=rungs, eta=eta).run()
    return {"idle": found.idle, "seconds": found.seconds, "start_s": packing.start_s, "reached": found.reached}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
