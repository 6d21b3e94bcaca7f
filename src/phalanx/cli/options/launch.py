"""Arguments, options and help of `phalanx launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json, Overrides, RunFile
from phalanx.hardware.machine import machine_names


def launch(
    run: RunFile,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"{', '.join(machine_names())}, or the path of a description of your own.",
            autocompletion=lambda: list(machine_names()),
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Nodes; one rank is started for each device on them.")],
    overrides: Overrides = None,
    time: Annotated[
        str | None, typer.Option(metavar="H:MM:SS", help="Wall time; by default the longest that is allowed.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Project that pays for the job.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition (queue); by default the usual one.")] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="Line of shell to run before training, such as 'source env/bin/activate'; may be given several times.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Container image to train in, where the cluster has containers.")
    ] = None,
    preflight: Annotated[
        bool, typer.Option(help="Whether phalanx doctor looks at all ranks of the job before they train.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="File to write; by default the script is printed.")] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand the script to sbatch, and keep it in --out or RUN-CLUSTER.sbatch.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the Slurm script that trains a run on a cluster, and submit it.

    The run is checked for the ranks of the job first. A job whose time is up saves, and waits in the queue to go on.
    """
