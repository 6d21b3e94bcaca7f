"""`phalanx dryrun`: run the real step of one rank of any number, without devices, and say what it takes."""

from __future__ import annotations

import time

import torch

from phalanx.cli.console import print_json, print_lines, print_table
from phalanx.cli.options.planning import DryrunArguments
from phalanx.config.families import sizes_of
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.formatting import format_gibibytes
from phalanx.layout.context_parallel.kernel_choice import check_attention
from phalanx.layout.prepare_blocks import compiles_blocks
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.dryrun.memory_trace import CATEGORIES, Moment
from phalanx.planner.dryrun.rank_report import RankReport, Traffic
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.printable import write_stderr
from phalanx.report.table import Column
from phalanx.training.step import build_full_step

_SILENCE_S = 10.0
"""Seconds after which it is said how far the step is."""


def run_dryrun(asked: DryrunArguments) -> None:
    """Run the subcommand."""
    loaded = load_run(asked.run, asked.overrides or [])
    model = bind(loaded)
    if not isinstance(model, TracedModel):
        raise ConfigError(
            f"phalanx dryrun needs steps of one shape, and those of model.family={loaded.model.family} depend on the samples"
        )
    per_node = loaded.cluster.devices_per_node or asked.devices_per_node
    layout = resolve_layout(model, asked.devices, per_node)
    # kernels of a GPU need not be here for a dry run, those of the CPU do
    if asked.device == "cpu":
        check_attention(loaded.training.attention, torch.device("cpu"))
    if asked.rank is not None and asked.rank >= asked.devices:
        raise ConfigError(f"--rank {asked.rank} is not one of {asked.devices} ranks; give 0 to {asked.devices - 1}")
    # The first rank of the first, a middle and the last pipeline rank: between them they show every kind of stage.
    places = sorted({0, layout.pp // 2, layout.pp - 1})
    ranks = [asked.rank] if asked.rank is not None else [place * (layout.world_size // layout.pp) for place in places]
    reports = [
        dry_run(
            model,
            layout,
            number,
            build_full_step,
            accelerator=asked.device == "gpu",
            devices_per_node=per_node,
            tell=_Progress(number),
        )
        for number in ranks
    ]
    target = torch.device("cpu" if asked.device == "cpu" else "meta")
    compiled = compiles_blocks(model, layout, target)
    if asked.json:
        print_json(
            {
                "world_size": asked.devices,
                "layout": str(layout),
                "device": asked.device,
                "devices_per_node": per_node,
                "compiled_run": compiled,
                "ranks": [report.as_dict() for report in reports],
            }
        )
    else:
        _print_reports(loaded, layout, reports, per_node, compiled, asked.timeline)


class _Progress:
    """Says on stderr every now and then how far the step of one rank is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.start = self.said = time.perf_counter()

    def __call__(self, moment: Moment) -> None:
        """Say how far the step is, where nothing was said for a while."""
        now = time.perf_counter()
        if now - self.said >= _SILENCE_S:
            self.said = now
            write_stderr(f"rank {self.rank}: {moment}, {now - self.start:.0f} s")


def _traffic_columns(per_node: int | None) -> tuple[Column[Traffic], ...]:
    return (
        Column("axis", lambda traffic: traffic.axis, "left"),
        Column("collective", lambda traffic: traffic.operation, "left"),
        Column("ranks", lambda traffic: traffic.size),
        Column("each", lambda traffic: _format_bytes(traffic.bytes)),
        Column("a step", lambda traffic: f"{traffic.count:,}"),
        Column("sent", lambda traffic: _format_bytes(traffic.sent_in_all)),
        Column("off node", lambda traffic: "" if per_node is None else _format_bytes(traffic.crossing_in_all)),
    )


def _print_reports(
    run: Run, layout: ResolvedLayout, reports: list[RankReport], per_node: int | None, compiled: bool, timeline: bool
) -> None:
    # All ranks run as many micro-batches.
    count, sizes = reports[0].microbatches, sizes_of(run.model)
    each = f"{layout.microbatch}{' (auto)' if run.layout.microbatch == 'auto' else ''}"
    print_lines(
        [
            f"{layout.world_size:,} ranks: {layout}; {count} micro-batch{'es' if count > 1 else ''} of {each} a step",
            f"{sizes.in_words(run.model)}; {sizes.parameter_count(run.model):,} parameters",
        ]
    )
    for report in reports:
        print_lines([f"\nrank {report.rank} (stage {', '.join(map(str, report.stages))})"], style="bold")
        held = [(report.categories[name], name) for name in CATEGORIES if report.categories[name]]
        print_lines(
            [
                f"  {_describe_peak(report, per_node)}",
                "  at the peak: " + ", ".join(f"{name} {_format_gib(size)}" for size, name in held),
                *([f"  in host memory: {_format_gib(report.host)}"] if report.host else []),
            ]
        )
        print_table(_traffic_columns(per_node), report.traffic)
        if timeline:
            print_lines(f"  {_format_gib(point.peak):>11}  {point.moment}" for point in report.points)
        if report.microbatches_run < report.microbatches:
            ran = f"  ran {report.microbatches_run} micro-batches; each further one adds what the last ones added"
            print_lines([ran])
        print_lines([f"  took {report.seconds:.1f} s"])
    if compiled:
        print_lines(["\nblocks ran uncompiled here; compiled, as this run has them, they hold less"])


def _describe_peak(report: RankReport, per_node: int | None) -> str:
    number, stage = report.moment.microbatch, report.moment.stage
    where = (
        f" on stage {stage} at micro-batch {number}, {report.moment.phase} of {report.moment.module}" if number else ""
    )
    crossing = sum(traffic.crossing_in_all for traffic in report.traffic)
    over = f", {_format_bytes(crossing)} over the node boundary" if per_node is not None else ""
    sent = _format_bytes(sum(traffic.sent_in_all for traffic in report.traffic))
    return (
        f"peak {_format_gib(report.peak)}{where or f' in the {report.moment}'}; "
        f"{report.collectives:,} collectives a step, {sent} sent{over}"
    )


def _format_gib(size: float) -> str:
    return f"{format_gibibytes(size, 2)} GiB"


def _format_bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
