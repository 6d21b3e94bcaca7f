"""Arguments, options and help of studies: search, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json, Overrides, complete_override
from phalanx.hardware.machine import described_names


def declare_search(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"What the planner takes the devices to be: {', '.join(described_names())}, or the path of a description.",
            autocompletion=lambda: list(described_names()),
        ),
    ],
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Devices of a trial.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields of the layout to keep, e.g. tp=8; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None,
    measure: Annotated[
        int, typer.Option(metavar="K", min=1, help="Trials of the study, those done before included.")
    ] = 10,
    engine: Annotated[
        str, typer.Option(help="planner, optuna-tpe, optuna-gp, deephyper, random or exhaustive.")
    ] = "planner",
    where: Annotated[
        str, typer.Option(help="local: this machine; slurm: the allocation this runs in; simulated: no devices at all.")
    ] = "local",
    storage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Optuna journal of the study; by default RUN.search.log.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Measured constants of the device, from phalanx calibrate.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of engines that draw at random, and of the simulated truth.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep run directories of trials.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the study as one HTML page.")] = None,
    json: Json = False,
) -> None:
    """Measure the layouts that the planner thinks best, learn from each, and say which one is best and what matters.

    Every trial is a short training run in processes of its own. One that runs out of memory, hangs, crashes or gives another
    loss is recorded and not repeated. A killed search goes on when it is started again; several may share one file.
    """


def declare_tune(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run file with a tune section, or folder of a run.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the study; one that exists goes on.")
    ] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", min=1, help="Configurations, for tune.trials.")] = None,
    engine: Annotated[str | None, typer.Option(help="optuna-tpe, deephyper or random, for tune.engine.")] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices: accelerators, or parts of the CPU's cores.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials that may share a device, for tune.slots.")
    ] = None,
    where: Annotated[str, typer.Option(help="local: this machine; slurm: the allocation this runs in.")] = "local",
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Of --where slurm: {', '.join(described_names())}, or the path of a description.",
            autocompletion=lambda: list(described_names()),
        ),
    ] = None,
    packing: Annotated[
        bool, typer.Option("--packing/--no-packing", help="Share devices, long trials first; or one trial a device.")
    ] = True,
    show: Annotated[Path | None, typer.Option(metavar="DIR", help="Report on a study and run nothing.")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the run file of the best configuration.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the study as one HTML page.")] = None,
    json: Json = False,
) -> None:
    """Find the best hyperparameters: every trial is a real training run, stopped early unless it is among the best.

    The tune section of the run file says which fields may be what, and which held-out figure is minimised. A killed study
    goes on when the same command is given again, and several commands, on one node or many, may share one.
    """
