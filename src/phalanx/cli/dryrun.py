"""`phalanx dryrun`: run the real step of one rank of any number, without devices, and say what it takes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

import torch

from phalanx.checkpoint import materialise_optimizer_state
from phalanx.cli.console import output, print_json
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.sizes import sizes_of
from phalanx.layout.apply import ParallelModel
from phalanx.layout.compile import compiles_blocks
from phalanx.layout.context_parallel.kernel_choice import check_attention
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.dryrun.report import RankReport
from phalanx.planner.dryrun.run import dry_run
from phalanx.planner.trace.family import is_planned
from phalanx.planner.trace.memory_trace import CATEGORIES, Moment
from phalanx.train.step import TrainStep, build_step

_SILENCE_S = 10.0
"""Seconds after which a word is said to who waits."""


def dryrun(
    *,
    run: Path,
    devices: int,
    overrides: list[str] | None,
    rank: int | None,
    devices_per_node: int | None,
    device: Literal["gpu", "cpu"],
    timeline: bool,
    json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.dryrun` declares its arguments."""
    loaded = load_run(run, overrides or [])
    if not is_planned(loaded.model):
        raise ConfigError(
            f"phalanx dryrun needs steps of one shape, and those of model.family={loaded.model.family} depend on the samples"
        )
    per_node = loaded.cluster.devices_per_node or devices_per_node
    layout = resolve_layout(loaded, devices, per_node)
    if device == "cpu":
        check_attention(loaded.training.attention, torch.device("cpu"))
    if rank is not None and rank >= devices:
        raise ConfigError(f"--rank {rank} is not one of {devices} ranks; give 0 to {devices - 1}")
    ranks = [rank] if rank is not None else _ranks_of_stages(layout)
    reports = [
        dry_run(
            loaded,
            layout,
            number,
            _step,
            accelerator=device == "gpu",
            devices_per_node=per_node,
            tell=_Progress(number),
        )
        for number in ranks
    ]
    target = torch.device("cpu" if device == "cpu" else "meta")
    compiled = compiles_blocks(loaded, layout, target)
    if json:
        print_json(
            {
                "world_size": devices,
                "layout": str(layout),
                "device": device,
                "devices_per_node": per_node,
                "compiled_run": compiled,
                "ranks": [report.as_dict() for report in reports],
            }
        )
    else:
        _print(loaded, layout, reports, per_node, compiled, timeline)


class _Progress:
    """Says on stderr every now and then how far the step of one rank is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.start = self.said = time.perf_counter()

    def __call__(self, moment: Moment) -> None:
        """Say it, where nothing was said for a while."""
        now = time.perf_counter()
        if now - self.said >= _SILENCE_S:
            self.said = now
            sys.stderr.write(f"rank {self.rank}: {moment}, {now - self.start:.0f} s\n")


def _step(run: Run, applied: ParallelModel, device: torch.device) -> TrainStep:
    """The step that `phalanx train` runs, with all the state its optimizer will ever have."""
    step = build_step(run, applied, device)
    materialise_optimizer_state(step.optimizer)
    return step


def _ranks_of_stages(layout: ResolvedLayout) -> list[int]:
    """The first rank of the first, a middle and the last pipeline rank."""
    places = sorted({0, layout.pp // 2, layout.pp - 1})
    return [place * (layout.world_size // layout.pp) for place in places]


def _print(
    run: Run, layout: ResolvedLayout, reports: list[RankReport], per_node: int | None, compiled: bool, timeline: bool
) -> None:
    console = output()
    count = reports[0].microbatches
    console.print(f"{layout.world_size:,} ranks: {layout}; {count} micro-batch{'es' if count > 1 else ''} a step")
    sizes = sizes_of(run.model)
    console.print(f"{sizes.in_words(run.model)}; {sizes.parameter_count(run.model):,} parameters")
    for report in reports:
        stages = ", ".join(map(str, report.stages))
        console.print(f"\nrank {report.rank} (stage {stages})", style="bold")
        console.print(f"  {_summary(report, per_node)}")
        held = [(report.categories[name], name) for name in CATEGORIES if report.categories[name]]
        console.print("  at the peak: " + ", ".join(f"{name} {_gib(size)}" for size, name in held))
        console.print(
            f"  {'axis':<13}{'collective':<16}{'ranks':>6}{'each':>12}{'a step':>9}{'sent':>12}{'off node':>12}"
        )
        for t in report.traffic:
            off = "" if per_node is None else _bytes(t.crossing_in_all)
            console.print(
                f"  {t.axis:<13}{t.operation:<16}{t.size:>6}{_bytes(t.bytes):>12}{t.count:>9,}"
                f"{_bytes(t.sent_in_all):>12}{off:>12}"
            )
        if timeline:
            for point in report.points:
                console.print(f"  {_gib(point.peak):>11}  {point.moment}")
        if report.microbatches_run < report.microbatches:
            console.print(
                f"  ran {report.microbatches_run} micro-batches; each further one adds what the last ones added"
            )
        console.print(f"  took {report.seconds:.1f} s")
    if compiled:
        console.print("\nblocks ran uncompiled here; compiled, as this run has them, they hold less")


def _summary(report: RankReport, per_node: int | None) -> str:
    number, stage = report.moment.microbatch, report.moment.stage
    where = (
        f" on stage {stage} at micro-batch {number}, {report.moment.phase} of {report.moment.module}" if number else ""
    )
    crossing = sum(t.crossing_in_all for t in report.traffic)
    over = f", {_bytes(crossing)} over the node boundary" if per_node is not None else ""
    sent = _bytes(sum(t.sent_in_all for t in report.traffic))
    return (
        f"peak {_gib(report.peak)}{where or f' in the {report.moment}'}; "
        f"{report.collectives:,} collectives a step, {sent} sent{over}"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
