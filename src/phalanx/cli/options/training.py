"""Arguments, options and help of training: train, launch, doctor, bench."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phalanx.chaos.faults import KINDS, USUAL
from phalanx.cli.arguments import Json, Nproc, Overrides, RunFile, ThisDevice
from phalanx.hardware.doctor.finding import PATIENCE_S
from phalanx.hardware.machine import described_names, machine_names
from phalanx.launch.parent import GRACE_S

_ASKED_FOR = [kind for kind in KINDS if kind not in USUAL]
"""Faults that not every run can meet."""


@dataclass(frozen=True)
class TrainArguments:
    """Train a model, or go on with a run.

    Goes on by itself from the newest whole checkpoint in the run directory. Under torchrun or srun every rank takes its
    part; metrics, logs and checkpoints come out the same.
    """

    run: RunFile
    overrides: Overrides = None
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for metrics and checkpoints; by default runs/<name of the run file>.")
    ] = None
    nproc: Nproc = None
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Nodes on each of which this command starts the ranks of --nproc; under srun with a task a node by itself.",
        ),
    ] = None
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", min=0, help="Number of this node among --nodes, from 0.")
    ] = None
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="First of --nodes, and a free port there at which the others find it."),
    ] = None
    until: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", min=1, help="End there, before the last step, as at a pause: changes nothing else."
        ),
    ] = None
    time: Annotated[
        str | None,
        typer.Option(
            metavar="H:MM:SS",
            help="Save and stop in time to have ended by then; by default when a Slurm job's time is up.",
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Time that ranks of --nproc have to save and stop."),
    ] = GRACE_S


@dataclass(frozen=True)
class LaunchArguments:
    """Write the Slurm script that trains a run on a cluster, and submit it.

    The run is checked for the ranks of the job first. A job whose time is up saves, and waits in the queue to go on.
    """

    run: RunFile
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"{', '.join(machine_names())}, or the path of a description of your own.",
            autocompletion=machine_names,
        ),
    ]
    nodes: Annotated[int, typer.Option(help="Nodes; one rank is started for each device on them.")]
    overrides: Overrides = None
    time: Annotated[
        str | None, typer.Option(metavar="H:MM:SS", help="Wall time; by default the longest that is allowed.")
    ] = None
    account: Annotated[str | None, typer.Option(help="Project that pays for the job.")] = None
    partition: Annotated[str | None, typer.Option(help="Partition (queue); by default the usual one.")] = None
    setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="Line of shell to run before training, such as 'source env/bin/activate'; may be given several times.",
        ),
    ] = None
    image: Annotated[
        str | None, typer.Option(help="Container image to train in, where the cluster has containers.")
    ] = None
    preflight: Annotated[
        bool, typer.Option(help="Whether phalanx doctor looks at all ranks of the job before they train.")
    ] = True
    out: Annotated[Path | None, typer.Option(help="File to write; by default the script is printed.")] = None
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand the script to sbatch, and keep it in --out or RUN-CLUSTER.sbatch.")
    ] = False
    as_json: Json = False


@dataclass(frozen=True)
class DoctorArguments:
    """Look for what would stop a training job, slow it down or spoil its results: before the first step, in a minute.

    Under torchrun, srun or --nproc every rank takes its part. Ends with exit code 3 where training would fail or be wrong.
    """

    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="This machine's description, whose settings and binding are looked for."
        ),
    ] = None
    nproc: Nproc = None
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing: look at settings, binding and versions.")] = (
        False
    )
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="How long a rank may say nothing.")] = (
        PATIENCE_S
    )
    device: ThisDevice = "auto"
    json: Json = False


@dataclass(frozen=True)
class ChaosArguments:
    """Train a run without faults, then again and again with faults drawn from a seed, and say what became of each.

    Runs are started and restarted as by train --nproc. Ends with exit code 3 where a fault was not found, was called
    something else, or left a trace in the result.
    """

    run: RunFile
    overrides: Overrides = None
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...",
            help=f"Of {', '.join(KINDS)}; by default all but {', '.join(_ASKED_FOR)}.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds draw equal faults.")] = 0
    minutes: Annotated[float, typer.Option(min=0.0, help="After which no further run is begun.")] = 10.0
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="Faults after which none is begun.")] = None
    in_each: Annotated[int, typer.Option("--faults-per-run", metavar="N", min=1, help="Faults of a run.")] = 5
    nproc: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks of each node, one for each device.")] = 1
    nodes: Annotated[
        int,
        typer.Option(metavar="K", min=1, help="Supervisors, one for each node; all here unless --start says where."),
    ] = 1
    start: Annotated[
        str, typer.Option(metavar="WORDS", help="Starts each run on all nodes, such as 'srun --ntasks-per-node=1'.")
    ] = ""
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for the runs, their logs and chaos.json.")] = (
        Path("chaos")
    )
    json: Json = False


@dataclass(frozen=True)
class BenchArguments:
    """Train some steps of a run for real, and say how long they took, how much memory, and what the planner expected.

    Checkpoints, evaluations and logs are left out; data are read as in training. Nothing of the run itself is touched.
    """

    run: RunFile
    overrides: Overrides = None
    devices: Annotated[
        int, typer.Option("--nproc", "--devices", metavar="N", min=1, help="Ranks to start, one for each device.")
    ] = 1
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 12
    skip: Annotated[int, typer.Option(min=0, help="First steps that do not count; the first one compiles.")] = 4
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Print the plan beside, for {', '.join(described_names())} or a description of your own.",
            autocompletion=described_names,
        ),
    ] = None
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Constants of that plan, from phalanx calibrate.")
    ] = None
    where: Annotated[
        str, typer.Option(help="local: this machine; slurm: the allocation this runs in, whole nodes of --cluster.")
    ] = "local"
    limit: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="After which it is given up.")] = 900.0
    keep: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the run and the logs of its processes.")] = (
        None
    )
    json: Json = False
