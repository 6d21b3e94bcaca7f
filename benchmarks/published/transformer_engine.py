"""What Transformer Engine runs in place of operations as we trace them: 8-bit numbers, experts and their biases.

Sources: NVIDIA/TransformerEngine@d0067d0d (and v1.0 where that is said), NVIDIA/Megatron-LM@d98e8a64.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.planner.trace.operations import Operation


def with_known_scales(operations: Sequence[Operation]) -> list[Operation]:
    """Return uncompiled operations whose 8-bit numbers are made by scales of steps before (delayed scaling).

    One kernel makes both copies of a tensor, finds its largest number for later, and sums a gradient up for the bias
    (v1.0: transformer_engine/common/transpose/cast_transpose_fusion.cu; pytorch/module/base.py, `grad_output_preprocess`).
    The bias is added where the product is written (pytorch/module/linear.py, `fp8_gemm`).
    """
    kept: list[Operation] = []
    for op in operations:
        before = kept[-1] if kept else op
        if op.name == "add" and before.name == "scaled_product" and op.bytes_read < 1.5 * before.bytes_written:
            # A bias: the residual would be read as well.
            continue
        if op.name == "quantise" and before.name == _SCALE[-1]:
            while kept.pop().name != _SCALE[0]:
                pass
            if op.phase == "backward" and kept and kept[-1].name == "sum":
                kept.pop()
        kept.append(op)
    return kept


_SCALE = ("abs", "where")
"""How the operations that find a tensor's scale begin and end."""
