"""One search from a run file to its answer: joins space, prior, engine, runner and storage, and says what came out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.config.search import Search
from phalanx.errors import ConfigError
from phalanx.hardware.device import choose_device, device_kind, device_name
from phalanx.hardware.machine import Machine
from phalanx.planner.layouts.enumerate import CHOSEN
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.study.layouts.loop import Found, search
from phalanx.study.layouts.prior import Prior, planned_space
from phalanx.study.layouts.runner import DEVICE, ProcessRunner, Runner
from phalanx.study.layouts.samplers import make_engine
from phalanx.study.layouts.simulator import SimulatedRunner, draw_truth
from phalanx.study.layouts.space import Space
from phalanx.study.layouts.summary import study_facts
from phalanx.study.layouts.surrogate import Belief, Believer
from phalanx.study.trials.launchers import LocalLauncher, whole_nodes
from phalanx.study.trials.storage import Study
from phalanx.study.trials.trial import Trial

WHERE = ("local", "slurm", "simulated")
STUDY = "layout"
"""Name of the study inside its file."""


@dataclass(frozen=True)
class Done:
    """A search that has come to its end."""

    task: Task
    machine: Machine
    space: Space
    prior: Prior
    found: Found
    path: Path
    belief: Belief
    where: str
    """One of WHERE."""

    def facts(self) -> dict[str, Any]:
        """Everything as plain values."""
        about = {
            "model": self.task.run.model.preset or "model",
            "cluster": self.machine.name,
            "devices": self.task.devices,
            "where": self.where,
            "cluster_device": self.machine.node.device,
            "measured_on": self._measured_on(),
            "storage": str(self.path),
        }
        return about | study_facts(self.space, self.prior, self.found, self.belief)

    def _measured_on(self) -> list[str]:
        """What the trials really ran on; empty where none ended well, and of a simulation."""
        outcomes = [trial.outcome for trial in self.found.trials if trial.outcome is not None]
        return sorted({outcome.more[DEVICE] for outcome in outcomes if DEVICE in outcome.more})

    def run_text(self) -> str:
        """The run file with the best choice filled in. Raises ConfigError where no trial was good."""
        best = self.found.best
        point = None if best is None else self.space.find(best.values)
        if best is None or point is None:
            raise ConfigError("--write: no trial of this space was good, so there is no best layout to write")
        env = "".join(f"#   export {name}={value}\n" for name, value in self.space.env(point).items())
        on = self._measured_on()
        measured = f"Measured best of {len(self.found.trials)} trials" + (f" on {' and '.join(on)}" if on else "")
        note = f"# {measured}: {best.value:.4g} s a step (trial {best.number}).\n"
        text = dump_run(parse_run(dump_run(self.task.run), "the run file", self.space.words(point)))
        return note + (f"# With these variables of the environment:\n{env}" if env else "") + text


def run_search(
    planner: Planner,
    task: Task,
    section: Search,
    where: str,
    path: Path,
    *,
    engine: str,
    most: int,
    seed: int = 0,
    keep: bool = False,
    tell: Callable[[Trial, Space], None] = lambda trial, space: None,
) -> Done:
    """Search until `most` trials of the study ended, or none is expected to help.

    where: one of WHERE. path: the study's journal. tell: called when a trial begins and when it has ended. Raises
    ConfigError for what does not go together, StudyError for a file that is no study.
    """
    if where not in WHERE:
        raise ConfigError(f"--where {where} is not known; give one of {', '.join(WHERE)}")
    space, prior = planned_space(planner, task, section)
    chosen = make_engine(engine, space, prior, seed=seed, stop_gain=section.stop_gain)
    runner = _runner(where, planner, task, section, space, prior, seed=seed, keep=keep)
    study = Study(path, STUDY, _about(planner, task, section, where, seed))
    found = search(
        study,
        space,
        chosen,
        runner,
        engine_name=engine,
        most=most,
        limit_s=section.time_limit_s + _AROUND_S,
        tell=lambda trial: tell(trial, space),
    )
    belief = Believer(space, prior).after(found.trials)
    return Done(task, planner.machine, space, prior, found, path, belief, where)


_AROUND_S = 60.0
"""Seconds of a trial before and after its processes run."""


def _runner(
    where: str, planner: Planner, task: Task, section: Search, space: Space, prior: Prior, *, seed: int, keep: bool
) -> Runner:
    if where == "simulated":
        assert isinstance(planner.models, CostModels)
        return SimulatedRunner(draw_truth(space, prior, planner.models, task.run, seed), seed)
    if where == "local":
        return ProcessRunner(task.run, section, task.devices, LocalLauncher(task.devices), keep=keep)
    return ProcessRunner(task.run, section, task.devices, whole_nodes(planner.machine, task.devices), keep=keep)


def _about(planner: Planner, task: Task, section: Search, where: str, seed: int) -> dict[str, Any]:
    """What trials of one study have in common: others could not be compared with them."""
    return {
        "run": _digest(task.run, section),
        "devices": task.devices,
        "cluster": planner.machine.name if where != "local" else "this machine",
        "device": device_here(task.run) if where == "local" else planner.machine.node.device,
        "where": where,
        "steps": [section.steps, section.skip],
    } | ({"seed": seed} if where == "simulated" else {})


def device_here(run: Run) -> str:
    """What trials on this machine run on, as machine descriptions call it."""
    return device_kind(device_name(choose_device(run.cluster.device)))


def _digest(run: Run, section: Search) -> str:
    """Of all that the search does not choose and that decides what a step computes, and how fast."""
    kept = run.model_dump(mode="json", include={"model", "data", "optimizer", "layout", "training"})
    for name in CHOSEN:
        del kept["layout"][name]
    kept["training"] = {name: kept["training"][name] for name in _OF_A_STEP}
    for knob in section.knobs:
        place, _, field = knob.partition(".")
        kept.get(place, {}).pop(field, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


_OF_A_STEP = ("seed", "compile", "attention", "loss_chunk_tokens", "z_loss", "deterministic")
"""Fields of `training` that decide what a step computes, and how fast; trials set the others themselves."""
