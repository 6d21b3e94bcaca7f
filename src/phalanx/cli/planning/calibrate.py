"""`phalanx calibrate`: how fast this machine is, or what runs say of another, as a profile that `phalanx plan` uses."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.cli.console import print_json, print_lines
from phalanx.cli.options.planning import CalibrateArguments
from phalanx.cli.ranks import start_ranks, words_without_nproc
from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.calibrate.fit_profile import Found, profile_of
from phalanx.hardware.calibrate.measure_machine import (
    Measurements,
    describe_this_machine,
    gather_measurements,
    measure_rank,
)
from phalanx.hardware.calibrate.measured_sizes import effort_for
from phalanx.hardware.device import choose_device, device_name
from phalanx.hardware.machine import Machine
from phalanx.layout.mesh import join_process_group, ranks_from_environment
from phalanx.planner.measured.calibration import Calibration, calibrate_machines
from phalanx.planner.measured.measured_groups import grouped
from phalanx.planner.measured.runs import read_runs
from phalanx.planner.time.profile import (
    CONSTANTS,
    NamedProfile,
    load_profile,
    measured_name,
    profile_text,
    save_profile,
)
from phalanx.printable import write_stderr


def run_calibrate(asked: CalibrateArguments) -> None:
    """Run the subcommand."""
    if asked.from_runs is not None:
        _fit_to_runs(asked.from_runs, asked.out, asked.profile, json=asked.json)
        return
    if asked.profile is not None:
        raise ConfigError(f"--profile {asked.profile} is what --from-runs begins with; measuring needs none")
    ranks = ranks_from_environment()
    if asked.nproc is not None:
        start_ranks(words_without_nproc(), asked.nproc)
        return
    here = choose_device(asked.device, ranks.local_rank)
    per_node = ranks.ranks_per_node or ranks.world_size
    machine = describe_this_machine(here, per_node, asked.cluster)
    path = asked.out or Path(measured_name(machine.name))
    if ranks.first:
        # A path that cannot be written is found out before minutes are spent on measuring.
        require_writable(path)
    join_process_group(ranks, here)

    def report(words: str) -> None:
        if ranks.first:
            write_stderr(f"measuring {words}")

    measured = gather_measurements(measure_rank(here, effort_for(here), per_node, asked.seconds, report))
    # not after a failure: ranks that have failed leave the others in exchanges that would never end
    if dist.is_initialized():
        dist.destroy_process_group()
    if ranks.first:
        devices, today = f"{ranks.world_size} x {device_name(here)}", date.today().isoformat()
        source = f"measured by phalanx calibrate on {devices}, torch {torch.__version__}, {today}"
        found = profile_of(measured, machine, source)
        _write_profile(path, found.named)
        _print_profile(found, measured, machine, path, json=asked.json)


def require_writable(path: Path) -> None:
    """Raise ConfigError where a profile could not be written to `path`, whose folder is made."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file in it with --out")
    probe = path.with_name(f".{path.name}.probe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(64 * 1024))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --out") from None
    finally:
        probe.unlink(missing_ok=True)


def _write_profile(path: Path, named: NamedProfile) -> None:
    """Write a profile. Raises PhalanxError where that fails; the profile is on stderr then, so that nothing is lost."""
    try:
        save_profile(path, named)
    except OSError as error:
        write_stderr(profile_text(named))
        raise PhalanxError(f"cannot write {path}: {error.strerror}; the profile stands above") from None


