"""One rank of a run of any size in this process: a process group that reaches nobody, tensors that take no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from phalanx.layout.mesh import Mesh, build_mesh
from phalanx.layout.pipeline.stage_assignment import from_other_ranks
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.attention import causal_block_mask
from phalanx.planner.trace.accelerator_norm import fused_norms
from phalanx.planner.trace.memory_trace import StepTrace
from phalanx.torch_compat import common as compat
from phalanx.torch_compat import fake as compat_fake

DEVICE = torch.device("cpu")
"""Where fake tensors say they are. PyTorch built without CUDA cannot differentiate tensors that say they are elsewhere."""


@contextlib.contextmanager
def fake_rank(layout: ResolvedLayout, rank: int, *, accelerator: bool) -> Iterator[tuple[Mesh, StepTrace]]:
    """Be `rank` of `layout.world_size` ranks: its mesh, and the account of all that is made in here, which is fake.

    accelerator: whether tensors are kept as by an accelerator's kernels rather than the CPU's. Nothing is left behind.
    """
    with contextlib.ExitStack() as stack:
        if layout.world_size > 1:
            stack.enter_context(compat_fake.fake_process_group(rank, layout.world_size))
        mesh = build_mesh(layout, DEVICE)
        # A mask that is kept for the next caller must not be fake then, nor real now.
        causal_block_mask.cache_clear()
        stack.callback(causal_block_mask.cache_clear)
        stack.enter_context(compat_fake.fake_tensors_everywhere(_most_sent(layout, mesh) if accelerator else None))
        if accelerator:
            stack.enter_context(compat.cpu_stands_in())
            stack.enter_context(fused_norms())
        trace = stack.enter_context(StepTrace().watching())
        yield mesh, trace


def _most_sent(layout: ResolvedLayout, mesh: Mesh) -> int:
    """Messages between pipeline stages that NCCL and RCCL hold at a time: a round of micro-batches each way of a stage."""
    return layout.pp * sum(sum(from_other_ranks(layout, mesh.pp.rank, way)) for way in (-1, 1))
