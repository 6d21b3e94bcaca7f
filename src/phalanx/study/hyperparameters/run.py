"""From a run file to a study that is run: joins space, engine, costs, devices and storage."""

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
from phalanx.study.hyperparameters.cost import CostModel, size_of
from phalanx.study.hyperparameters.job import quiet_words
from phalanx.study.hyperparameters.loop import Settings, Tuner
from phalanx.study.hyperparameters.metric import check_metric
from phalanx.study.hyperparameters.packing import PACKED, UNPACKED
from phalanx.study.hyperparameters.plan import Planner
from phalanx.study.hyperparameters.slots import auto_slots, find_places
from phalanx.study.hyperparameters.space import TuneSpace, build_space
from phalanx.study.hyperparameters.study import RUN, open_study
from phalanx.study.trials.trial import Trial
from phalanx.train.inputs import TrainableModel

_GIB = 2**30
_FREE = {"tune", "search", "cluster", "checkpoint"}
"""Sections that may change while a study goes on; of `tune` the journal knows what may not."""


@dataclass(frozen=True)
class Options:
    """What the command line says, beside the run file."""

    where: str = "local"
    devices: int | None = None
    """None takes all."""
    machine: Machine | None = None
    """Of a Slurm allocation."""
    packing: bool = True


def run_tuning(run: Run, folder: Path, options: Options, tell: Callable[[Trial, int], None]) -> str:
    """Run trials until the study has `tune.trials` and none of them is to go on; says why it stopped.

    Goes on where an earlier call left off. Raises ConfigError for what does not go together, DataError where data are
    missing, Interrupted when asked to stop.
    """
    space, section = build_space(run), run.tune
    resolve_layout(run, 1, 1)
    size = size_of(space.run_of({}, quiet_words(run)))
    places = find_places(options.where, run.cluster.device, options.devices, options.machine)
    rungs = rung_steps(section.asha, run.training.steps)
    check_metric(section.metric, bind(run, TrainableModel).expected_evaluation())
    _same_run(run, folder)
    study = open_study(folder, about_study(run, space, rungs))
    if not (folder / RUN).exists():
        write_atomically(folder / RUN, dump_run(run))
    planner = Planner(
        space=space,
        rungs=rungs,
        eta=section.asha.eta if section.asha else 2,
        trials=section.trials,
        engine=section.engine,
        seed=section.seed,
        costs=CostModel(space.ranges, size, accelerator=places[0].accelerator),
        default_first=section.first == "default",
    )
    settings = Settings(
        folder=folder,
        metric=section.metric,
        slots=auto_slots(places) if section.slots == "auto" else section.slots,
        time_limit_s=section.time_limit_s,
        study_time_s=section.study_time_s,
        memory_bytes=None if section.memory_gib is None else section.memory_gib * _GIB,
        packing=PACKED if options.packing else UNPACKED,
        engine=section.engine,
    )
    return Tuner(study, planner, places, settings, tell).run()


def load_study(folder: Path) -> tuple[Run, TuneSpace]:
    """The run file that a study tunes, and its space. Raises ConfigError where there is none."""
    run = load_run(folder / RUN)
    return run, build_space(run)


def about_study(run: Run, space: TuneSpace, rungs: tuple[int, ...]) -> dict[str, Any]:
    """What trials of one study have in common, beside the run file: others could not be compared with them."""
    section = run.tune
    return {
        "parameters": {name: given.model_dump(mode="json") for name, given in section.parameters.items()},
        "constraints": list(space.constraints),
        "metric": section.metric,
        "rungs": list(rungs),
        "eta": section.asha.eta if section.asha else None,
    }


def _same_run(run: Run, folder: Path) -> None:
    """Refuse to go on with trials of another run than the study began with. Raises ConfigError that names what differs."""
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