def _print_profile(found: Found, measured: Measurements, machine: Machine, path: Path, *, json: bool) -> None:
    """Print a fitted profile: its constants, and how far off it is for what it was fitted to and for whole blocks."""
    named = found.named
    facts: dict[str, Any] = {
        "written": str(path),
        "cluster": machine.name,
        "device": named.device,
        "source": named.source,
        "constants": {name: getattr(named.profile, name) for name in CONSTANTS},
        "collectives": None if named.collectives is None else asdict(named.collectives),
        "beside": named.beside,
        "operations": len(measured.operations),
        "operations_on_curves": len(found.operations),
        "operation_errors": _summarise_errors(found.operations),
        "exchanges": len(measured.exchanged),
        "exchange_errors": _summarise_errors(found.exchanged),
        "blocks": [asdict(block) for block in measured.blocks],
        "block_errors": found.blocks.tolist(),
    }
    if json:
        print_json(facts)
        return
    constants = named.profile
    lines = [
        f"matrix products {constants.matmul_flop_s / 1e12:.4g} TFLOP/s, attention {constants.attention_flop_s / 1e12:.3g} "
        f"forward and {constants.attention_backward_flop_s / 1e12:.3g} backward, memory {constants.memory_b_s / 1e9:.4g} "
        f"GB/s, optimizer {constants.optimizer_b_s / 1e9:.4g} GB/s",
        f"{len(found.operations)} operations: {_describe_errors(found.operations)} around the curves, which they correct",
    ]
    if whole := len(measured.operations) - len(found.operations):
        lines.append(f"{whole} calls of attention of all positions with all: kept as ratios to causal ones")
    if len(found.exchanged):
        lines.append(f"{len(found.exchanged)} collectives: {_describe_errors(found.exchanged)}")
    if len(found.blocks):
        lines.append(f"{len(found.blocks)} blocks, each predicted without it: {_describe_errors(found.blocks)}")
    lines.append(f"wrote {path}   next: phalanx plan RUN --cluster {machine.name} --profile {path}")
    print_lines(lines)


def _summarise_errors(errors: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float] | None:
    if not len(errors):
        return None
    return {"median": float(np.median(np.abs(errors))), "p95": float(np.quantile(np.abs(errors), 0.95))}


def _describe_errors(errors: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    size = np.abs(errors)
    return f"median error {100 * np.median(size):.1f}%, 95% {100 * np.quantile(size, 0.95):.1f}%"


# --- from runs ---------------------------------------------------------------------------------------------------------


def _fit_to_runs(table: Path, out: Path | None, profile: str | None, *, json: bool) -> None:
    """Fit and write one profile for each machine in the table."""
    if out is not None:
        require_writable(out)
    found = calibrate_machines(grouped(read_runs(table)), prior=None if profile is None else load_profile(profile))
    if not found:
        raise ConfigError(
            f"{table} has no run whose time can be predicted; phalanx plan --check {table} --json says why"
        )
    if out is not None and len(found) > 1:
        names = ", ".join(one.named.name for one in found)
        raise ConfigError(f"--out {out} is one file, but {table} has runs of {names}; leave --out out")
    paths = [out or Path(measured_name(one.named.name)) for one in found]
    for path, one in zip(paths, found, strict=True):
        _write_profile(path, one.named)
    rows = [_describe_fit(path, one) for path, one in zip(paths, found, strict=True)]
    if json:
        print_json({"profiles": rows})
        return
    for row in rows:
        held_out = row["held_out_median_error"]
        judged = "no other run to judge it by" if held_out is None else (
            f"{row['held_out']} held out ({row['held_out_by']}): median {100 * held_out:.1f}%, "
            f"95% {100 * row['held_out_p95_error']:.1f}%"
        )  # fmt: skip
        line = (
            f"{row['written']}: {len(row['rows'])} runs fitted, median error {100 * row['median_error']:.1f}% "
            f"(before {100 * row['median_error_before']:.1f}%); {judged}"
        )
        print_lines([line])


def _describe_fit(path: Path, one: Calibration) -> dict[str, Any]:
    fitted = one.named.fitted or {}
    known = {
        name: fitted.get(name) for name in ("held_out", "held_out_by", "held_out_median_error", "held_out_p95_error")
    }
    return {
        "written": str(path),
        "profile": one.named.name,
        "rows": list(one.rows),
        "median_error": float(np.median(np.abs(one.fitted_errors))),
        "median_error_before": float(np.median(np.abs(one.errors_before))),
        **known,
        "constants": {name: getattr(one.named.profile, name) for name in CONSTANTS},
    }
