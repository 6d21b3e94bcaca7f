"""Tuning from a run file to a study that is run: joins space, sampler, costs, devices and store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.load import dump_run, load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.machine import Machine
from phalanx.layout.resolve import resolve_layout
from phalanx.study.hyperparameters.asha import rung_steps
from phalanx.study.hyperparameters.candidates import CandidateQueue
from phalanx.study.hyperparameters.configurations import RUN, open_store
from phalanx.study.hyperparameters.cost import CostModel, measure_size
from phalanx.study.hyperparameters.jobs import quiet_overrides
from phalanx.study.hyperparameters.metric import check_metric
from phalanx.study.hyperparameters.packing import PACKED, UNPACKED
from phalanx.study.hyperparameters.space import HyperparameterSpace, build_hyperparameter_space
from phalanx.study.hyperparameters.tuner import Settings, Tuner
from phalanx.study.processes.slots import automatic_sharing, find_devices
from phalanx.study.samplers import make_sampler
from phalanx.study.trial import Trial
from phalanx.training.inputs import TrainableModel

_GIB = 2**30
_FREE = {"tune", "search", "cluster", "checkpoint"}
"""Sections that may change while a study is resumed; what of `tune` may not, the store knows."""


@dataclass(frozen=True)
class Options:
    """What the command line says, beside the run file."""

    where: str = "local"
    devices: int | None = None
    """None takes all."""
    machine: Machine | None = None
    """Description of a Slurm allocation."""
    packing: bool = True


def run_tuning(run: Run, folder: Path, options: Options, tell: Callable[[Trial, int], None]) -> str:
    """Run trials until the study has `tune.trials` and none of them is promoted further; return why it stopped.

    Resumes the study that an earlier call left. tell: see `Tuner`. Raises ConfigError for what does not go together,
    DataError where data are missing, Interrupted when asked to stop.
    """
    space, section = build_hyperparameter_space(run), run.tune
    # Trials have one rank each: a run file that asks for more is refused before anything starts.
    model = bind(run, TrainableModel)
    resolve_layout(model, 1, 1)
    size = measure_size(space.run_of({}, quiet_overrides(run)))
    places = find_devices(options.where, run.cluster.device, options.devices, options.machine)
    rungs = rung_steps(section.asha, run.training.steps)
    check_metric(section.metric, model.expected_evaluation())
    _require_same_run(run, folder)
    store = open_store(folder, describe_study(run, space, rungs))
    if not (folder / RUN).exists():
        write_atomically(folder / RUN, dump_run(run))
    queue = CandidateQueue(
        space,
        make_sampler(section.engine, space, section.seed),
        CostModel(space.ranges, size, accelerator=places[0].accelerator),
        rungs=rungs,
        eta=section.asha.eta if section.asha else 2,
        trials=section.trials,
        default_first=section.first == "default",
    )
    settings = Settings(
        folder=folder,
        metric=section.metric,
        slots=automatic_sharing(places) if section.slots == "auto" else section.slots,
        time_limit_s=section.time_limit_s,
        study_time_s=section.study_time_s,
        memory_bytes=None if section.memory_gib is None else section.memory_gib * _GIB,
        packing=PACKED if options.packing else UNPACKED,
        sampler=section.engine,
    )
    return Tuner(store, queue, places, settings, tell).run()


def load_study(folder: Path) -> tuple[Run, HyperparameterSpace]:
    """Return the run file that a study tunes, and its space. Raises ConfigError where there is none."""
    run = load_run(folder / RUN)
    return run, build_hyperparameter_space(run)


def describe_study(run: Run, space: HyperparameterSpace, rungs: tuple[int, ...]) -> dict[str, Any]:
    """Return what trials of one study have in common, beside the run file: others could not be compared with them."""
    section = run.tune
    return {
        "parameters": {name: given.model_dump(mode="json") for name, given in section.parameters.items()},
        "constraints": list(space.constraints),
        "metric": section.metric,
        "rungs": list(rungs),
        "eta": section.asha.eta if section.asha else None,
    }


def best_run_text(folder: Path, summary: dict[str, Any]) -> str:
    """Return a run file that trains the best configuration from the start, with all that trials leave out of a run.

    summary: of `summarize_study`. Raises ConfigError where no trial has a score.
    """
    best = summary["best"]
    if best is None:
        raise ConfigError("--write: no trial has a score, so there is no best configuration to write")
    note = (
        f"# Best of {len(summary['trials'])} trials: {summary['metric']} {best['score']:.6g} after {best['steps']} steps "
        f"(trial {best['number']}).\n"
    )
    return note + dump_run(load_study(folder)[1].run_of(best["values"]))


def _require_same_run(run: Run, folder: Path) -> None:
    """Refuse to resume with another run than the study began with. Raises ConfigError that names what differs."""
    if not (folder / RUN).exists():
        return
    before = load_run(folder / RUN)
    differs = [
        f"{name}.{field}"
        for name, section in before.model_dump(mode="json", exclude=_FREE).items()
        for field, value in section.items()
        if getattr(run, name).model_dump(mode="json").get(field) != value
    ]
    if differs:
        raise ConfigError(
            f"{folder} holds a study of a run with another {', '.join(differs)}; put that back, or give another --out DIR"
        )
