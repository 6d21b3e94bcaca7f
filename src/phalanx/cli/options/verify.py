"""Arguments, options and help of `phalanx verify`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Json, RunFile, complete_override


def verify(
    run: RunFile,
    layout: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LAYOUT",
            help="Fields of the layout, e.g. tp=2 pp=2; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None,
    all_ranks: Annotated[
        int | None, typer.Option("--all", metavar="N", min=1, help="Try every legal layout for N ranks.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks to start; by default what the degrees multiply to.")
    ] = None,
    full: Annotated[bool, typer.Option(help="The model itself rather than a small one of the same kind.")] = False,
    precision: Annotated[
        Literal["fp64", "fp32", "bf16"], typer.Option(help="Number format to compute in; the bound follows from it.")
    ] = "fp64",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 2,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which silent ranks are given up.")] = 1800.0,
    json: Json = False,
) -> None:
    """Compare a layout with one rank: activations, loss, every gradient and every updated parameter.

    Starts its own CPU ranks; under torchrun or srun it takes the ranks and devices it finds. Ends with exit code 3 and
    names the first module that differs when the layout computes something else.
    """
