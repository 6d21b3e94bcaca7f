"""Some steps of a weather run in one layout, on all ranks of torchrun: the part of `weather_layouts.py` that runs there."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from exposed_communication import communication
from phalanx.cluster.device import choose_device
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.files import write_atomically
from phalanx.layout.apply import Applied, apply_layout
from phalanx.layout.attention import AttentionChoice
from phalanx.layout.family import family_layout
from phalanx.layout.hybrid_stop_transport import Ring
from phalanx.layout.memory import state_bytes
from phalanx.layout.mesh import build_mesh, join_process_group, leave_process_group, ranks_from_environment
from phalanx.layout.peer_copies import choose_peer_copies
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.train.checkpoint import materialise_optimizer_state
from phalanx.train.step import build_step

GIB = 2**30


def main() -> None:
    """Time some steps, and profile one more. Rank 0 writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True)
    parser.add_argument("--room-gib", type=float, required=True)
    parser.add_argument("--profile-step", action="store_true")
    options = parser.parse_intermixed_args()
    run = load_run(options.run_file, options.words)
    ranks = ranks_from_environment()
    layout = resolve_layout(run, ranks.world_size, ranks.ranks_per_node)
    device = choose_device(run.cluster.device, ranks.local_rank)
    if device.type == "cpu" and options.room_gib and state_bytes(run, layout).total > options.room_gib * GIB:
        raise MemoryError("out of memory: the state of the model is larger than --room-gib")
    join_process_group(ranks, device)
    found = _steps(run, layout, device, options)
    if ranks.first:
        write_atomically(options.result, json.dumps(found))
    leave_process_group()


def _steps(run: Run, layout: ResolvedLayout, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    mesh = build_mesh(layout, device)
    attention = _agreed_attention(run, layout, device)
    copies = choose_peer_copies(run, layout, mesh, device)
    applied = apply_layout(run, layout, mesh, device, attention, copies)
    step = build_step(run, applied, device)
    materialise_optimizer_state(step.optimizer)
    most = _watch_weights(applied.stream.ring) if applied.stream is not None else None
    batch = family_layout(run).example_batch(run, layout.samples_per_rank, device)
    seconds: list[float] = []
    with attention.active():
        for number in range(1, options.steps + 1):
            _wait(device)
            begin = time.perf_counter()
            step.run(number, batch)
            _wait(device)
            seconds.append(time.perf_counter() - begin)
        exposed = None
        if device.type != "cpu" and options.profile_step:
            exposed = communication(lambda: step.run(options.steps + 1, batch))
    memory_peak = None
    if device.type != "cpu":
        memory_peak = (torch.get_device_module(device).max_memory_allocated() + _peer_bytes(applied, copies)) / GIB
    return {
        "step_seconds": statistics.median(seconds[min(options.skip, len(seconds) - 1) :]),
        "step_seconds_all": seconds,
        "memory_gib": memory_peak,
        "communication": exposed,
        "streamed_weights_peak_bytes": None if most is None else most[0],
        "attention": attention.name,
        "torch": torch.__version__,
    }


def _agreed_attention(run: Run, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
    """Rank 0's choice: ranks that time kernels by themselves might differ."""
    names = ("sdpa", "cudnn", "flash", "efficient", "math")
    place = torch.zeros(1, dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        place.fill_(names.index(family_layout(run).choose_attention(run, layout, device).name))
    dist.broadcast(place, 0)
    return AttentionChoice(names[int(place)])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _peer_bytes(applied: Applied, copies: Any) -> int:
    ring = None if applied.stream is None else applied.stream.ring
    return int(copies.bytes if copies is not None else 0) + int(getattr(ring, "bytes", 0))


def _watch_weights(ring: Ring) -> list[int]:
    """Most bytes of streamed weights that are alive at a time, in a list of one entry that grows."""
    most, alive = [0], [0]
    hand_out: Callable[[int, torch.Tensor], torch.Tensor] = ring.weights

    def gone(size: int) -> None:
        alive[0] -= size

    def weights(count: int, like: torch.Tensor) -> torch.Tensor:
        tensor = hand_out(count, like)
        weakref.finalize(tensor, gone, tensor.nbytes).atexit = False
        alive[0] += tensor.nbytes
        most[0] = max(most[0], alive[0])
        return tensor

    ring.weights = weights  # type: ignore[method-assign]
    return most


if __name__ == "__main__":
    main()
