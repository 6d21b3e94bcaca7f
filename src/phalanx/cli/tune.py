"""`phalanx tune`: the best hyperparameters by training, of any family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.arguments import Json, Overrides
from phalanx.cli.console import output, print_json, write_file
from phalanx.cli.tune_words import progress, tune_lines
from phalanx.cluster.machine import described_names, load_machine
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError


def tune(
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
    folder, stopped = _study(run, out, show), ""
    if run is not None and show is None:
        changes = {"tune.trials": trials, "tune.engine": engine, "tune.slots": slots}
        words = [f"{name}={value}" for name, value in changes.items() if value is not None]
        loaded = load_run(run, [*(overrides or []), *words])
        options = {"where": where, "devices": devices, "packing": packing}
        stopped = _run_tuning(loaded, folder, cluster, options)
    facts = _facts(folder) | {"why": stopped}
    written = _write_files(folder, facts, write, html)
    if json:
        print_json(facts | {"written": written})
        return
    console = output()
    for line in [*tune_lines(facts, console.width), *(f"wrote {name}" for name in written.values())]:
        console.print(line, soft_wrap=True)


def _study(run: Path | None, out: Path | None, show: Path | None) -> Path:
    if show is not None:
        if run is not None or out is not None:
            raise ConfigError("--show DIR reports on a study that there is; leave RUN and --out away")
        return show
    if run is None or out is None:
        raise ConfigError("give RUN --out DIR to tune a run file, or --show DIR to report on a study")
    return out


def _run_tuning(run: Run, folder: Path, cluster: str | None, options: dict[str, Any]) -> str:
    try:
        from phalanx.tune.run import Options, run_tuning  # noqa: PLC0415
    except ImportError as error:
        raise _missing(error) from None
    machine = None if cluster is None else load_machine(cluster)
    return run_tuning(run, folder, Options(machine=machine, **options), progress)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        from phalanx.tune.facts import tune_facts  # noqa: PLC0415
    except ImportError as error:
        raise _missing(error) from None
    return tune_facts(folder)


def _missing(error: ImportError) -> PhalanxError:
    return PhalanxError(f'phalanx tune needs {error.name}: pip install "phalanx-train[search]"')


def _write_files(folder: Path, facts: dict[str, Any], write: Path | None, html: Path | None) -> dict[str, str]:
    written = {}
    if write is not None:
        from phalanx.tune.best import best_run_text  # noqa: PLC0415

        write_file(write, best_run_text(folder, facts))
        written["run"] = str(write)
    if html is not None:
        from phalanx.report.tune_page import render_tune  # noqa: PLC0415

        write_file(html, render_tune(facts))
        written["html"] = str(html)
    return written
