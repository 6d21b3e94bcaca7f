"""Arguments, options and help of what is asked before a run is trained: plan, calibrate, verify, dryrun, search, tune."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import (
    BestLayoutFile,
    Json,
    Nproc,
    Overrides,
    RunFile,
    StudyPage,
    ThisDevice,
    complete_override,
)
from phalanx.hardware.machine import described_names
from phalanx.hardware.reliability import CHECKPOINT_GB_S, MTBF_HOURS, RESTART_MINUTES


@dataclass(frozen=True)
class PlanArguments:
    """Say which layouts are worth running, from the costs of the real model, in seconds and without any device.

    Every legal layout is judged; those that fit are ranked by the time of a step. Fields of the layout given here stay as
    given, all others are chosen.
    """

    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"{', '.join(described_names())}, or the path of a description of your own.",
            autocompletion=described_names,
        ),
    ] = None
    devices: Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices to plan for.")] = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields of the layout to keep, e.g. tp=8 recompute=full; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None
    fit: Annotated[bool, typer.Option("--fit", help="Plan on the smallest number of devices that fits.")] = False
    fix: Annotated[bool, typer.Option("--fix", help="Keep what the run file says of the layout, too.")] = False
    why: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Say what another choice would cost, e.g. tp=8; may be repeated."),
    ] = None
    scale: Annotated[
        str | None, typer.Option(metavar="LOW..HIGH", help="Strong and weak scaling over numbers of devices.")
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            "--samples",
            metavar="N",
            help="Tokens (of weather models samples) to train on, e.g. 300B; by default those of training.steps.",
        ),
    ] = None
    critical_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|RUN",
            help="Samples of the critical batch, or a run that measured it; by default the planned run, of a folder.",
        ),
    ] = None
    watts: Annotated[
        str | None,
        typer.Option(
            metavar="W|RUN",
            help="Power of a device that trains, or a run on such devices that counted it; else of the device table.",
        ),
    ] = None
    expert_loads: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Run of a mixture whose logged loads of experts are planned with; by default the planned run, of a folder.",
        ),
    ] = None
    best: Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to list.")] = 10
    p_fits: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least probability of fitting into memory.")] = 0.9
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="How fast the device is, from phalanx calibrate; by default CLUSTER.profile.yaml, if there is one.",
        ),
    ] = None
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help=f"Mean hours between failures of a node; by default what the machine's description says, else "
            f"{MTBF_HOURS:,g}.",
        ),
    ] = None
    restart_minutes: Annotated[float, typer.Option(min=0.0, help="From a failure to the next step.")] = RESTART_MINUTES
    checkpoint_gb_s: Annotated[float, typer.Option(min=1e-3, help="GB/s at which a node writes checkpoints.")] = (
        CHECKPOINT_GB_S
    )
    write: BestLayoutFile = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as one HTML page.")] = None
    check: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Compare predictions with measured runs instead.")
    ] = None
    json: Json = False


SECONDS = 200.0
"""Seconds that `phalanx calibrate` measures by default."""


@dataclass(frozen=True)
class CalibrateArguments:
    """Measure this machine, in a few minutes, and write a profile that plans use instead of tables.

    Matrix products of the shapes that models have, attention, memory traffic, the optimizer, the host, collectives and
    copies between devices, and whole blocks. Under torchrun, srun or --nproc every rank takes its part.
    """

    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="This machine's description; by default one with such devices."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The profile; by default CLUSTER.profile.yaml, which plans find."),
    ] = None
    nproc: Nproc = None
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure, about.")] = SECONDS
    device: ThisDevice = "auto"
    from_runs: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Fit the constants to measured runs instead.")
    ] = None
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="With --from-runs: the profile that the fit begins with.")
    ] = None
    json: Json = False


@dataclass(frozen=True)
class VerifyArguments:
    """Compare a layout with one rank: activations, loss, every gradient and every updated parameter.

    Starts its own CPU ranks; under torchrun or srun it takes the ranks and devices it finds. Ends with exit code 3 and
    names the first module that differs when the layout computes something else.
    """

    run: RunFile
    layout: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LAYOUT",
            help="Fields of the layout, e.g. tp=2 pp=2; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None
    all_ranks: Annotated[
        int | None, typer.Option("--all", metavar="N", min=1, help="Try every legal layout for N ranks.")
    ] = None
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks to start; by default what the degrees multiply to.")
    ] = None
    full: Annotated[bool, typer.Option(help="The model itself rather than a small one of the same kind.")] = False
    precision: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-row-experts", "fp8-block", "mxfp8"],
        typer.Option(help="Number format to compute in; the bound follows from it."),
    ] = "fp64"
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 2
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,...",
            help="Compare widths in place of layouts: whether muP keeps a step's effect the same; for a run's report.",
        ),
    ] = None
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which silent ranks are given up.")] = 1800.0
    json: Json = False


@dataclass(frozen=True)
class DryrunArguments:
    """Run the training step of one rank without its devices: peak memory, and every collective with its bytes.

    The code that trains runs as it is, on tensors without memory, among ranks that are not there. Neither data nor a
    device is needed.
    """

    run: RunFile
    devices: Annotated[
        int,
        typer.Option("--devices", "--nproc", min=1, metavar="N", help="Ranks of the run; one of them is run here."),
    ]
    overrides: Overrides = None
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="R", help="Rank to run; by default one each on the first, a middle and the last stage."
        ),
    ] = None
    devices_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Devices that share a node; by default what the run file says."),
    ] = None
    device: Annotated[
        Literal["gpu", "cpu"], typer.Option(help="Whose kernels to reckon with: they keep different things.")
    ] = "gpu"
    timeline: Annotated[
        bool, typer.Option("--timeline", help="The most memory in each module, forward and backward, as well.")
    ] = False
    json: Json = False


@dataclass(frozen=True)
class SearchArguments:
    """Measure the layouts that the planner thinks best, learn from each, and say which one is best and what matters.

    Every trial is a short training run in processes of its own. One that runs out of memory, hangs, crashes or gives another
    loss is recorded and not repeated. A killed search goes on when it is started again; several may share one file.
    """

    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")]
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"What the planner takes the devices to be: {', '.join(described_names())}, or the path of a description.",
            autocompletion=described_names,
        ),
    ]
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Devices of a trial.")]
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields of the layout to keep, e.g. tp=8; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None
    measure: Annotated[
        int, typer.Option(metavar="K", min=1, help="Trials of the study, those done before included.")
    ] = 10
    engine: Annotated[str, typer.Option(help="planner, optuna-tpe, optuna-gp, deephyper, random or exhaustive.")] = (
        "planner"
    )
    where: Annotated[
        str, typer.Option(help="local: this machine; slurm: the allocation this runs in; simulated: no devices at all.")
    ] = "local"
    storage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Optuna journal of the study; by default RUN.search.log.")
    ] = None
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Measured constants of the device, from phalanx calibrate.")
    ] = None
    seed: Annotated[int, typer.Option(help="Of engines that draw at random, and of the simulated truth.")] = 0
    keep: Annotated[bool, typer.Option("--keep", help="Keep run directories of trials.")] = False
    write: BestLayoutFile = None
    html: StudyPage = None
    json: Json = False


@dataclass(frozen=True)
class TuneArguments:
    """Find the best hyperparameters: every trial is a real training run, stopped early unless it is among the best.

    The tune section of the run file says which fields may be what, and which held-out figure is minimised. A killed study
    goes on when the same command is given again, and several commands, on one node or many, may share one.
    """

    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run file with a tune section, or folder of a run.")
    ] = None
    overrides: Overrides = None
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study; one that exists goes on.")] = (
        None
    )
    trials: Annotated[int | None, typer.Option(metavar="N", min=1, help="Configurations, for tune.trials.")] = None
    engine: Annotated[str | None, typer.Option(help="optuna-tpe, deephyper or random, for tune.engine.")] = None
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices: accelerators, or parts of the CPU's cores.")
    ] = None
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks of a trial, a device each, for tune.nproc.")
    ] = None
    slots: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials that may share a device, for tune.slots.")
    ] = None
    where: Annotated[
        str,
        typer.Option(
            help="local: this machine; slurm: the allocation this runs in; sbatch: job arrays that this submits."
        ),
    ] = "local"
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Of --where slurm and sbatch: {', '.join(described_names())}, or the path of a description.",
            autocompletion=described_names,
        ),
    ] = None
    time: Annotated[
        str | None,
        typer.Option(metavar="H:MM:SS", help="Of sbatch: wall time of a trial's job; by default tune.time_limit_s."),
    ] = None
    account: Annotated[str | None, typer.Option(help="Of sbatch: project that pays for the jobs.")] = None
    partition: Annotated[str | None, typer.Option(help="Of sbatch: partition (queue); by default the usual one.")] = (
        None
    )
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="Of sbatch: line of shell before training; may be given several times."),
    ] = None
    packing: Annotated[
        bool, typer.Option("--packing/--no-packing", help="Share devices, long trials first; or one trial a device.")
    ] = True
    show: Annotated[Path | None, typer.Option(metavar="DIR", help="Report on a study and run nothing.")] = None
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the run file of the best configuration.")
    ] = None
    html: StudyPage = None
    json: Json = False
