"""Compilation of blocks: which runs compile them, and how."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from phalanx.layout.family import LayoutModel
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.torch_compat import common as compat


def compiles_blocks(model: LayoutModel, layout: ResolvedLayout, device: torch.device) -> bool:
    """Return whether blocks are compiled: as the run file says; by `auto` on accelerators wherever the layout allows it.

    Streamed weights and gradients of inputs and weights apart both step into the backward pass of a block, which a compiled
    block runs as one program.
    """
    if not model.compiles_blocks:
        return False
    compiles = model.run.training.compile
    if compiles == "auto":
        whole = layout.gather == "layer" and not layout.splits_backward
        return device.type != "cpu" and whole
    return compiles


def compile_stage(stage: Stage) -> None:
    """Compile each block of `stage` by itself, and its loss if it has one; equal blocks share one compiled program."""
    compile_blocks(stage.part.blocks, stage.part.dtype)
    if stage.part.part.last:
        stage.compile_loss()


def compile_blocks(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Compile each block by itself when it first runs. dtype: of its activations."""
    compat.keep_float32_products()
    for block in blocks:
        block.compile(options=compat.compile_options(dtype))
