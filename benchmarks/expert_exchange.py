"""What a plan says of the exchange of rows for experts, by how it is done: flat or in two stages, and in how many chunks.

    python benchmarks/expert_exchange.py [--out benchmarks/results/experts/exchange_deepseek-v3_frontier_2048.txt]

DeepSeek-V3 on 2,048 devices of Frontier in a few layouts: seconds of an optimizer step that a rank waits for rows, waits for
their numbers among them. Nothing runs on devices.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import ranks_of_node, resolve_layout
from phalanx.planner.time.operation_time import OperationTable, PartBreakdown
from phalanx.planner.time.part_time import Parts, part_times, parts_of
from phalanx.planner.time.profile import profile_for
from phalanx.planner.time.timing import our_framework
from phalanx.planner.trace.traced_model import TracedModel

DEVICES, CLUSTER, RUN_FILE = 2048, "frontier", "examples/deepseek-v3.yaml"
LAYOUTS = (
    "tp=4 dp_shard=512 ep=8 microbatch=30",
    "tp=1 pp=16 dp_shard=128 ep=64 zero=1 microbatch=1",
    "tp=4 dp_shard=512 ep=64 microbatch=1",
    "tp=1 pp=8 dp_shard=256 ep=256 zero=1 microbatch=1",
    "tp=8 dp_shard=256 ep=256 microbatch=1",
)


@dataclass(frozen=True)
class Waits:
    """Seconds of a step that a rank waits for rows."""

    before: float
    """All rows at once and nothing beside them."""
    shared: float
    """The shared network beside the first trip."""
    stages: float
    """That, and two stages between nodes."""
    chunks: float
    """That of `shared`, and two chunks of tokens."""
    both: float
    message: int
    """Bytes of a message where rows go to their experts' ranks at once."""
    automatic: int
    """`ep_node` that `auto` takes."""


def measure(words: str) -> Waits:
    """Return what one layout waits for."""
    machine = load_machine(CLUSTER)
    fields = [f"layout.{word}" for word in ("zero=3", "recompute=full", *words.split())]
    model = bind(load_run(RUN_FILE, fields), TracedModel)
    node = machine.node.devices
    layout = replace(resolve_layout(model, DEVICES, node), ep_node=1)
    framework, profile, constants = (
        our_framework(model, machine),
        profile_for(machine).profile,
        default_constants(machine),
    )
    blocks = (model.config.n_layers - model.config.leading_layers) / layout.pp

    def seconds(ep_node: int, chunks: int, *, hides: bool = True) -> float:
        setting = model.setting_of(replace(layout, ep_node=ep_node), attention="flash", compiled=True)
        parts = parts_of([("block", replace(setting, ep_chunks=chunks), layout.microbatch)], framework)
        if not hides:
            parts = _hide_nothing(parts)
        each = part_times(parts, machine, constants, profile).seconds[0, :, PartBreakdown.EP].sum()
        return float(each * layout.accumulation * blocks)

    apart = node if layout.ep > node else 1
    return Waits(
        seconds(1, 1, hides=False),
        seconds(1, 1),
        seconds(apart, 1),
        seconds(1, 2),
        seconds(apart, 2),
        layout.microbatch * 4096 // layout.tp * model.dispatched_bytes() // layout.ep,
        int(ranks_of_node(model, layout.table, node)[0]),
    )


def _hide_nothing(parts: Parts) -> Parts:
    table: OperationTable = parts.operations
    return replace(parts, operations=replace(table, beside=np.zeros_like(table.beside)))


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    lines = [
        "# python benchmarks/expert_exchange.py: deepseek-v3 on 2,048 devices of Frontier, recompute=full, planned",
        "# Seconds of a step that a rank waits for rows on their way to experts and back.",
        f"{'layout':52} {'message':>10} {'before':>8} {'shared':>8} {'stages':>8} {'chunks':>8} {'both':>8}  ep_node=auto",
    ]
    for words in LAYOUTS:
        found = measure(words)
        times = (found.before, found.shared, found.stages, found.chunks, found.both)
        columns = " ".join(f"{each:8.2f}" for each in times)
        lines.append(f"{words:52} {found.message / 2**20:6.2f} MiB {columns}  {found.automatic}")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        write_atomically(out, text)


if __name__ == "__main__":
    main()
