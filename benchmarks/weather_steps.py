"""Some steps of weather runs in one layout after another, on all ranks of torchrun: the part of `weather_layouts.py` that
runs there.

All cases share one process group, since starting ranks takes longer than most cases. What could stand in the way of the
next case is taken down between them: compiled programs, tensors, buffers that peers read. Where memory is left over all
the same, the ranks stop and are started anew. A case that fails on one rank would leave the others waiting: the process
ends at once, and the launcher ends the others.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from exposed_communication import communication
from phalanx.checkpoint import materialise_optimizer_state
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.field_samples import FieldBatch
from phalanx.files import write_atomically
from phalanx.hardware.device import Moment, choose_device, synchronize
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import (
    Groups,
    Mesh,
    Ranks,
    build_mesh,
    join_process_group,
    leave_process_group,
    ranks_from_environment,
)
from phalanx.layout.place import place_of
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.ring_transport import CopyEngineRing, WeightRing
from phalanx.layout.streamed_weights.stream_pairs import Streamed
from phalanx.layout.streamed_weights.streamed_sharding import StreamedSharding
from phalanx.planner.dryrun.memory_trace import StepTrace
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.torch_compat import common as compat
from phalanx.training.step import TrainStep, build_step
from state_bytes import state_bytes

GIB = 2**30
LEFT_OVER_GIB = 16.0
"""More than contexts, libraries and communicators take between cases: something was not let go."""
ALLOCATED_GIB = 0.05
"""The same of tensors alone. They would count in the next case's peak."""
Case = dict[str, Any]
Found = dict[str, Any]


