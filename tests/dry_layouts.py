"""Small runs whose steps are dry-run and run for real, and what a real rank of them takes."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layout_runs import run_with
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.dryrun.memory_trace import StepTrace
from phalanx.planner.dryrun.rank_report import group_axes
from phalanx.planner.dryrun.run_step import WatchedExecutor, measured_step
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.torch_compat import common as compat
from phalanx.torch_compat.fake import in_backward
from phalanx.training.step import build_full_step

PLANNED_SIZES = {
    "model.d_model": 128,
    "model.d_ff": 352,
    "model.n_layers": 4,
    "model.vocab_size": 1000,
    "model.max_positions": 128,
    "data.sequence_length": 128,
    "training.loss_chunk_tokens": 64,
}
"""Sizes of runs whose plans are compared with dry runs of the code."""
WORLD = 4
_LARGER = {"model.d_model": 64, "model.d_ff": 192, "model.vocab_size": 509, "training.loss_chunk_tokens": 32}
_GPT = {
    "model.positions": "learned",
    "model.norm": "layernorm",
    "model.mlp": "gelu_tanh",
    "model.bias": True,
    "model.tied_head": True,
}
_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero 3, seven micro-batches": ({"dp_shard": 4, "global_batch": 28}, {}),
    "zero 2 in two replicas": ({"dp_shard": 2, "dp_replicate": 2, "zero": 2, "global_batch": 16}, {}),
    "tp, selective recompute": ({"tp": 2, "dp_shard": 2, "recompute": "selective", "global_batch": 4}, {}),
    "tp and tied biased gpt in a pipeline": ({"tp": 2, "pp": 2, "global_batch": 6}, _GPT),
    "1f1b of four ranks, full recompute": ({"pp": 4, "recompute": "full", "global_batch": 7}, {}),
    "gpipe": ({"pp": 2, "dp_shard": 2, "schedule": "gpipe", "global_batch": 10}, {}),
    "interleaved": ({"pp": 2, "dp_shard": 2, "schedule": "interleaved_1f1b", "global_batch": 20}, {}),
    "zbv": ({"pp": 2, "dp_shard": 2, "schedule": "zbv", "global_batch": 16}, {}),
    "ring": ({"cp": 2, "tp": 2, "context": "ring", "global_batch": 4}, {}),
    "document masks, dropout, fp16": (
        {"dp_shard": 4, "zero": 1, "precision": "fp16", "global_batch": 8},
        {"data.document_mask": True, "model.dropout": 0.1},
    ),
    "zero 0 in fp32": ({"dp_shard": 1, "dp_replicate": 4, "zero": 0, "precision": "fp32", "global_batch": 16}, {}),
    "heads exchanged": ({"cp": 2, "dp_shard": 2, "context": "all_to_all", "global_batch": 8}, {}),
}


def run_named(name: str) -> LanguageRun:
    """The run of this name."""
    layout, changes = _LAYOUTS[name]
    return run_with(_LARGER | changes, **layout)


NAMES = list(_LAYOUTS)


class _RealTrace(StepTrace):
    """The memory of a real rank, but for what its process group holds for itself.

    Gloo copies all that it reduces and scatters, and cuts the copy up when the result is awaited; no group of accelerators
    does.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor and in_backward() and not self.knows(args[0]):
            key = compat.storage_key(args[0])
            self._on_host.add(key)
            weakref.finalize(args[0].untyped_storage(), self._on_host.discard, key).atexit = False
        return super().__torch_dispatch__(func, types, args, kwargs)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` has come by."""
        return compat.storage_key(tensor) in self._allocations


def real_steps(watched: dict[str, int]) -> dict[str, dict[str, Any]]:
    """What the second step of each run takes on this rank of a real process group, where it is the one that is watched.

    watched: by the run's name; the others run beside it, since watching takes longer than the step itself.
    """
    made: Groups = {}
    steps = {name: _real_step(run_named(name), made, watched=dist.get_rank() == rank) for name, rank in watched.items()}
    return {name: step for name, step in steps.items() if watched[name] == dist.get_rank()}


def _real_step(run: LanguageRun, made: Groups, *, watched: bool) -> dict[str, Any]:
    layout, cpu = resolve_layout(bind(run), WORLD), torch.device("cpu")
    mesh = build_mesh(layout, cpu, made)
    trace = _RealTrace()
    with trace.watching() if watched else contextlib.nullcontext():
        applied = apply_layout(bind(run, LayoutModel), layout, mesh, cpu, AttentionChoice("sdpa"))
        step = build_full_step(bind(run), applied, cpu).relaid(WatchedExecutor(applied, trace))
        measured_step(bind(run, TracedModel), applied, step, trace)
        found = measured_step(bind(run, TracedModel), applied, step, trace)
    axes = group_axes(mesh, WORLD)
    calls: dict[tuple[str, str, int, int], int] = {}
    for call, count in found.calls.items():
        key = call.operation, axes[call.group].name, axes[call.group].size, call.bytes
        calls[key] = calls.get(key, 0) + count
    return {"peak": found.peak, "categories": found.categories, "calls": calls, "moment": str(found.moment)}
