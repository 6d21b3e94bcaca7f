"""Arguments, options and help of `phalanx errors`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Device, Json, Overrides


def errors(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Run directory (its newest whole checkpoint), or one checkpoint.")
    ],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Which part of the data.")] = "test",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Take this many structures, spread evenly over the split; by default all.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Errors of a materials model on structures it has not been trained on, on one device.

    Energies count per atom; components of forces, stresses and dipoles count one each. Structures with an element that no
    training structure of their branch had are counted, and said.
    """
