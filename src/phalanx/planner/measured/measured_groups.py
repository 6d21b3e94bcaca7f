"""Measured runs as steps that the time model can judge: on which machine, and in which layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from phalanx.hardware.machine import Machine, described_names, load_machine
from phalanx.layout.spec import LayoutTable
from phalanx.planner.measured.runs import MeasuredRun
from phalanx.planner.time.framework import COMPILED, FrameworkProfile
from phalanx.planner.time.operation_time import Floats
from phalanx.planner.time.part_time import part_times
from phalanx.planner.time.profile import NamedProfile, default_profile, profile_for
from phalanx.planner.time.step_parts import Steps, steps_of
from phalanx.planner.time.step_time import StepTimes, time_steps
from phalanx.planner.trace.traced_model import Setting


@dataclass(frozen=True)
class System:
    """A machine that runs were made on."""

    profile: str
    """Name of its fitted profile, there or not."""
    machine: Machine


@dataclass(frozen=True)
class MeasuredGroup:
    """Runs of one system and one program, with their steps in the same order."""

    system: System
    framework: FrameworkProfile
    runs: tuple[MeasuredRun, ...]
    steps: Steps

    @classmethod
    def of(cls, system: System, framework: FrameworkProfile, runs: Sequence[MeasuredRun]) -> Self:
        """Put together the steps of runs that can be predicted."""
        by_model: dict[Setting, list[MeasuredRun]] = {}
        for run in runs:
            by_model.setdefault(cls.setting_of(run, framework), []).append(run)
        several = []
        # A table of steps holds layouts of one model.
        for setting, rows in by_model.items():
            layouts = [
                replace(run.layout, recompute=run.recompute)
                for run in rows
                if run.layout is not None and run.recompute is not None
            ]
            several.append(steps_of(setting, LayoutTable.from_rows(layouts), system.machine, framework))
        ordered = tuple(run for rows in by_model.values() for run in rows)
        return cls(system, framework, ordered, Steps.joined_up(several))

    @staticmethod
    def setting_of(run: MeasuredRun, framework: FrameworkProfile) -> Setting:
        """Return the model of a run as cost models take it."""
        assert run.model is not None and run.sequence_length is not None
        setting = Setting(run.model, run.sequence_length, precision=timed_precision(run), attention="flash")
        return replace(setting, compile=framework.compiled)

    def profile(self, *, calibrated: bool = True) -> NamedProfile:
        """Return the profile that is shipped for the group's machine if there is one, else the default of its device."""
        machine = self.system.machine
        return profile_for(machine) if calibrated else default_profile(machine.node.device)

    def step_times(self, named: NamedProfile) -> StepTimes:
        """Predict the steps by a profile."""
        constants = named.collectives_on(self.system.machine)
        times = part_times(self.steps.parts, self.system.machine, constants, named.profile)
        return time_steps(self.steps, times, named.profile, constants, self.framework)

    def rates(self, named: NamedProfile) -> Floats:
        """Predict tokens a second and device of each run, [runs]."""
        layouts = self.steps.layouts
        lengths = np.array([run.sequence_length for run in self.runs], np.float64)
        return np.asarray(layouts.global_batch * lengths / self.step_times(named).total / layouts.world_size)


def timed_precision(run: MeasuredRun) -> str:
    """Return the number format of a run as the time model takes it: 16-bit formats take equally long."""
    if run.precision is not None and "fp8" in run.precision:
        return run.precision
    return "fp32" if run.precision == "fp32" else "bf16"


def system_of(run: MeasuredRun) -> System | None:
    """Return the described machine that a run names, None where there is none or it has other devices."""
    if run.system not in described_names():
        return None
    machine = load_machine(run.system)
    return System(machine.name, machine) if machine.node.device == run.device else None


def refused(run: MeasuredRun) -> str:
    """Say why the time of a run cannot be predicted, in one sentence; empty where it can."""
    if not run.used:
        return run.reason
    if run.rate is None:
        return "it did not fit" if run.status == "oom" else "its source states no rate"
    if system_of(run) is None:
        return f"no machine is described for {run.system or 'an unnamed system'} with {run.device}"
    return ""


def grouped(runs: Sequence[MeasuredRun]) -> list[MeasuredGroup]:
    """Group the runs whose time can be predicted by machine and number format."""
    together: dict[tuple[str, FrameworkProfile], list[MeasuredRun]] = {}
    systems: dict[str, System] = {}
    for run in runs:
        system = system_of(run)
        if not refused(run) and system is not None:
            systems[system.profile] = system
            links = system.machine.links
            # Our training exchanges by copies where devices are joined by switches.
            framework = replace(COMPILED, copy_engines=links is not None and links.switch is not None)
            together.setdefault((system.profile, framework.computing_in(timed_precision(run))), []).append(run)
    return [MeasuredGroup.of(systems[profile], framework, rows) for (profile, framework), rows in together.items()]
