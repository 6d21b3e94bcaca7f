"""From a run and its layout to a model on this rank's device, ready to train. The whole order, on one screen.

1. Build on meta: nothing is allocated, whatever the size of the model.
2. Recompute: inside compilation, so that the compiler sees what is kept.
3. Compile: each block by itself; equal blocks share one compiled program.
4. Shard: outside compilation, so that gathers stay outside the compiled programs.
5. Allocate only this rank's shards, then fill them: every value is a function of seed, name and global index alone.
6. On a rank that holds whole parameters, compute in a low-precision copy of the float32 masters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.config.schema import Run
from phalanx.layout.attention import AttentionChoice
from phalanx.layout.init import initialise_parameters
from phalanx.layout.recompute import recompute_block
from phalanx.layout.shard import shard_model
from phalanx.layout.working_copy import WorkingCopy
from phalanx.models.language.declare import initial_rules
from phalanx.models.language.decoder import Decoder

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Format of activations and matmuls for each `layout.precision`."""


@dataclass(frozen=True)
class Applied:
    """A model laid out on this rank."""

    model: Decoder
    """Runs forward and backward."""
    masters: Decoder
    """Holds the parameters that are initialised, updated and saved, and their gradients; often `model` itself."""
    working_copy: WorkingCopy | None = None
    """Joins the two where they differ."""

    def refresh(self) -> None:
        """Let `model` see the present masters."""
        if self.working_copy is not None:
            self.working_copy.refresh()


def apply_layout(run: Run, mesh: DeviceMesh | None, device: torch.device, attention: AttentionChoice) -> Applied:
    """The model of `run` on this rank, over `mesh` (None: one rank), initialised."""
    dtype = PRECISIONS[run.layout.precision]
    master_dtype = torch.promote_types(dtype, torch.float32)
    copied = mesh is None and dtype != master_dtype
    model = _build(run, device, attention, dtype if copied else master_dtype)
    masters = _build(run, device, attention, master_dtype) if copied else model
    blocks: list[nn.Module] = list(model.blocks)
    for block in blocks:
        recompute_block(block, run.layout.recompute)
    if compiles(run, device):
        for block in blocks:
            block.compile()
        model.head.loss_kernel = torch.compile(model.head.loss_kernel)
    if mesh is not None:
        shard_model(model, blocks, mesh, dtype, reshard_after_forward=run.layout.reshard_after_forward)
    masters.to_empty(device=device)
    initialise_parameters(masters, initial_rules(run.model), run.training.seed)
    if not copied:
        return Applied(model, masters)
    model.to_empty(device=device)
    applied = Applied(model, masters, WorkingCopy(masters, model))
    applied.refresh()
    return applied


def _build(run: Run, device: torch.device, attention: AttentionChoice, parameter_dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        model = Decoder(
            run.model,
            dtype=PRECISIONS[run.layout.precision],
            kernel=attention.kernel,
            chunk_tokens=loss_chunk_tokens(run, device),
            z_loss=run.training.z_loss,
        )
    return model.to(parameter_dtype)


def compiles(run: Run, device: torch.device) -> bool:
    """Whether blocks are compiled: as the run file says, and for `auto` on accelerators only."""
    return device.type != "cpu" if run.training.compile == "auto" else run.training.compile


def loss_chunk_tokens(run: Run, device: torch.device) -> int:
    """Tokens whose logits are held at once; `auto` keeps a chunk's logits near 2^29 elements (2^24 on the CPU)."""
    if run.training.loss_chunk_tokens != "auto":
        return run.training.loss_chunk_tokens
    elements = 2**24 if device.type == "cpu" else 2**29
    return max(128, elements // run.model.vocab_size // 128 * 128)
