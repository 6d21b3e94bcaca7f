"""Activation recompute: which results of a block's forward pass are kept for its backward pass.

`selective` keeps the costly results (attention, and every matmul that does not widen its input by more than half) and
computes the rest again: norms, activations and the wide MLP product, which holds most of the memory. `full` keeps only
the block's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.kernels.flash4 import FLASH4_FORWARD
from phalanx.kernels.float8 import BLOCK_PRODUCT, SCALED_PRODUCT
from phalanx.layout.context_parallel.ring_attention import RING_ATTENTION
from phalanx.layout.layout_model import LayoutModel, Stage
from phalanx.layout.spec import Recompute, ResolvedLayout
from phalanx.torch_compat import common as compat

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    RING_ATTENTION,
    FLASH4_FORWARD,
}
_MATMUL = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Matmul operations and the position of their [N, in] argument."""
_PASSES = 4
"""Programs of a block for samples of one shape at most, as of training and of evaluation."""
_TRANSPOSED = (SCALED_PRODUCT, BLOCK_PRODUCT)
"""Products of 8-bit numbers, whose second argument is [out, in]."""


def recompute_stage(stage: Stage, mode: Recompute) -> None:
    """Make each block of `stage` recompute its activations as `mode` says, unless the model sees to that itself."""
    if not stage.recomputes:
        for block in stage.part.blocks:
            recompute_block(block, mode)


def recompute_block(block: nn.Module, mode: Recompute) -> None:
    """Make `block` recompute its activations as `mode` says. Keeps the module and its parameter names as they are."""
    if mode != "none":
        # A class for all blocks, not a method of each: equal blocks then share one compiled program.
        kind: Any = type(block)
        block.__class__ = _recomputed_class(kind, mode)


def recompute_policy(mode: Recompute) -> Callable[[Any, Sequence[Any]], CheckpointPolicy] | None:
    """Return what decides, in a compiled block, about an operation and its arguments; None where nothing is recomputed."""
    if mode == "none":
        return None
    if mode == "selective":
        return lambda operation, arguments: _choose_policy(None, operation, *arguments)
    return _recompute_all


@cache
def _recomputed_class(kind: Any, mode: Recompute) -> Any:
    # Dropout is a function of counters, not of generator state: there is none to save and restore.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    policy = _choose_policy if mode == "selective" else _recompute_all
    chosen = options | {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    # The block's own forward, by its class: through the instance this one would call itself.
    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        # Compilers of PyTorch 2.11 keep what functions with gradients of their own compute, unless each operation is told.
        # Not compiled, a whole recompute needs nobody to look at operations, which takes the host time.
        told = mode == "selective" or torch.compiler.is_compiling()
        return checkpoint(kind.forward, self, *args, **(chosen if told else options), **named)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward})


def _recompute_all(*_: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _choose_policy(_context: Any, operation: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operation in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if operation in _MATMUL:
        return _save_unless_wide(*args[_MATMUL[operation] + 1].shape)
    if operation in _TRANSPOSED:
        return _save_unless_wide(*reversed(args[1].shape))
    return CheckpointPolicy.PREFER_RECOMPUTE


def _save_unless_wide(in_features: int, out_features: int) -> CheckpointPolicy:
    # What widens its input is cheap to compute for the memory that its result takes.
    return CheckpointPolicy.PREFER_RECOMPUTE if out_features > 1.5 * in_features else CheckpointPolicy.MUST_SAVE


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
    compile_blocks(stage.part.blocks, stage.part.dtype, stage.sample_shapes)
    if stage.part.part.last:
        stage.compile_loss()


def compile_blocks(blocks: Iterable[nn.Module], dtype: torch.dtype, shapes: int = 1) -> None:
    """Compile each block by itself when it first runs. dtype: of its activations. shapes: that these come in."""
    compat.keep_float32_products()
    compat.allow_programs(_PASSES * shapes)
    for block in blocks:
        # Of a second shape PyTorch would make one program for all shapes, whose kernels know no sizes.
        block.compile(options=compat.compile_options(dtype), dynamic=False if shapes > 1 else None)
