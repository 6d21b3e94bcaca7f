"""What ranks wait for each other on graphs of uneven size, up to 4,096 ranks, with and without balancing.

    python benchmarks/graph_balance.py MOLECULES --out benchmarks/results/materials/graph_balance.json

prepares the three sets in the folder MOLECULES (QM9 molecules, GFN2-xTB copies of them, EMT alloys; every structure of the
training split once an epoch), cuts global batches, shares each out over ranks, and compares the cost of the heaviest rank
with the mean. Nothing is trained: a rank's time is taken as proportional to its atoms + 0.3 * edges. Three ways:

    in turn   equal numbers of structures, in the order of the shuffle: what a plain distributed sampler does
    atoms     global batches equal in atoms, shared out longest first by atoms: edges are not looked at
    cost      global batches equal in cost, shared out longest first by cost: what `data.batch_by: cost` does

The floor is the wait that no way of sharing out can avoid: that for the costliest structure of the step, which one rank
must compute whole, where it exceeds the mean cost of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from materials_files import three_sources
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.balance import (
    BalanceReport,
    CostModel,
    StepBalance,
    divide_by_cost,
    divide_in_turn,
    step_balance,
    summarise_balance,
)
from phalanx.families.materials.data.graph_batches import graph_columns
from phalanx.families.materials.data.graph_shards import Located, PreparedSource, open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, GraphOrder, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs

COST = CostModel(node=1.0, edge=0.3)
ATOMS = CostModel(node=1.0, edge=0.0)
WAYS = ("in turn", "atoms", "cost")
RANKS = (1, 4, 16, 64, 256, 1024, 4096)
SCENARIOS = [
    *(("weak", structures, ranks) for structures in (32, 8) for ranks in RANKS),
    *(("strong", total // ranks, ranks) for total in (65536, 8192) for ranks in RANKS),
]
"""Kind of scaling (fixed structures a rank, or a fixed global batch), structures a rank and step on average, ranks."""
SAMPLES = 2**17
"""Structures shared out for each row of the table, about."""
STEPS = (2, 200)
"""Fewest and most steps for each row."""


@dataclass
class Row:
    """One way of sharing out in one scenario."""

    sets: str
    scaling: str
    structures_a_rank: int
    ranks: int
    way: str
    balance: BalanceReport
    floor: float
    """Share of the time that ranks must wait for the costliest structures alone."""
    structures_a_step: tuple[int, int]
    """Fewest and most."""
    cpu_ms_to_share_out: float
    """Median over steps of the CPU time that locating, costing and sharing out the global batch takes."""


def simulate(sources: list[PreparedSource], name: str, scenario: tuple[str, int, int], way: str) -> Row:
    """Share out many steps."""
    scaling, structures, ranks = scenario
    total = structures * ranks
    steps = min(max(SAMPLES // total, STEPS[0]), STEPS[1])
    order = GraphOrder(
        sources,
        [None] * len(sources),
        seed=0,
        global_batch=total,
        batch_by="graphs" if way == "in turn" else "cost",
        cost=ATOMS if way == "atoms" else COST,
    )
    order.batch(1)
    seen: list[StepBalance] = []
    floors, counts, seconds = [], [], []
    for step in range(1, steps + 1):
        before = time.process_time()
        found = order.batch(step)
        balance = shared_out(found, way, ranks)
        seconds.append(time.process_time() - before)
        seen.append(balance)
        counts.append(len(found.numbers))
        mean = balance.seconds - balance.wait_seconds
        costliest = float(COST.whole(found.atoms, found.edges).max()) * COST.unit
        floors.append((max(costliest - mean, 0.0), max(costliest, mean)))
    floor = sum(wait for wait, _ in floors) / sum(lasted for _, lasted in floors)
    taken = 1e3 * statistics.median(seconds)
    return Row(name, scaling, structures, ranks, way, summarise_balance(seen), floor, (min(counts), max(counts)), taken)


def shared_out(found: Located, way: str, ranks: int) -> StepBalance:
    """The balance of one step, always in the true cost."""
    costs = COST.whole(found.atoms, found.edges)
    if way == "in turn":
        return step_balance(divide_in_turn(costs, ranks, 1), COST.unit)
    division = divide_by_cost(costs if way == "cost" else ATOMS.whole(found.atoms, found.edges), ranks, 1)
    loads = np.zeros((ranks, 1), dtype=np.int64)
    np.add.at(loads, (division.rank, division.part), costs)
    return step_balance(type(division)(division.rank, division.part, loads), COST.unit)


def reading(data: GraphData, sources: list[PreparedSource]) -> dict[str, float]:
    """CPU time of making batches of 64 structures, of opening the shards, and of resuming far on."""
    before = time.process_time()
    opened = open_prepared(data, "train")
    open_ms = 1e3 * (time.process_time() - before)
    order = graph_order(opened, data, seed=0, global_batch=64)
    stream = GraphBatchStream(order, graph_columns(sources), prefetch=0)
    before = time.process_time()
    stream.batch(10**6)
    resume_ms = 1e3 * (time.process_time() - before)
    structures = atoms = edges = 0
    before = time.process_time()
    for step in range(1, 273):
        batch = stream.batch(step)
        structures, atoms, edges = structures + len(batch.atoms), atoms + batch.atoms.sum(), edges + batch.edges.sum()
    seconds = time.process_time() - before
    return {
        "open_cpu_ms": open_ms,
        "first_batch_at_step_1000000_cpu_ms": resume_ms,
        "structures_per_cpu_second": structures / seconds,
        "atoms_per_cpu_second": float(atoms) / seconds,
        "edges_per_cpu_second": float(edges) / seconds,
    }


def describe(sources: list[PreparedSource]) -> dict[str, Any]:
    """The size distribution of each training split."""
    described = {}
    for source in sources:
        atoms, edges = source.sizes(np.arange(len(source)))
        costs = atoms + 0.3 * edges
        described[source.manifest.source] = {
            "structures": len(source),
            "atoms": [int(atoms.min()), float(atoms.mean()), int(atoms.max())],
            "edges": [int(edges.min()), float(edges.mean()), int(edges.max())],
            "cost": [float(costs.min()), float(costs.mean()), float(costs.max())],
        }
    return described


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": names[0] if names else platform.machine(),
        "cpu_count": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def table(rows: list[Row]) -> str:
    """Waits side by side."""
    lines = [
        "expected wait per step, % of the step (mean cost imbalance, max/mean)",
        f"{'sets':12} {'scaling':7} {'a rank':>6} {'ranks':>5} "
        + " ".join(f"{way:>16}" for way in WAYS)
        + f" {'floor':>7} {'cpu ms':>6}",
    ]
    for index in range(0, len(rows), len(WAYS)):
        group = rows[index : index + len(WAYS)]
        first, ours = group[0], group[-1]
        cells = [f"{100 * row.balance.wait_mean:7.2f} ({row.balance.imbalance_mean:6.3f})" for row in group]
        lines.append(
            f"{first.sets:12} {first.scaling:7} {first.structures_a_rank:6} {first.ranks:5} "
            + " ".join(f"{cell:>16}" for cell in cells)
            + f" {100 * ours.floor:7.2f} {ours.cpu_ms_to_share_out:6.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Simulate, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("molecules", type=Path, help="folder with qm9_12k.npz, xtb_6k.npz and alloy_emt_1500.npz")
    parser.add_argument("--prepared", type=Path, help="folder that keeps the prepared structures; none by default")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory() as name:
        config = three_sources(arguments.molecules, arguments.prepared or Path(name))
        data = GraphData.model_validate(config["data"])
        prepare_graphs(data)
        sources = open_prepared(data, "train")
        rows = [
            simulate(chosen, label, scenario, way)
            for label, chosen in (("three sets", sources), ("alloys alone", sources[2:]))
            for scenario in SCENARIOS
            for way in WAYS
            if len(chosen) > 1 or scenario[1] == 32
        ]
        results = {
            "command": "python benchmarks/graph_balance.py MOLECULES --out OUT",
            **about,
            "cost": "atoms + 0.3 * directed edges, cutoff 5 A; rank time taken as proportional to it",
            "minimum, mean, maximum of a structure": describe(sources),
            "reading": reading(data, sources),
            "rows": [asdict(row) for row in rows],
        }
    print(table(rows))
    print(json.dumps(results["reading"], indent=1))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
