"""`phalanx bench`: how fast a run is here, and what the planner expected."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from phalanx.cli.console import print_json, print_lines
from phalanx.cli.options.training import BenchArguments
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.formatting import format_gibibytes
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import load_machine
from phalanx.layout.mesh import ranks_from_environment
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.measured_steps import Expected, Measured, expect_step, measure_steps
from phalanx.planner.rank.cost_models import memory_fits
from phalanx.planner.time.profile import choose_profile
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.study.processes.slots import Launcher, LocalRanks, whole_nodes
from phalanx.study.processes.trial_files import short_run


def run_bench(asked: BenchArguments) -> None:
    """Run the subcommand."""
    if asked.skip >= asked.steps:
        raise ConfigError(
            f"--skip {asked.skip} leaves none of --steps {asked.steps} to count; nearest legal: --skip {asked.steps - 1}"
        )
    # Under torchrun every rank would start a whole benchmark
    if ranks_from_environment().world_size > 1:
        raise ConfigError("phalanx bench starts its ranks itself: call it once, with --nproc N or --where slurm")
    machine = None if asked.cluster is None else load_machine(asked.cluster)
    if asked.where == "local":
        launcher: Launcher = LocalRanks(asked.devices)
    elif asked.where != "slurm":
        raise ConfigError(f"--where {asked.where} is not known; give local or slurm")
    elif machine is None:
        raise ConfigError("--where slurm needs --cluster NAME, which says how steps are started there")
    else:
        launcher = whole_nodes(machine, asked.devices)
    model = bind(short_run(load_run(asked.run, asked.overrides or []), asked.steps))
    if machine is None:
        layout = resolve_layout(model, asked.devices)
    else:
        device = machine.node.device
        capacity = device_facts(device).memory_bytes
        fits = None if capacity is None else memory_fits(model, capacity, rocm=device.startswith("MI"))
        layout = resolve_layout(model, asked.devices, machine.node.devices, fits)
    plan, why = None, None
    if machine is not None and asked.cluster is not None:
        # What is measured is what is planned beside it.
        section = model.run.layout.model_copy(update={"microbatch": layout.microbatch})
        model = model.rebind(model.run.model_copy(update={"layout": section}))
        # Slurm asks for a cluster whether there is a plan or not.
        if isinstance(model, TracedModel):
            plan = expect_step(model, layout, machine, choose_profile(machine, asked.cluster, asked.profile))
        else:
            family = model.run.model.family
            why = f"no plan for model.family={family}: what a batch of graphs costs depends on the graphs"
    found = _measure_run(model.run, launcher, asked.devices, asked.keep, asked.skip, asked.limit)
    summary = {
        "layout": str(layout),
        "devices": asked.devices,
        "global_batch": layout.global_batch,
        "measured": asdict(found),
        "planned": None if plan is None else asdict(plan),
        "why_no_plan": why,
    }
    if asked.json:
        print_json(summary)
        return
    print_lines(_write_measured(layout, found))
    if plan is not None:
        print_lines(_write_planned(found, plan))
    if why is not None:
        print_lines([f"  planned   {why}"])


def _measure_run(run: Run, launcher: Launcher, devices: int, keep: Path | None, skip: int, limit_s: float) -> Measured:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"--keep {keep} holds something already; name a folder that is empty or not there")
        keep.mkdir(parents=True, exist_ok=True)
        return measure_steps(run, launcher, devices, keep.absolute(), skip=skip, limit_s=limit_s)
    # beside the caller's files and not in /tmp: ranks of other nodes have to see it
    folder = Path(tempfile.mkdtemp(prefix=".phalanx-bench-", dir=Path.cwd()))
    try:
        return measure_steps(run, launcher, devices, folder, skip=skip, limit_s=limit_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_measured(layout: ResolvedLayout, found: Measured) -> Iterator[str]:
    low, high = found.step_s_range
    steps = len(found.all_step_s)
    yield f"{layout} on {found.device}, attention {found.attention}; the last {steps - found.skipped} of {steps} steps count"
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%} of nominal"
    mfu += "" if found.mfu_measured is None else f"{' and' if mfu else ', MFU'} {found.mfu_measured:.1%} of measured"
    yield (
        f"  measured  {found.step_s:.4g} s a step ({low:.4g} to {high:.4g}), {found.per_s_per_device:,.0f} {found.unit}/s a "
        f"device, {found.tflops_per_device:.4g} model TFLOP/s ({found.flops_convention}){mfu}"
    )
    memory = "" if found.memory_bytes is None else f", peak {format_gibibytes(found.memory_bytes, 2)} GiB"
    retries = f", the allocator found the device full {found.memory_retries} times" if found.memory_retries else ""
    if found.step_joules is not None and found.joules_per_unit is not None:
        each = f"{found.step_joules:,.4g} J a step, {found.joules_per_unit:.4g} J a {found.unit.removesuffix('s')}"
        yield f"            {each}; all devices together draw {found.step_joules / found.step_s:,.4g} W"
    yield f"            data wait {found.data_wait_share:.2%}, first step {found.all_step_s[0]:.3g} s{memory}{retries}"


def _write_planned(found: Measured, plan: Expected) -> Iterator[str]:
    low, high = plan.step_s_interval
    comparable = plan.device == found.device_kind
    time = f"{plan.step_s / found.step_s - 1:+.1%}; " if comparable else ""
    memory = f"{format_gibibytes(plan.memory_bytes, 2)} GiB"
    if comparable and found.memory_bytes is not None:
        memory += f" ({plan.memory_bytes / found.memory_bytes - 1:+.1%})"
    yield (
        f"  planned   {plan.step_s:.4g} s ({time}90% between {low:.4g} and {high:.4g}), "
        f"{memory}; {plan.cluster} by {plan.profile}"
    )
    if not comparable:
        yield (
            f"            not to be compared: the steps ran on {found.device_kind}, the plan is for the {plan.device} of "
            f"{plan.cluster}"
        )
    parts = " | ".join(
        f"{name} {seconds / plan.step_s:.1%}"
        for name, seconds in plan.time_by_cause_s.items()
        if seconds > 0.005 * plan.step_s
    )
    yield f"            {parts}"
