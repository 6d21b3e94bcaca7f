"""Arguments, options and help of `phalanx plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json, complete_override
from phalanx.hardware.machine import described_names
from phalanx.planner.explain.reliability import CHECKPOINT_GB_S, MTBF_HOURS, RESTART_MINUTES

RunFile = Annotated[Path | None, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=f"{', '.join(described_names())}, or the path of a description of your own.",
        autocompletion=lambda: list(described_names()),
    ),
]
Devices = Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices to plan for.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields of the layout to keep, e.g. tp=8 recompute=full; other fields as section.field=value.",
        autocompletion=complete_override,
    ),
]
Fit = Annotated[bool, typer.Option("--fit", help="Plan on the smallest number of devices that fits.")]
Fix = Annotated[bool, typer.Option("--fix", help="Keep what the run file says of the layout, too.")]
Whys = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=VALUE", help="Say what another choice would cost, e.g. tp=8; may be repeated."),
]
Scale = Annotated[
    str | None, typer.Option(metavar="LOW..HIGH", help="Strong and weak scaling over numbers of devices.")
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        "--samples",
        metavar="N",
        help="Tokens (of weather models samples) to train on, e.g. 300B; by default those of training.steps.",
    ),
]
Best = Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to list.")]
PFits = Annotated[float, typer.Option(min=0.0, max=1.0, help="Least probability of fitting into memory.")]
ProfileName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="How fast the device is, from phalanx calibrate; by default CLUSTER.profile.yaml, if there is one.",
    ),
]
MtbfHours = Annotated[float, typer.Option(min=1.0, help="Mean hours between failures of a node.")]
RestartMinutes = Annotated[float, typer.Option(min=0.0, help="From a failure to the next step.")]
CheckpointGbS = Annotated[float, typer.Option(min=1e-3, help="GB/s at which a node writes checkpoints.")]
Write = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as one HTML page.")]
Check = Annotated[Path | None, typer.Option(metavar="RUNS.csv", help="Compare predictions with measured runs instead.")]


def plan(
    run: RunFile = None,
    cluster: Cluster = None,
    devices: Devices = None,
    overrides: Overrides = None,
    fit: Fit = False,
    fix: Fix = False,
    why: Whys = None,
    scale: Scale = None,
    tokens: Tokens = None,
    best: Best = 10,
    p_fits: PFits = 0.9,
    profile: ProfileName = None,
    mtbf_hours: MtbfHours = MTBF_HOURS,
    restart_minutes: RestartMinutes = RESTART_MINUTES,
    checkpoint_gb_s: CheckpointGbS = CHECKPOINT_GB_S,
    write: Write = None,
    html: Html = None,
    check: Check = None,
    json: Json = False,
) -> None:
    """Say which layouts are worth running, from the costs of the real model, in seconds and without any device.

    Every legal layout is judged; those that fit are ranked by the time of a step. Fields of the layout given here stay as
    given, all others are chosen.
    """
