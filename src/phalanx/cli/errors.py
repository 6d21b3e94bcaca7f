"""`phalanx errors`: what a materials model gets wrong, by data set and quantity, in physical units."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Json, Overrides
from phalanx.cli.console import output, print_json, print_pairs
from phalanx.cli.inference import Device
from phalanx.cluster.device import choose_device
from phalanx.data.graphs.trained_elements import untrained_in_words
from phalanx.evaluate.materials import split_errors


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
    where, found = split_errors(checkpoint, split, choose_device(device), samples=samples, overrides=overrides or ())
    if as_json:
        print_json({"checkpoint": str(where), "split": split, **found.as_dict()})
        return
    output().print(
        f"{where} on the {split} split: {found.structures:,} structures, loss {found.loss:.5g}", soft_wrap=True
    )
    print_pairs([(f"{row.source} {row.quantity}", row.errors_in_words) for row in found.rows])
    for line in untrained_in_words(found.untrained or {}):
        output().print(f"warning: {line}", style="yellow", soft_wrap=True)
