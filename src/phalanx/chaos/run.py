"""A run under faults: an undisturbed run first, then runs with drawn faults, and what was made of each fault.

Runs are started by `phalanx train --nproc`, in processes of their own: what supervises them is what is tested.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from phalanx.chaos.faults import KINDS, PlannedFault, draw_faults
from phalanx.chaos.inject import START, STEP_LOG
from phalanx.checkpoint import TensorReader, open_checkpoints
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.registry import bind
from phalanx.files import read_json_lines
from phalanx.launch.faults import FAULT_LOG
from phalanx.launch.parent import PARENT
from phalanx.layout.resolve import resolve_layout
from phalanx.training.safeguards.checkpoint_interval import FIRST_STEPS
from phalanx.training.safeguards.replicas import same_bits

OOM_DIFFERENCE = 0.05
"""Largest norm of a difference, relative to the norm of the weights, after micro-batches were halved: other sums round
otherwise."""
_SLACK_S = 300.0
"""Seconds for a fault on top of what a run takes undisturbed, before a run is given up."""


@dataclass(frozen=True)
class ChaosPlan:
    """What to do to which run."""

    run: Path
    words: tuple[str, ...]
    """Changes of the run file."""
    ranks: int
    kinds: tuple[str, ...]
    seed: int
    minutes: float
    """No run with faults is begun after this time."""
    most: int | None
    """Faults after which no further run is begun."""
    in_each: int
    """Faults of a run."""
    folder: Path
    nodes: int = 1
    """Supervisors that share the ranks equally."""
    start: tuple[str, ...] = ()
    """Words before the command of a run, which start it on all nodes; without them all supervisors are on this machine."""


@dataclass(frozen=True)
class FaultOutcome:
    """What became of one fault that happened; times in seconds from the moment it did."""

    fault: PlannedFault
    run: int
    """Run that it struck, from 1."""
    detected_s: float | None
    found_as: str
    """Rank and cause of the report; empty where there was none."""
    named_right: bool
    training_s: float | None
    """Until the first step after it ended."""
    same_bits: bool | None = None
    """Whether the run ended with the bits of the undisturbed one; None where it did not end."""
    difference: float | None = None
    """Norm of the difference of all tensors at the end, relative to their norm."""

    @property
    def survived(self) -> bool:
        """Whether everything is as it should be after this fault."""
        close = self.difference is not None and self.difference <= OOM_DIFFERENCE
        right = self.same_bits if KINDS[self.fault.kind].keeps_bits else close
        return bool(right and self.named_right and self.training_s is not None)


@dataclass(frozen=True)
class ChaosOutcome:
    """All runs of a session of chaos."""

    outcomes: tuple[FaultOutcome, ...]
    runs: int
    undisturbed_s: float
    """Seconds of the run without faults."""
    disturbed_s: float
    """Mean seconds of a run with faults."""
    failures: tuple[str, ...]
    """Runs that did not end well, in words."""


def prepare_run(plan: ChaosPlan) -> tuple[Run, tuple[str, ...]]:
    """Return the run, and the changes of its run file that all its runs share.

    Raises ConfigError where it cannot be used.
    """
    run = load_run(plan.run, list(plan.words))
    words = [*plan.words, "restart.max=1000", "restart.backoff_s=0.0", "training.resume=auto"]
    if run.checkpoint.every is None:
        words.append(f"checkpoint.every={max(1, run.training.steps // 8)}")
    devices = run.cluster.device != "cpu" and torch.accelerator.is_available()
    if plan.nodes > 1 and not plan.start and devices:
        raise ConfigError(
            f"--nodes {plan.nodes} without --start: all supervisors would be on this machine and share its first devices; "
            "say how to start one on each node, such as --start 'srun --ntasks-per-node=1', or set cluster.device=cpu"
        )
    if "slow" in plan.kinds and plan.ranks == 1:
        raise ConfigError(
            f"--nproc {plan.ranks}: a slow rank is told by those that wait for it; start two, or leave slow out"
        )
    if "bitflip" in plan.kinds:
        layout = resolve_layout(bind(run), plan.ranks, plan.ranks // plan.nodes)
        if layout.dp_replicate == 1:
            raise ConfigError(
                "--faults bitflip: no two ranks hold the same parameters in this layout, so nothing could notice; set "
                "layout.dp_replicate, or leave bitflip out"
            )
        if run.safeguards.compare_replicas is None:
            words.append("safeguards.compare_replicas=1")
    return load_run(plan.run, words), tuple(words)


def train_under_faults(plan: ChaosPlan, tell: Callable[[str], None]) -> ChaosOutcome:
    """Train `plan.run` undisturbed and then with faults until time or faults are used up. tell: told of each run, a line.

    Raises ConfigError for a run that cannot be used, and PhalanxError where it does not even train undisturbed.
    """
    run, words = prepare_run(plan)
    try:
        plan.folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {plan.folder}: {error.strerror}; name a folder that is not there yet") from error
    reference = plan.folder / "undisturbed"
    tell(f"training {run.training.steps:,} steps on {plan.ranks} ranks without faults")
    seconds, code = _train(plan, reference, words, None)
    if code != 0:
        raise PhalanxError(f"the run fails without any fault (exit code {code}); {reference}.log says why")
    outcomes: list[FaultOutcome] = []
    failures: list[str] = []
    times: list[float] = []
    deadline = time.monotonic() + 60 * plan.minutes
    while time.monotonic() < deadline and (plan.most is None or len(outcomes) < plan.most):
        number = len(times) + 1
        limit = 3 * seconds + _SLACK_S * plan.in_each
        taken, found, failure = _disturb(plan, number, run, words, limit, reference)
        times.append(taken)
        outcomes += found
        failures += [failure] if failure else []
        kinds = ", ".join(outcome.fault.kind for outcome in found) or "none"
        tell(f"run {number}: {taken:.0f} s, faults: {kinds}{f'; {failure}' if failure else ''}")
    return ChaosOutcome(tuple(outcomes), len(times), seconds, sum(times) / max(1, len(times)), tuple(failures))


def _disturb(
    plan: ChaosPlan, number: int, run: Run, words: Sequence[str], limit_s: float, reference: Path
) -> tuple[float, list[FaultOutcome], str]:
    """Train once with faults; return its seconds, what became of them, and what went wrong with the run, if anything."""
    every = FIRST_STEPS if run.checkpoint.every == "auto" else run.checkpoint.every
    assert every is not None
    left = plan.in_each if plan.most is None else plan.most
    planned = draw_faults(
        plan.kinds,
        ranks=plan.ranks,
        steps=run.training.steps,
        every=every,
        count=min(plan.in_each, left),
        first=1 + (number - 1) * plan.in_each,
        seed=plan.seed,
    )
    run_dir, beside = plan.folder / f"run-{number:03d}", plan.folder / f"faults-{number:03d}"
    beside.mkdir()
    schedule = beside / "schedule.json"
    schedule.write_text(json.dumps([asdict(fault) for fault in planned], indent=1) + "\n")
    callbacks = [choice.model_dump() for choice in run.training.callbacks]
    callbacks.append({"name": "chaos", "options": {"schedule": str(schedule.absolute())}})
    seconds, code = _train(plan, run_dir, [*words, f"training.callbacks={json.dumps(callbacks)}"], limit_s)
    outcomes = list(_match_reports(planned, number, run_dir, beside))
    if code != 0:
        ended = "did not end in time" if code is None else f"ended with exit code {code}"
        return seconds, outcomes, f"run {number} {ended}; {run_dir}.log says why"
    same, difference = compare_ends(run_dir, reference)
    return seconds, [replace(one, same_bits=same, difference=difference) for one in outcomes], ""


def _train(plan: ChaosPlan, run_dir: Path, words: Sequence[str], limit_s: float | None) -> tuple[float, int | None]:
    """Train in `run_dir` and return seconds and exit code, None where it was ended after `limit_s` seconds."""
    began = time.monotonic()
    with run_dir.with_suffix(".log").open("wb") as log:
        processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Whoever ends this command ends what it has started.
                env={**os.environ, PARENT: str(os.getpid())},
            )
            for command in _list_commands(plan, run_dir, words)
        ]
        try:
            # Supervisors end alike.
            return_code: int | None = processes[0].wait(limit_s)
        except subprocess.TimeoutExpired:
            return_code = None
        finally:
            for process in processes:
                if process.poll() is None and return_code is None:
                    process.terminate()
                process.wait()
    return time.monotonic() - began, return_code


def _list_commands(plan: ChaosPlan, run_dir: Path, words: Sequence[str]) -> list[list[str]]:
    """Return the commands that start a run here: one for each supervisor, or the one that starts all."""
    command = [*plan.start, sys.executable, "-m", "phalanx", "train", str(plan.run), "--run-dir", str(run_dir)]
    command += ["--nproc", str(plan.ranks // plan.nodes)]
    if plan.nodes == 1 or plan.start:
        return [[*command, *words]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = ["--nodes", str(plan.nodes), "--rendezvous", f"127.0.0.1:{free.getsockname()[1]}"]
    return [[*command, *where, "--node-rank", str(node), *words] for node in range(plan.nodes)]


@dataclass(frozen=True)
class _Records:
    """What a run has left: times in seconds, each list in order of time."""

    reports: list[tuple[float, dict[str, Any]]]
    events: list[tuple[float, dict[str, Any]]]
    starts: list[float]
    """When the ranks began, for the first time and again."""
    ended: list[float]
    """When steps ended."""
    rewound: list[float]
    """When a step ended that was done again without a restart."""
    said: str
    """Everything on the terminal."""

    @classmethod
    def read(cls, run_dir: Path, beside: Path) -> _Records:
        """Read what is in the run directory and in the folder `beside` it."""
        log = [line.split() for line in _read_lines(beside / STEP_LOG)]
        return cls(
            reports=[(_seconds_of(row), row) for row in _read_rows(run_dir / FAULT_LOG)],
            events=[(_seconds_of(row), row) for row in _read_rows(run_dir / "events.jsonl")],
            starts=[float(at) for at, what in log if what == START],
            ended=[float(at) for at, what in log if what != START],
            rewound=[
                float(at)
                for (_, before), (at, what) in pairwise(log)
                if START not in (before, what) and int(what) <= int(before)
            ],
            said=run_dir.with_suffix(".log").read_text(errors="replace"),
        )

    def event_after(self, kind: str, at: float) -> tuple[float, dict[str, Any]] | None:
        """Return the first event of a kind since the moment `at`."""
        return next((pair for pair in self.events if pair[1].get("kind") == kind and pair[0] >= at), None)

    def was_ending(self, at: float) -> float | None:
        """Return when the fault was found for which ranks were being ended at the moment `at`; None where they ran."""
        found = max((when for when, _ in self.reports if when <= at), default=None)
        return None if found is None or any(found < start <= at for start in self.starts) else found


def _match_reports(planned: Sequence[PlannedFault], run: int, run_dir: Path, beside: Path) -> Iterator[FaultOutcome]:
    """Yield what became of each fault that happened, in the order in which they did."""
    happened = [
        (json.loads(fault.marker_file(beside).read_text()), fault)
        for fault in planned
        if fault.marker_file(beside).exists()
    ]
    records = _Records.read(run_dir, beside)
    taken: set[float] = set()
    for marker, fault in sorted(happened, key=lambda pair: float(pair[0]["time"])):
        at = float(marker["time"])
        in_place = _match_event(fault, at, records)
        when, text, named = _match_report(fault, at, records, taken) if in_place is None else in_place
        if fault.kind == "damage":
            named = named and f"checkpoint of step {marker['damaged']} is damaged" in records.said
        begun = when
        if in_place is None and when is not None:
            # A rank that is woken for its stacks may end a step that was under way: what counts comes after the restart.
            begun = min((start for start in records.starts if start > when), default=None)
        again = min((end for end in records.ended if begun is not None and end > begun), default=None)
        yield FaultOutcome(
            fault,
            run,
            detected_s=None if when is None else max(0.0, when - at),
            found_as=text,
            named_right=named,
            training_s=None if again is None else again - at,
        )


def _match_event(fault: PlannedFault, at: float, records: _Records) -> tuple[float | None, str, bool] | None:
    """Return when, as what and whether rightly a fault was found that ranks went on from; None for one that ended them."""
    if KINDS[fault.kind].cause is None:
        when, text, named = (
            _match_flip(fault, at, records) if fault.kind == "bitflip" else _match_slow(fault, at, records)
        )
        begun = next((start for start in records.starts if start > at), None)
        if begun is not None and (when is None or begun < when):
            # Ranks began again for another fault before this one could be found.
            return begun, "gone with another fault", True
        return when, text, named
    if fault.kind == "oom" and not records.reports and (found := records.event_after("less_memory", at)):
        return found[0], "out of memory: step done again", found[1]["step"] == fault.step
    return None


def _match_flip(fault: PlannedFault, at: float, records: _Records) -> tuple[float | None, str, bool]:
    """Return when, as what and whether rightly a flipped bit was found."""
    # Events of steps that are done again are gone from the log of events.
    when = next((ended for ended in records.rewound if ended > at), None)
    said = re.findall(r"warning: step (\d+): [^\n]* hold alike differ([^\n]*)", records.said)
    # A bit flips behind the step before that of the fault; the first comparison of replicas comes then or later.
    reasons = sorted((int(step), reason) for step, reason in said if int(step) >= fault.step - 1)
    named = bool(reasons) and f"rank {fault.rank} " in reasons[0][1]
    return when, "replicas differ" if reasons else "", named


def _match_slow(fault: PlannedFault, at: float, records: _Records) -> tuple[float | None, str, bool]:
    """Return when, as what and whether rightly a slow rank was found."""
    found = records.event_after("straggler", at)
    if found is None:
        return None, "", False
    when, event = found
    return when, f"rank {event['rank']}: straggler ({event['cause']})", event["rank"] == fault.rank


def _match_report(
    fault: PlannedFault, at: float, records: _Records, taken: set[float]
) -> tuple[float | None, str, bool]:
    """Return when, as what and whether rightly a fault was reported. taken: reports of faults before it, added to."""
    together = "together with the one before"
    if (ending := records.was_ending(at)) is not None:
        # It struck ranks that were being ended for the fault before it: nobody could name it any more.
        return ending, together, True
    # A marker is written a moment before the fault.
    found = next(((when, row) for when, row in records.reports if when >= at - 0.1), None)
    if found is None:
        return None, "", False
    when, row = found
    if when in taken:
        return when, together, True
    taken.add(when)
    right = row["rank"] == fault.rank and row["cause"] == KINDS[fault.kind].cause
    return when, f"rank {row['rank']}: {row['cause']}", right


def _seconds_of(row: dict[str, Any]) -> float:
    return datetime.fromisoformat(str(row["time"])).timestamp()


def _read_rows(file: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(file).records) if file.exists() else []


def _read_lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def compare_ends(run_dir: Path, reference: Path) -> tuple[bool, float]:
    """Return whether two runs' newest checkpoints hold the same bits, and the norm of their difference over the norm.

    A tensor at a time: neither is ever in memory as a whole.
    """
    one, other = (open_checkpoints(path, one_rank=True).newest() for path in (run_dir, reference))
    if one is None or other is None or one.step != other.step:
        return False, float("inf")
    same, apart, size = True, 0.0, 0.0
    with TensorReader(one.path) as found, TensorReader(other.path) as expected:
        if found.records.keys() != expected.records.keys():
            return False, float("inf")
        for name in expected.records:
            x, y = found.read(name), expected.read(name)
            same = same and same_bits(x, y)
            apart += float((x.double() - y.double()).square().sum())
            size += float(y.double().square().sum())
    return same, (apart / size) ** 0.5 if size else apart**0.5
