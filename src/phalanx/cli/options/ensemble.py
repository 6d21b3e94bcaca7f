"""Arguments, options and help of `phalanx ensemble`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Device, Json


def ensemble(
    members: Annotated[
        list[str],
        typer.Argument(
            metavar="MEMBER...",
            help="Folders of runs or checkpoints, or of a study; with --train run files too. Fields to change may follow: "
            "section.field=value.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the ensemble is written.")],
    top: Annotated[
        int | None,
        typer.Option(min=2, metavar="K", help="Choose this many; by default all, of a study 5."),
    ] = None,
    diversity: Annotated[
        float, typer.Option(min=0.0, help="Weight of disagreement when choosing: 0 goes by score alone.")
    ] = 1.0,
    weights: Annotated[
        Literal["equal", "fitted"], typer.Option(help="Whether members count as validation says, or all alike.")
    ] = "fitted",
    calibration: Annotated[
        Literal["likeliest", "factor", "floor", "isotonic"],
        typer.Option(help="How spread becomes uncertainty; by default what held-out folds find likeliest."),
    ] = "likeliest",
    train: Annotated[bool, typer.Option("--train", help="Train the members first, anew, in DIR/members.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=2, metavar="K", help="With --train: one configuration, K times with other seeds.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="With --train: runs side by side; by default one a device or core.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Structures, starts of forecasts or samples of text of each split; by default all."),
    ] = None,
    side_by_side: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most members on a device at a time; by default by memory.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start N ranks on this machine, which share the structures.")
    ] = None,
    hours: Annotated[
        int | None, typer.Option(min=1, help="Weather: longest lead time to score; by default that trained on.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; by default DIR/report.html.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Make one model of several: mean, calibrated uncertainty, and how good both are on the test split.

    Members are chosen and calibrated on the validation split. DIR/ensemble.json is what later uses read: an ASE calculator
    takes DIR as it takes a run.
    """
