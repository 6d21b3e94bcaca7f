"""What graph parallelism exchanges and saves: a periodic cell of a few thousand atoms over ranks of `layout.cp`.

    python benchmarks/graph_parallel.py --cp 1 2 4 --out benchmarks/results/materials/graph_parallel.json
    torchrun --nproc-per-node 4 benchmarks/graph_parallel.py --cp 1 4 --side 32 --precision fp32 --out ...

One training step with forces and stress on a jittered simple cubic crystal of side^3 atoms. On a CPU, started plainly, ranks
are processes of this machine that talk through gloo; under torchrun they are its ranks, and use the devices' own backend
(cp of 1 or all of them). For each degree a row says, of the rank that has most of it: atoms, halo, edges, bytes that
autograd keeps at the end of the forward pass (parameters aside), seconds a step; and of all ranks together the bytes that
halos sent in a step, beside the closed form (`families.materials.sizes` times atoms and edges of halos).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from halo_numbers import numbers_for_atoms, numbers_for_edges
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_batches import LABELS, GraphBatch
from phalanx.families.materials.data.neighbours import device_edges
from phalanx.families.materials.graph_parallel import halo_exchange as graph_parallel
from phalanx.families.materials.graph_parallel.cut_batches import GraphShare
from phalanx.families.registry import bind
from phalanx.hardware.device import choose_device, device_name
from phalanx.launch.fork_server import run_ranks
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import build_mesh, join_process_group, leave_process_group, ranks_from_environment
from phalanx.layout.resolve import resolve_layout

CUTOFF = 5.0
SPACING = 2.6
"""Of atoms in angstrom: 26 neighbours, and some more in places."""


@dataclass(frozen=True)
class Setting:
    """What is run."""

    body: str
    side: int
    width: int
    layers: int
    precision: str
    recompute: str
    steps: int


@dataclass(frozen=True)
class Row:
    """One degree; bytes and counts as at the top of this file."""

    cp: int
    atoms: int
    halo: int
    edges: int
    saved_bytes: int
    peak_bytes: int | None
    """Of the device; None on the CPU."""
    sent_bytes: int
    closed_form_bytes: int
    seconds: float
    """Median of a step, cutting the batch aside."""
    cut_seconds: float


def crystal(side: int) -> GraphBatch:
    """The cell, with labels of zeros."""
    draw = np.random.default_rng(1)
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    positions = torch.from_numpy((SPACING * (grid + draw.uniform(-0.1, 0.1, grid.shape))).astype("f4"))
    cells = torch.eye(3)[None] * (SPACING * side)
    found = device_edges(positions, cells, CUTOFF)
    atoms, edges = len(positions), found.edges_2E.shape[1]
    labels: dict[str, Any] = dict.fromkeys(LABELS)
    labels |= {"energy_G": torch.zeros(1, dtype=torch.float64), "forces_N3": torch.zeros(atoms, 3)}
    labels |= {"stress_G33": torch.zeros(1, 3, 3)}
    return GraphBatch(
        **labels,
        species_N=torch.from_numpy(draw.choice([13, 28, 29], atoms)),
        positions_N3=positions,
        graph_N=torch.zeros(atoms, dtype=torch.int64),
        edges_2E=found.edges_2E,
        shifts_E3=found.shifts_E3,
        cells_G33=cells,
        source_G=torch.zeros(1, dtype=torch.int64),
        total_charge_G=None,
        multiplicity_G=None,
        sample_indices=torch.zeros(1, dtype=torch.int64),
        atoms=np.array([atoms]),
        edges=np.array([edges]),
        graphs_by_part=(1,),
        tasks=("energy_G", "forces_N3", "stress_G33"),
    )


def run_of(setting: Setting, cp: int) -> MaterialsRun:
    """A run file's content; there are no data to read."""
    return MaterialsRun.model_validate(
        {
            "model": {
                "family": "materials",
                "body": setting.body,
                "n_layers": setting.layers,
                "d_model": setting.width,
                "cutoff": CUTOFF,
                "mean_neighbors": 26.0,
                "energy": {"force_weight": 1.0, "stress_weight": 1.0},
            },
            "data": {"sources": [{"name": "none", "path": "none"}], "prepared": "none", "cutoff": CUTOFF},
            "layout": {
                "global_batch": 1,
                "cp": cp,
                "dp_shard": 1,
                "precision": setting.precision,
                "recompute": setting.recompute,
            },
            "optimizer": {"lr": 0.001},
            "training": {"steps": 1},
        }
    )


@dataclass
class Counted:
    """Bytes seen while a step ran on this rank."""

    sent: int = 0
    saved: int = 0


