"""`phalanx doctor`: is this machine, as this job sees it, fit to train on?"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.text import Text

from phalanx.cli.console import open_output, print_json, print_lines
from phalanx.cli.options.training import DoctorArguments
from phalanx.cli.ranks import start_ranks, words_without_nproc
from phalanx.errors import CheckFailed
from phalanx.hardware.device import choose_device
from phalanx.hardware.doctor.examine import Examination, examine_ranks
from phalanx.hardware.doctor.finding import format_ranks
from phalanx.hardware.machine import load_machine
from phalanx.layout.mesh import leave_process_group, ranks_from_environment


def run_doctor(asked: DoctorArguments) -> None:
    """Run the subcommand."""
    machine = None if asked.cluster is None else load_machine(asked.cluster)
    ranks = ranks_from_environment()
    # The ranks look at the machine, each at its device; this process only waits
    if asked.nproc is not None:
        start_ranks(words_without_nproc(), asked.nproc)
        return
    found = examine_ranks(
        ranks,
        choose_device(asked.device, ranks.local_rank),
        machine,
        measured=not asked.quick,
        patience_s=asked.patience,
    )
    leave_process_group()
    if not ranks.first:
        return
    if asked.json:
        print_json(
            {
                "passed": found.passed,
                "findings": [asdict(finding) for finding in found.findings],
                "ranks": [asdict(one) for one in found.facts],
                "rates": [asdict(one) for one in found.rates],
            }
        )
    else:
        _print_examination(found)
    failed = [finding for finding in found.findings if finding.level == "failed"]
    if failed:
        raise CheckFailed(f"not fit to train on: {', '.join(dict.fromkeys(finding.check for finding in failed))}")


def _print_examination(found: Examination) -> None:
    """Print the ranks and rates of an examination, then each finding, and PASS where nothing failed."""
    devices = Counter(one.device for one in found.facts)
    hosts = len({one.host for one in found.facts})
    versions = found.facts[0].versions
    listed = ", ".join(f"{count:,} x {name}" for name, count in devices.most_common())
    ranks = len(found.facts)
    print_lines(
        [
            (
                f"{ranks:,} rank{'s' if ranks > 1 else ''} on {hosts:,} host{'s' if hosts > 1 else ''}: {listed}; "
                f"phalanx {versions['phalanx']}, torch {versions['torch']}, Python {versions['python']}"
            ),
            *(f"  {line}" for line in _write_rates(found)),
        ]
    )
    for finding in found.findings:
        style = "bold red" if finding.level == "failed" else "yellow"
        all_of_them = len(finding.ranks) in (0, len(found.facts))
        # findings of one rank name it with its host
        whose = "" if all_of_them or len(finding.ranks) == 1 else f" ({format_ranks(finding.ranks)})"
        open_output().print(
            Text.assemble((f"{finding.level:7}", style), f"  {finding.check}: {finding.message}{whose}; {finding.fix}"),
            soft_wrap=True,
        )
    warnings = sum(finding.level == "warning" for finding in found.findings)
    if found.passed:
        also = f" with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
        print_lines([f"PASS{also}"], style="green")


def _write_rates(found: Examination) -> list[str]:
    if not found.rates:
        return []
    lines = [
        _write_rate("products", "TFLOP/s", [one.matmul_tflops for one in found.rates], found),
        _write_rate("copies in memory", "GB/s", [one.copy_gb_s for one in found.rates], found),
    ]
    world = [one.world_gb_s for one in found.rates if one.world_gb_s is not None]
    if world:
        within = [one.node_gb_s for one in found.rates if one.node_gb_s is not None]
        node = f"{statistics.median(within):.4g} GB/s in a node, " if within and within != world else ""
        lines.append(f"all-reduce: {node}{statistics.median(world):.4g} GB/s among all ranks (bus bandwidth)")
    return lines


def _write_rate(what: str, unit: str, values: Sequence[float], found: Examination) -> str:
    if len(values) == 1:
        return f"{what}: {values[0]:.4g} {unit}"
    slowest = min(range(len(values)), key=lambda place: values[place])
    return (
        f"{what}: {statistics.median(values):.4g} {unit} in the median, {values[slowest]:.4g} at least "
        f"({found.facts[slowest].words})"
    )