def main() -> None:
    """Run the cases of a file in order. Rank 0 writes what it found in case N to N.json, a rank that fails why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("folder", type=Path, help="holds cases.json; results are written here")
    parser.add_argument("--end", type=float, required=True, help="when all must be over, in seconds since 1970")
    parser.add_argument("--case-seconds", type=float, required=True, help="no case takes longer")
    parser.add_argument("--room-gib", type=float, required=True, help="memory that ranks on the CPU are said to have")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    ranks = ranks_from_environment()
    device = choose_device(options.device, ranks.local_rank)
    join_process_group(ranks, device)
    groups: Groups = {}
    for number, case in enumerate(json.loads((options.folder / "cases.json").read_text())):
        used, allocated = _used_gib(device), _allocated_gib(device)
        if number and (_agreed_most(used) > LEFT_OVER_GIB or _agreed_most(allocated) > ALLOCATED_GIB):
            print(f"{used:.1f} GiB in use, {allocated:.2f} allocated before {case['name']}: new ranks", flush=True)
            break
        # Every rank by itself, with the stacks it was in: nobody has to find out which rank hangs.
        faulthandler.dump_traceback_later(max(1.0, min(options.case_seconds, options.end - time.time())), exit=True)
        begin = time.monotonic()
        try:
            found = run_case(options, case, ranks, device, groups)
        except Exception as error:
            _give_up(options.folder / f"failed-{ranks.rank}.json", error)
        found |= {"wall_seconds": time.monotonic() - begin}
        if ranks.first:
            write_atomically(options.folder / f"{number}.json", json.dumps(found))
        _let_go(device)
    faulthandler.cancel_dump_traceback_later()
    leave_process_group()


def _give_up(file: Path, error: Exception) -> None:
    traceback.print_exc()
    text = f"{type(error).__name__}: {error}"
    full = "out of memory" in text.lower()
    write_atomically(file, json.dumps({"out_of_memory": full, "error": text.splitlines()[:6]}))
    sys.stderr.flush()
    os._exit(1)


def _let_go(device: torch.device) -> None:
    """Free what the last case held, and start the next one's peak from there."""
    # Programs are compiled for fixed shapes as long as they have seen no others.
    torch.compiler.reset()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def _used_gib(device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    free, total = torch.get_device_module(device).mem_get_info()
    return float(total - free) / GIB


def _allocated_gib(device: torch.device) -> float:
    return 0.0 if device.type == "cpu" else torch.accelerator.memory_allocated(device) / GIB


def _agreed_most(value: float) -> float:
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def run_case(options: argparse.Namespace, case: Case, ranks: Ranks, device: torch.device, groups: Groups) -> Found:
    """Time the steps of one case; profile one more and measure gathered weights where it asks for that."""
    run = load_run(options.run_file, case["words"])
    assert isinstance(run, WeatherRun)
    layout = resolve_layout(bind(run), ranks.world_size, ranks.ranks_per_node)
    if device.type == "cpu" and state_bytes(bind(run), layout).total > options.room_gib * GIB:
        raise MemoryError("out of memory: the state of the model is larger than --room-gib")
    mesh = build_mesh(layout, device, groups)
    attention = _agreed_attention(run, layout, device)
    applied = apply_layout(bind(run, LayoutModel), layout, mesh, device, attention, fill=case["fill"])
    if not case["fill"]:
        with torch.no_grad():
            for parameter in applied.parameters.values():
                place_of(parameter).local.zero_()
        applied.refresh()
    step = build_step(bind(run), applied, device)
    materialise_optimizer_state(step.optimizer)
    streamed = isinstance(applied.sharding, StreamedSharding)
    handed_out = _watch_weights(applied.sharding.stream.ring) if streamed else None
    batch = random_fields(run, layout, mesh, device)
    built = _memory(applied, device)
    gathered = exposed = None
    with attention.active(device):
        seconds, losses = timed_steps(step, batch, case["steps"], device)
        peak = _memory(applied, device)
        if case["profile"]:
            gathered = None if handed_out is None else gathered_weights(applied, device, handed_out)
            if device.type != "cpu":
                exposed = communication(lambda: step.enqueue(case["steps"] + 1, batch), keep=ranks.first)
    kept = seconds[min(case["skip"], len(seconds) - 1) :]
    median = statistics.median(kept)
    return {
        "step_seconds": median,
        "samples_per_second": layout.global_batch / median,
        "tokens_per_second": layout.global_batch * run.model.n_tokens / median,
        "step_seconds_all": [round(value, 6) for value in seconds],
        "losses": losses,
        "memory_gib": peak and _agreed_most(peak["peak"]),
        "memory_gib_rank_0": peak,
        "memory_gib_before_steps": built,
        "device_used_gib": _used_gib(device),
        "communication": exposed,
        "gathered_weights": gathered,
        "attention": attention.name,
        "attention_milliseconds": attention.milliseconds,
        "peer_copies": applied.sharding.buffer_bytes > 0,
        "compiled": applied.compiled,
        "torch": torch.__version__,
    }


def _agreed_attention(run: Run, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
    """Rank 0's choice: ranks that time kernels by themselves might differ."""
    names = ("sdpa", "cudnn", "flash", "efficient", "math")
    place = torch.zeros(1, dtype=torch.int64)
    milliseconds: dict[str, float] = {}
    if dist.get_rank() == 0:
        choice = bind(run, TracedModel).choose_attention(layout, device)
        place.fill_(names.index(choice.name))
        milliseconds = choice.milliseconds
    dist.broadcast(place, 0)
    return AttentionChoice(names[int(place)], milliseconds)


def random_fields(run: WeatherRun, layout: ResolvedLayout, mesh: Mesh, device: torch.device) -> FieldBatch:
    """This rank's samples: each is random, and a function of its number, so that all layouts see the same global batch."""
    count = layout.samples_per_rank
    batch = cast(FieldBatch, bind(run, TracedModel).example_batch(count, device))
    first = mesh.data_rank * count
    for row in range(count):
        random = torch.Generator(device).manual_seed(first + row)
        batch.fields[row].normal_(generator=random)
        batch.targets[row].normal_(generator=random)
    batch.lead_hours.fill_(24.0)
    return replace(batch, sample_indices=batch.sample_indices + first)


def timed_steps(
    step: TrainStep, batch: FieldBatch, count: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds and losses of `count` steps one after another, as training runs them: the host does not wait in between."""
    marks, results = [], []
    synchronize(device)
    for number in range(count + 1):
        marks.append(Moment(device))
        if number < count:
            results.append(step.enqueue(number + 1, batch))
    synchronize(device)
    return [end.seconds_since(start) for start, end in pairwise(marks)], [float(result[0]) for result in results]


def _memory(applied: ParallelModel, device: torch.device) -> dict[str, float] | None:
    """GiB on this rank: tensors at most, with the buffers that peers read, and these alone."""
    if device.type == "cpu":
        return None
    buffers = applied.sharding.buffer_bytes
    peak = compat.memory_statistics(device)["peak"] - compat.SymmetricBuffer.allocated
    return {"peak": (peak + buffers) / GIB, "peer_buffers": buffers / GIB}


# --- gathered weights of streamed chains ------------------------------------------------------------------------------


def gathered_weights(applied: ParallelModel, device: torch.device, handed_out: list[int]) -> Found:
    """Bytes of gathered weights on this rank, measured in two ways; see `weather_layouts` for what is promised.

    handed_out: the most that the ring gave out at a time in the steps before. growth: what the memory of this device grows
    by while the largest chain runs forward on one token a rank, beside which its weights are all there is; `buffers` that
    peers read lie outside the allocator and are there all the time. measured: growth + buffers.
    """
    assert isinstance(applied.sharding, StreamedSharding)
    ring = applied.sharding.stream.ring
    chains = [module for stage in applied.stages for module in stage.modules() if isinstance(module, Streamed)]
    largest = max(chains, key=lambda module: module.pair.plan.largest_chunk)
    width = largest.matrices()[0].shape[1]
    token = torch.zeros((1, applied.mesh.tp.size, width), dtype=applied.stages[0].part.dtype, device=device)
    growth = _growth(lambda: largest.pair.value(largest, token, ()), largest.matrices(), device)
    # The ring counts what it gives out, but the copies' ring has a pool beneath that, and only the pool sees it all.
    buffers = ring._weights.bytes if isinstance(ring, CopyEngineRing) else 0
    if buffers and device.type == "cpu":
        growth = 0  # buffers of ranks on the CPU are files, whose views would count as new memory
    return {
        "handed_out": None if isinstance(ring, CopyEngineRing) else handed_out[0],
        "growth": growth,
        "buffers": buffers,
        "measured": growth + buffers,
        "measured_most": int(_agreed_most(growth + buffers)),
    }


def _growth(run: Callable[[], Any], there: Iterable[torch.Tensor], device: torch.device) -> int:
    """The most bytes more than before while `run` runs without gradients. there: tensors that it reads."""
    with torch.no_grad():
        if device.type == "cpu":
            with StepTrace().watching() as trace:
                seen = [tensor.detach() for tensor in there]
                trace.begin()
                before = trace.now
                run()
                del seen
            return trace.peak - before
        synchronize(device)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        run()
        synchronize(device)
        return torch.accelerator.max_memory_allocated() - before


def _watch_weights(ring: WeightRing) -> list[int]:
    """Most bytes of streamed weights that the ring has given out at a time, in a list of one entry that grows."""
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
