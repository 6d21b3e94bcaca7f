"""Published runs as steps that the time model can judge: on which machine, by which program, in which layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import yaml

from phalanx.hardware.machine import load_machine
from phalanx.planner.measured import measured_groups as measured
from phalanx.planner.measured.measured_groups import MeasuredGroup, System, timed_precision
from phalanx.planner.measured.runs import MeasuredRun
from phalanx.planner.time.framework import FrameworkProfile
from phalanx.planner.time.profile import NamedProfile, default_profile, load_profile, shipped_profiles
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import StepTimes, time_steps
from phalanx.planner.trace.expert_loads import BALANCED
from phalanx.planner.trace.traced_model import Setting
from published.bubble import estimate_pipelines
from published.frameworks import BlockingDataParallel, OtherFramework, framework_of, times_of_parts
from published.recipes import with_recipe
from published.runs import PublishedRun

PROFILES = Path(__file__).with_name("profiles")
"""Profiles fitted to published runs, a file for each system."""
_WHOLE = 2**40
"""Tokens of a chunk of logits that holds all of them."""


class PublishedGroup(MeasuredGroup):
    """Runs of one system and one program that may be another than ours."""

    @classmethod
    def of(cls, system: System, framework: FrameworkProfile, runs: Sequence[MeasuredRun]) -> Self:
        """Put together the steps of runs that can be predicted."""
        found = super().of(system, framework, runs)
        return replace(found, steps=steps_as_sent(found.steps, framework))

    @staticmethod
    def setting_of(run: MeasuredRun, framework: FrameworkProfile) -> Setting:
        """Return the model of a run; other programs than ours have all logits at once."""
        setting = with_whole_logits(MeasuredGroup.setting_of(run, framework), framework)
        assert run.sequence_length is not None
        if setting.model.biases_attention(run.sequence_length):
            # Kernels that skip what a window masks.
            setting = replace(setting, attention="flex")
        # Both programs spread tokens evenly for their benchmarks (`moe_router_force_load_balancing`).
        balanced = run.framework.startswith(("Megatron-Bridge", "Primus"))
        return replace(setting, loads=BALANCED) if balanced else setting

    def profile(self, *, calibrated: bool = True) -> NamedProfile:
        """Return the fitted profile of the group's system if there is one, else the default of its device."""
        name = self.system.profile
        path = PROFILES / f"{name}.yaml"
        if calibrated and path.exists():
            return load_profile(str(path))
        if calibrated and name in shipped_profiles():
            return load_profile(name)
        return default_profile(self.system.machine.node.device)

    def step_times(self, named: NamedProfile) -> StepTimes:
        """Predict the steps by a profile, pipelines in the closed form with which the profiles were fitted."""
        framework, machine, data_parallel = self.framework, self.system.machine, None
        if isinstance(framework, OtherFramework):
            named = framework.as_it_runs(named)
            data_parallel = None if framework.overlap else BlockingDataParallel
        constants = named.collectives_on(machine)
        times = times_of_parts(framework, self.steps.parts, machine, constants, named.profile)
        return time_steps(
            self.steps,
            times,
            named.profile,
            constants,
            framework,
            pipelines=estimate_pipelines,
            data_parallel=data_parallel,
        )


def with_whole_logits(setting: Setting, framework: FrameworkProfile) -> Setting:
    """Return the setting of a program that computes the loss of all tokens at once, if `framework` is such a one."""
    return replace(setting, chunk_tokens=_WHOLE) if isinstance(framework, OtherFramework) else setting


def steps_as_sent(steps: Steps, framework: FrameworkProfile) -> Steps:
    """Return steps whose pipeline ranks send whole activations where tensor-parallel ranks do not split them."""
    if not isinstance(framework, OtherFramework) or framework.sequence_parallel:
        return steps
    return replace(steps, hidden_bytes=steps.hidden_bytes * steps.layouts.tp)


def system_of(run: MeasuredRun) -> System | None:
    """Return the system of a run: a machine that is described, or one that others published runs of; None else."""
    described = measured.system_of(run)
    if described is not None:
        return described
    found = next((row for row in _systems() if _fits(row, run)), None)
    return None if found is None else _system(found["profile"])


def _fits(row: dict[str, Any], run: MeasuredRun) -> bool:
    named = run.system.startswith(row["system"]) and run.framework.startswith(row.get("framework", ""))
    return named and run.device == row["device"]


@cache
def _systems() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("systems.yaml").read_text("utf-8"))
    return rows


@cache
def _system(profile: str) -> System:
    row = next(row for row in _systems() if row["profile"] == profile)
    described = Path(__file__).with_name("machines") / f"{row['machine']}.yaml"
    machine = load_machine(str(described) if described.exists() else row["machine"])
    machine = machine.model_copy(update={"node": machine.node.model_copy(update={"device": row["device"]})})
    network = machine.network
    if network is not None and "nic_gb_s" in row:
        each = machine.node.devices // row["nics"]
        nic = type(network.nics[0])
        nics = tuple(
            nic(gb_s=row["nic_gb_s"], devices=tuple(range(first, first + each)))
            for first in range(0, machine.node.devices, each)
        )
        machine = machine.model_copy(update={"network": network.model_copy(update={"nics": nics})})
    return System(profile, machine)


def refused(run: MeasuredRun) -> str:
    """Say why the time of a run cannot be predicted, in one sentence; empty where it can."""
    if not run.used:
        return run.reason
    if run.rate is None:
        return "it did not fit" if run.status == "oom" else "its source states no rate"
    if system_of(run) is None:
        return f"no machine is described for {run.system or 'an unnamed system'} with {run.device}"
    if framework_of(run.framework) is None:
        return f"how {run.framework or 'its software'} trains is not described"
    return ""


def grouped(runs: Sequence[PublishedRun]) -> list[PublishedGroup]:
    """Group the runs whose time can be predicted by system and program."""
    together: dict[tuple[str, FrameworkProfile], list[PublishedRun]] = {}
    systems: dict[str, System] = {}
    for run in runs:
        system = system_of(run)
        framework = framework_of(run.framework, run.attention, run.sequence_parallel)
        if not refused(run) and system is not None and framework is not None:
            systems[system.profile] = system
            links = system.machine.links
            if not isinstance(framework, OtherFramework):
                framework = replace(framework, copy_engines=links is not None and links.switch is not None)
            framework = with_recipe(framework, run)
            together.setdefault((system.profile, framework.computing_in(timed_precision(run))), []).append(run)
    return [PublishedGroup.of(systems[profile], framework, rows) for (profile, framework), rows in together.items()]