@contextmanager
def counting(counted: Counted, parameters: set[int]) -> Iterator[None]:
    """Count what halos send, and each piece of memory that autograd keeps, once."""
    exchanged, kept = graph_parallel._exchange_rows, dict[int, Tensor]()

    def send(x: Tensor, *arguments: Any) -> Tensor:
        counted.sent += x.numel() * x.element_size()
        return exchanged(x, *arguments)

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in kept and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = x
            counted.saved += storage.nbytes()
        return x

    with (
        patch.object(graph_parallel, "_exchange_rows", send),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        yield


def measure(setting: Setting, cp: int, device: torch.device) -> dict[str, Any]:
    """Runs on every rank; this rank's figures."""
    run = run_of(setting, cp)
    layout = resolve_layout(bind(run), cp)
    # Gradients are not added up over ranks: what that takes is known, and gathered parameters would count as saved.
    mesh = replace(build_mesh(layout, device), data=None)
    applied = apply_layout(bind(run, LayoutModel), layout, mesh, device, AttentionChoice("sdpa"))
    executor, whole = Executor(applied), crystal(setting.side)
    start = time.perf_counter()
    # Rows are sent one by one even where a gather would bring them sooner: that is what the closed form counts.
    with patch("phalanx.families.materials.graph_parallel.cut_batches._GATHER_ABOVE", 1.0):
        batch = executor.cut(whole, 1)
    cut_seconds = time.perf_counter() - start
    sizes = {"atoms": len(whole.species_N), "halo": 0, "edges": whole.edges_2E.shape[1], "edge_halo": 0}
    if isinstance(batch, GraphShare):
        halo, named = batch.parts[0].halo, batch.parts[0].named
        sizes = {"atoms": halo.own, "halo": halo.senders - halo.own, "edges": named["edges_2E"].shape[1]}
        sizes["edge_halo"] = 0 if halo.edge_targets is None else len(halo.edge_targets)
    batch = batch.to(device)
    seconds, counted = [], Counted()
    for step in range(1, setting.steps + 1):
        _synchronise(device)
        start = time.perf_counter()
        executor.forward_backward(step, batch, 1.0)
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
    peak = None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    with counting(counted, {p.untyped_storage().data_ptr() for p in applied.stages[0].parameters()}):
        executor.forward_backward(setting.steps + 1, batch, 1.0)
    config, itemsize = run.model, {"fp64": 8, "fp32": 4, "bf16": 2}[setting.precision]
    closed = sizes["halo"] * numbers_for_atoms(config, forces=True, stress=True)
    closed += sizes["edge_halo"] * numbers_for_edges(config, forces=True, stress=True)
    return {
        **sizes,
        "saved": counted.saved,
        "peak": peak,
        "sent": counted.sent,
        "closed": closed * itemsize,
        "seconds": statistics.median(seconds),
        "cut_seconds": cut_seconds,
    }


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def row_of(cp: int, ranks: list[dict[str, Any]]) -> Row:
    """All ranks' figures in one row."""
    most = {name: max(r[name] for r in ranks) for name in ("atoms", "halo", "edges", "saved", "seconds", "cut_seconds")}
    peaks = [r["peak"] for r in ranks if r["peak"] is not None]
    return Row(
        cp,
        most["atoms"],
        most["halo"],
        most["edges"],
        most["saved"],
        max(peaks, default=None),
        sum(r["sent"] for r in ranks),
        sum(r["closed"] for r in ranks),
        most["seconds"],
        most["cut_seconds"],
    )


def rows_under_a_launcher(setting: Setting, degrees: list[int]) -> tuple[list[Row], bool, str]:
    """The rows, whether this rank prints them, and the device."""
    ranks = ranks_from_environment()
    device = choose_device("auto", ranks.local_rank)
    rows = []
    for cp in degrees:
        if cp == 1 and ranks.first:
            rows.append(row_of(1, [measure(setting, 1, device)]))
    join_process_group(ranks, device)
    for cp in degrees:
        if cp == ranks.world_size and cp > 1:
            figures: list[Any] = [None] * cp
            dist.all_gather_object(figures, measure(setting, cp, device))
            rows.append(row_of(cp, figures))
    leave_process_group()
    return rows, ranks.first, device_name(device)


def printed(row: Row) -> str:
    """One line of the table."""
    peak = "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 1e6:9.1f} MB"
    return (
        f"cp={row.cp}  atoms {row.atoms:6d}  halo {row.halo:6d}  edges {row.edges:8d}  saved {row.saved_bytes / 1e6:8.1f} MB"
        f"{peak}  sent {row.sent_bytes / 1e6:8.2f} MB (closed form {row.closed_form_bytes / 1e6:8.2f})  "
        f"{row.seconds:.3f} s, cut in {row.cut_seconds:.3f} s"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body", default="painn")
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--side", type=int, default=12, help="atoms along each edge of the cell")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=["fp64", "fp32", "bf16"])
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = ("body", "side", "width", "layers", "precision", "recompute", "steps")
    setting = Setting(*(getattr(options, name) for name in names))
    if "WORLD_SIZE" in os.environ or ranks_from_environment().world_size > 1:
        rows, first, device = rows_under_a_launcher(setting, options.cp)
    else:
        cpu, first, device = torch.device("cpu"), True, "CPU, gloo"
        rows = [row_of(cp, run_ranks(measure, cp, setting, cp, cpu, timeout_s=600.0)) for cp in options.cp]
    if not first:
        return
    for row in rows:
        print(printed(row))
    if options.out is not None:
        content: dict[str, Any] = {"setting": asdict(setting), "device": device, "torch": str(torch.__version__)}
        content |= {"machine": platform.machine(), "rows": [asdict(row) for row in rows]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
