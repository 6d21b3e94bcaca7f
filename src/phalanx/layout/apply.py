"""From a run and its layout to a model on this rank's device, ready to train. The whole order, on one screen.

1. Build on meta: nothing is allocated, whatever the size of the model.
2. Recompute: inside compilation, so that the compiler sees what is kept.
3. Compile: each block by itself; equal blocks share one compiled program.
4. Shard: outside compilation, so that gathers stay outside the compiled programs.
5. Allocate only this rank's shards, then fill them: every value is a function of seed, name and global index alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.config.schema import Run
from phalanx.layout.attention import AttentionChoice
from phalanx.layout.init import initialise_parameters
from phalanx.layout.recompute import recompute_block
from phalanx.layout.shard import shard_model
from phalanx.models.language.declare import initial_rules
from phalanx.models.language.decoder import Decoder

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Format of activations and matmuls for each `layout.precision`."""


def apply_layout(
    run: Run, mesh: DeviceMesh | None, device: torch.device, attention: AttentionChoice, *, initialise: bool = True
) -> Decoder:
    """The model of `run` on this rank: built, recomputing, compiled, sharded over `mesh` (None: one rank), initialised.

    initialise: False leaves the parameters unset, for a checkpoint to fill.
    """
    dtype = PRECISIONS[run.layout.precision]
    with torch.device("meta"):
        model = Decoder(
            run.model,
            dtype=dtype,
            kernel=attention.kernel,
            chunk_tokens=loss_chunk_tokens(run, device),
            z_loss=run.training.z_loss,
        )
    blocks: list[nn.Module] = list(model.blocks)
    for block in blocks:
        recompute_block(block, run.layout.recompute)
    if compiles(run, device):
        for block in blocks:
            block.compile()
        model.head.loss_kernel = torch.compile(model.head.loss_kernel)
    master = torch.promote_types(dtype, torch.float32)
    model.to(master)
    if mesh is not None:
        shard_model(model, blocks, mesh, dtype, reshard_after_forward=run.layout.reshard_after_forward)
    model.to_empty(device=device)
    if initialise:
        initialise_parameters(model, initial_rules(run.model), run.training.seed)
    return model


def compiles(run: Run, device: torch.device) -> bool:
    """Whether blocks are compiled: as the run file says, and for `auto` on accelerators only."""
    return device.type != "cpu" if run.training.compile == "auto" else run.training.compile


def loss_chunk_tokens(run: Run, device: torch.device) -> int:
    """Tokens whose logits are held at once; `auto` keeps a chunk's logits near 2^29 elements (2^24 on the CPU)."""
    if run.training.loss_chunk_tokens != "auto":
        return run.training.loss_chunk_tokens
    elements = 2**24 if device.type == "cpu" else 2**29
    return max(128, elements // run.model.vocab_size // 128 * 128)
