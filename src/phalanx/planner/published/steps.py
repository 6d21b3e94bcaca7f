"""Published runs as steps that the time model can judge: on which machine, by which software, in which layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from phalanx.hardware.machine import Machine, described_names, load_machine
from phalanx.planner.layouts.candidates import Candidates
from phalanx.planner.published.runs import PublishedRun
from phalanx.planner.time.software import Software, software_of
from phalanx.planner.trace.family import Setting
from phalanx.planner.trace.steps import Steps, steps_of


@dataclass(frozen=True)
class System:
    """A machine that published runs were made on."""

    profile: str
    """Name of its fitted profile, there or not."""
    machine: Machine


@dataclass(frozen=True)
class Group:
    """Runs of one system and one software, with their steps in the same order."""

    system: System
    software: Software
    runs: tuple[PublishedRun, ...]
    steps: Steps


def system_of(run: PublishedRun) -> System | None:
    """The system of a run: a machine that is described, or one of those that others published runs of; None else."""
    if run.system in described_names():
        machine = load_machine(run.system)
        return System(machine.name, machine) if machine.node.device == run.device else None
    found = next((row for row in _systems() if _fits(row, run)), None)
    return None if found is None else _system(found["profile"])


def _fits(row: dict[str, Any], run: PublishedRun) -> bool:
    named = run.system.startswith(row["system"]) and run.framework.startswith(row.get("framework", ""))
    return named and run.device == row["device"]


@cache
def _systems() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(
        files("phalanx.planner.time").joinpath("profiles", "systems.yaml").read_text("utf-8")
    )
    return rows


@cache
def _system(profile: str) -> System:
    row = next(row for row in _systems() if row["profile"] == profile)
    machine = load_machine(row["machine"])
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


def refused(run: PublishedRun) -> str:
    """Why the time of a run cannot be predicted, in one sentence; empty where it can."""
    if not run.used:
        return run.reason
    if run.rate is None:
        return "it did not fit" if run.status == "oom" else "its source states no rate"
    if system_of(run) is None:
        return f"no machine is described for {run.system or 'an unnamed system'} with {run.device}"
    if software_of(run.framework) is None:
        return f"how {run.framework or 'its software'} trains is not described"
    return ""


def grouped(runs: Sequence[PublishedRun]) -> list[Group]:
    """The runs whose time can be predicted, by system and software."""
    together: dict[tuple[str, Software], list[PublishedRun]] = {}
    systems: dict[str, System] = {}
    for run in runs:
        system = system_of(run)
        software = software_of(run.framework, run.attention, run.sequence_parallel)
        if not refused(run) and system is not None and software is not None:
            systems[system.profile] = system
            software = _on(software, run, system).computing_in(_precision(run))
            together.setdefault((system.profile, software), []).append(run)
    return [_group(systems[profile], software, rows) for (profile, software), rows in together.items()]


def _on(software: Software, run: PublishedRun, system: System) -> Software:
    """Our own software exchanges by copies where devices are joined by switches."""
    links = system.machine.links
    copies = run.framework.lower().startswith("phalanx") and links is not None and links.switch is not None
    return replace(software, copy_engines=copies)


def _group(system: System, software: Software, runs: list[PublishedRun]) -> Group:
    by_model: dict[Setting, list[PublishedRun]] = {}
    for run in runs:
        by_model.setdefault(setting_of_run(run, software), []).append(run)
    ordered = [run for rows in by_model.values() for run in rows]
    several = []
    for setting, rows in by_model.items():
        layouts = [run.layout for run in rows if run.layout is not None]
        recompute = [run.recompute for run in rows if run.recompute is not None]
        several.append(steps_of(setting, Candidates.of(layouts, recompute), system.machine, software))
    return Group(system, software, tuple(ordered), Steps.joined_up(several))


def setting_of_run(run: PublishedRun, software: Software) -> Setting:
    """The model of a run as cost models take it."""
    assert run.model is not None and run.sequence_length is not None
    setting = Setting(run.model, run.sequence_length, precision=_precision(run), attention="flash")
    return replace(setting, compile=software.compiled)


def _precision(run: PublishedRun) -> str:
    """16-bit formats take equally long."""
    return "fp32" if run.precision == "fp32" else "bf16"
