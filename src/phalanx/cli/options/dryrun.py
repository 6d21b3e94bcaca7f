"""Arguments, options and help of `phalanx dryrun`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Json, Overrides, RunFile


def dryrun(
    run: RunFile,
    devices: Annotated[
        int,
        typer.Option("--devices", "--nproc", min=1, metavar="N", help="Ranks of the run; one of them is run here."),
    ],
    overrides: Overrides = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="R", help="Rank to run; by default one each on the first, a middle and the last stage."
        ),
    ] = None,
    devices_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Devices that share a node; by default what the run file says."),
    ] = None,
    device: Annotated[
        Literal["gpu", "cpu"], typer.Option(help="Whose kernels to reckon with: they keep different things.")
    ] = "gpu",
    timeline: Annotated[
        bool, typer.Option("--timeline", help="The most memory in each module, forward and backward, as well.")
    ] = False,
    json: Json = False,
) -> None:
    """Run the training step of one rank without its devices: peak memory, and every collective with its bytes.

    The code that trains runs as it is, on tensors without memory, among ranks that are not there. Neither data nor a
    device is needed.
    """
