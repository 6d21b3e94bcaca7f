"""`phalanx tune`: the best hyperparameters by training, of any family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.cli.console import output, print_json, write_file
from phalanx.cli.tune_words import progress, tune_lines
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.machine import load_machine


def tune(
    *,
    run: Path | None,
    overrides: list[str] | None,
    out: Path | None,
    trials: int | None,
    engine: str | None,
    devices: int | None,
    slots: int | None,
    where: str,
    cluster: str | None,
    packing: bool,
    show: Path | None,
    write: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.tune` declares its arguments."""
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
        from phalanx.study.hyperparameters.study import Options, run_tuning  # noqa: PLC0415
    except ImportError as error:
        raise _missing(error) from None
    machine = None if cluster is None else load_machine(cluster)
    return run_tuning(run, folder, Options(machine=machine, **options), progress)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        from phalanx.study.hyperparameters.summary import summarize_study  # noqa: PLC0415
    except ImportError as error:
        raise _missing(error) from None
    return summarize_study(folder)


def _missing(error: ImportError) -> PhalanxError:
    return PhalanxError(f'phalanx tune needs {error.name}: pip install "phalanx-train[search]"')


def _write_files(folder: Path, facts: dict[str, Any], write: Path | None, html: Path | None) -> dict[str, str]:
    written = {}
    if write is not None:
        from phalanx.study.hyperparameters.study import best_run_text  # noqa: PLC0415

        write_file(write, best_run_text(folder, facts))
        written["run"] = str(write)
    if html is not None:
        from phalanx.report.study_page import render_tune  # noqa: PLC0415

        write_file(html, render_tune(facts))
        written["html"] = str(html)
    return written
