"""A study of hyperparameters as plain values: `--json` prints them, text and page show them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from phalanx.study.hyperparameters.asha import project_scores
from phalanx.study.hyperparameters.configuration import (
    SESSIONS,
    Configuration,
    group_configurations,
    open_store,
    run_dir,
    rung_of,
)
from phalanx.study.hyperparameters.hyperparameter_space import HyperparameterSpace
from phalanx.study.hyperparameters.packing import (
    Span,
    Window,
    device_use,
    idle_share,
    simulate_unpacked,
    write_busy_bars,
)
from phalanx.study.hyperparameters.tuner import load_study
from phalanx.study.hyperparameters.tuning_job import training_span
from phalanx.study.importance import summarise_importance
from phalanx.study.trial import INTERRUPTED, count_failures

_LEAST_TRIALS = 6
"""Measured trials below which no study without packing is simulated."""

Row = dict[str, Any]


def summarise_study(folder: Path, *, quick: bool = False) -> Row:
    """Return everything about a study, with units in the names; quick leaves out what takes seconds to compute.

    Raises ConfigError where `folder` holds none.
    """
    store = open_store(folder, None)
    run, space = load_study(folder)
    parts = store.trials()
    known = group_configurations(parts)
    rungs: list[int] = store.about["rungs"]
    standings = {one.number: one.standing() for one in known}
    rows = [_summarise_configuration(one, folder, rungs) for one in known]
    scored = sorted(
        (row for row in rows if row["score"] is not None and row["failed"] is None),
        key=lambda row: (row["score"], row["number"]),
    )
    default = space.default()
    # How many configurations reached each rung, and how many of these stay there.
    stopped = []
    for steps in rungs:
        reached = [row for row in rows if str(steps) in row["scores"]]
        # A trial that failed behind this rung was promoted, and was not stopped early.
        stayed = [row for row in reached if row["steps"] == steps and row["failed"] is None]
        stopped.append({"steps": steps, "reached": len(reached), "stopped": len(stayed)})
    return {
        "study": str(folder),
        "model": run.model.preset or run.model.family,
        "metric": store.about["metric"],
        "rungs": rungs,
        "eta": store.about["eta"],
        "trials": rows,
        "best": scored[0] if scored else None,
        "unfinished": unfinished_words(rows, rungs, store.about["eta"]) if scored else "",
        "default": next((row for row in rows if row["values"] == default and row["score"] is not None), None),
        "order": [row["number"] for row in scored],
        "stopped": stopped,
        "failures": count_failures(parts),
        "importance": None
        if quick
        else _summarise_importance(space, known, project_scores(list(standings.values()), len(rungs))),
        "devices": _summarise_devices(folder, known),
        "without_packing": None if quick else _simulate_unpacked_study(known, rungs, store.about["eta"] or 2),
        "costs": _summarise_costs(known),
    }


def unfinished_words(rows: list[Row], rungs: list[int], eta: int | None) -> str:
    """Return a caution where no trial trained to the end: the best score is then not that of a whole run."""
    longest = max(row["steps"] for row in rows)
    if longest >= rungs[-1]:
        return ""
    promotion = (
        "" if eta is None else f"; one in {eta} trials goes on from each rung, so more trials (tune.trials) reach it"
    )
    return f"no trial reached step {rungs[-1]}, the longest got to step {longest}: the best is best so early{promotion}"


def _summarise_configuration(one: Configuration, folder: Path, rungs: list[int]) -> Row:
    standing = one.standing()
    # The score of the highest rung reached: it was measured after most steps.
    rung = max(standing.scores, default=None)
    failed = one.failure
    state = "running" if one.running else "scored" if standing.scores else INTERRUPTED
    if failed is not None and failed.outcome is not None:
        state = failed.outcome.cause
    seconds = sum(part.outcome.seconds for part in one.parts if part.outcome is not None)
    memories = [part.outcome.memory_bytes for part in one.parts if part.outcome and part.outcome.memory_bytes]
    return {
        "number": one.number,
        "values": one.values,
        "engine": one.parts[0].sampler,
        "score": None if rung is None else standing.scores[rung],
        "steps": 0 if rung is None else rungs[rung],
        "scores": {str(rungs[at]): score for at, score in sorted(standing.scores.items())},
        "state": state,
        "failed": None if failed is None or failed.outcome is None else failed.outcome.cause,
        "said": "" if failed is None or failed.outcome is None else failed.outcome.words,
        "seconds": seconds,
        "memory_bytes": max(memories, default=None),
        "run_dir": str(run_dir(folder, one.number)),
    }


def _summarise_importance(
    space: HyperparameterSpace, known: list[Configuration], scores: dict[int, float]
) -> Row | None:
    """Return the importance of parameters by the configurations that have a score; None where these are too few."""
    ranges = space.ranges
    # A parameter that does not apply lies below all values: a forest can split it off.
    rows = [(one.values, scores[one.number]) for one in known if one.number in scores and space.encode(one.values)]
    codes = np.array(
        [[ranges[name].position(values[name]) if name in values else -1.0 for name in ranges] for values, _ in rows]
    )
    figures = np.array([score for _, score in rows])
    # Losses of diverged trials are orders of magnitude above the others: a forest of their logarithms sees both.
    if (figures > 0).all():
        return summarise_importance(list(ranges), codes, np.log(figures), "logarithm of the score")
    return summarise_importance(list(ranges), codes, figures, "score")


def _summarise_devices(folder: Path, known: list[Configuration]) -> Row:
    """Return how busy each device was, from the sessions of the study and the training spans of its parts."""
    sessions = [json.loads(file.read_text()) for file in sorted((folder / SESSIONS).glob("*.json"))]
    windows = [Window(tuple(each["devices"]), each["begin"], each["end"]) for each in sessions]
    spans: list[Span] = []
    for number, part in [(one.number, part) for one in known for part in one.parts]:
        if part.outcome is not None:
            ended = part.outcome.more.get("spans", [])
            spans += [Span(device, begin, end, str(number)) for device, begin, end in ended]
            continue
        # a part that still runs has been busy up to its last step
        log = run_dir(folder, number) / "metrics.jsonl"
        if log.exists() and "device" in part.note:
            found = training_span(log.parent, 0.0, log.stat().st_mtime)
            spans += [] if found is None else [Span(part.note["device"], *found, label=str(number))]
    uses = device_use(windows, spans)
    lines = write_busy_bars(windows, spans)
    # Seconds from the study's beginning: a page has no use for the epoch.
    began = min((window.begin for window in windows), default=0.0)
    return {
        "idle": idle_share(uses),
        "sessions": len(sessions),
        "packing": [session["packing"] for session in sessions],
        "slots": max((session["slots"] for session in sessions), default=0),
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
        "windows": [[window.begin - began, window.end - began, list(window.devices)] for window in windows],
        "spans": [[span.device, span.begin - began, span.end - began, span.label] for span in spans],
    }


def _summarise_costs(known: list[Configuration]) -> Row | None:
    """Return how far off the expected times were, and how much trials differ; None where no part has ended."""
    pairs = []
    for part in (part for one in known for part in one.parts if part.good):
        assert part.outcome is not None
        spans = part.outcome.more.get("spans", [])
        # Of a part that moved the start of its second process would count as training.
        if len(spans) == 1 and part.note.get("expected_s"):
            pairs.append((rung_of(part), part.note["expected_s"], spans[0][2] - spans[0][1]))
    if not pairs:
        return None
    # Logarithms: half as long and twice as long are off by the same factor.
    off = [abs(math.log(measured / expected)) for _, expected, measured in pairs]
    first = [measured for rung, _, measured in pairs if rung == 0]
    return {
        "parts": len(pairs),
        "median_factor": math.exp(median_high(off)),
        "median_factor_last_half": math.exp(
            median_high([abs(math.log(m / e)) for _, e, m in pairs[len(pairs) // 2 :]])
        ),
        "longest_to_shortest": max(first) / min(first) if first else None,
    }


def _simulate_unpacked_study(known: list[Configuration], rungs: list[int], eta: int) -> Row | None:
    """Simulate the same trials on the same devices without packing; None where too little is known of them.

    A step is taken to be as much faster on a device of its own as trials shared the device on a CPU, and by the root of that
    elsewhere.
    """
    scores = project_scores([one.standing() for one in known], len(rungs))
    trials, starts, devices = [], [], set()
    for one in known:
        # The time of a step is not known of a part that moved, or that found nothing left to do.
        ended = [part.outcome.more for part in one.parts if part.outcome is not None]
        measured = [more for more in ended if more.get("step_s") and more.get("start_s") is not None]
        if one.number not in scores or not measured:
            continue
        more = measured[-1]
        device = more["spans"][0][0]
        # Cores of a CPU are divided among trials, while an accelerator has gaps that a second trial fills.
        step_s = more["step_s"] / more["sharing"] ** (1.0 if " cpu " in device else 0.5)
        trials.append((step_s, scores[one.number]))
        starts.append(more["start_s"])
        devices.add(device)
    if len(trials) < _LEAST_TRIALS:
        return None
    start_s = median_high(starts)
    found = simulate_unpacked(trials, len(devices), start_s, rungs, eta)
    return {"idle": found.idle, "seconds": found.seconds, "start_s": start_s, "reached": found.reached}
