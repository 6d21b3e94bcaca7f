"""What Transformer Engine runs in place of operations as we trace them: 8-bit numbers, experts and their biases.

Sources: NVIDIA/TransformerEngine@d0067d0d (and v1.0 where that is said), NVIDIA/Megatron-LM@d98e8a64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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


def without_weight_copies(operations: Sequence[Operation]) -> list[Operation]:
    """Return operations without the transposed copies of weights in 8 bits, which are made with the weights, once a step.

    Gradients of results are transposed for the weight's gradient, and go on being so.
    """
    kept: list[Operation] = []
    weight_bytes = 0
    for op in reversed(operations):
        if op.name == "transpose_quantised" and op.phase == "backward" and op.bytes_read == weight_bytes:
            weight_bytes = 0
            continue
        if op.matmul is not None:
            weight_bytes = 0 if op.weight_gradient else op.matmul.n * op.matmul.k * op.matmul.width
        kept.append(op)
    return kept[::-1]


def in_8_bits(op: Operation) -> list[Operation]:
    """Return a grouped product of 8-bit numbers, with the pass that makes them of its rows; other operations as they are.

    GroupedLinear makes two copies of its input, and of its result's gradient, in 8 bits: one for this product and one for
    the weights' gradient, which is summed along the other side (transformer_engine/pytorch/module/grouped_linear.py,
    `input_quantizer.set_usage(rowwise=True, columnwise=...)`).
    """
    product = op.matmul
    if product is None or not product.groups or product.width == 1:
        return [op]
    fewer = op.bytes_read * (product.width - 1) // product.width
    done = replace(op, matmul=replace(product, width=1), bytes_read=op.bytes_read - fewer)
    if op.weight_gradient:
        return [done]
    rows = product.m * product.k
    copied = replace(op, kind="copy", matmul=None, flops=0, bytes_read=rows * product.width, bytes_written=2 * rows)
    return [copied, done]


def attention_in_8_bits(op: Operation, exponentials: float) -> list[Operation]:
    """Return attention that multiplies 8-bit numbers, with the pass that makes them; other operations as they are.

    It makes two copies: of queries, keys and values, backward of the result's gradient
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py, `MXFP8Quantizer`). Products take half the time,
    exponentials as long as ever.

    exponentials: a clock and multiprocessor.
    """
    x = op.attention
    if x is None:
        return [op]
    values = x.value_size or x.head_size
    flops = 2 * (3 * x.head_size + 2 * values if x.backward else x.head_size + values)
    products, softmax = flops / _BLACKWELL_FLOPS, 1 / exponentials
    gain = max(products, softmax) / max(products / 2, softmax)
    read = x.samples * x.heads * x.queries * (values if x.backward else x.head_size)
    read += 0 if x.backward else x.samples * x.kv_heads * x.keys * (x.head_size + values)
    made = replace(op, kind="copy", attention=None, flops=0, bytes_read=read * x.width, bytes_written=2 * read)
    return [made, replace(op, attention=replace(x, seen=x.seen / gain))]


_BLACKWELL_FLOPS = 8192
"""16-bit operations of a Blackwell multiprocessor in a clock (FlashAttention-4, arXiv:2603.05451)."""


def with_8_bit_head(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations of a head whose products are those of 8-bit numbers (`fp8_output_proj`)."""
    return [replace(op, matmul=replace(op.matmul, width=1)) if op.matmul is not None else op for op in operations]


def with_fused_experts(operations: Sequence[Operation]) -> list[Operation]:
    """Return operations without the passes between the two products of an expert, forward and backward.

    One kernel multiplies, applies the activation function and writes the next product's numbers in 8 bits
    (transformer_engine/pytorch/ops/fused/grouped_mlp.py).
    """
    kept: list[Operation] = []
    inside = False
    for op in operations:
        if _multiplies_rows(op):
            inside = not inside
        elif inside and op.matmul is None and op.collective is None and op.kind in ("pointwise", "copy"):
            continue
        kept.append(op)
    return kept


def with_recomputed_activation(operations: Sequence[Operation]) -> list[Operation]:
    """Return operations that apply the activation function between experts' products again in the backward pass."""
    places = [place for place, op in enumerate(operations) if op.phase == "forward" and _multiplies_rows(op)]
    if not places:
        return list(operations)
    between = [op for op in operations[places[0] : places[1]] if op.kind == "pointwise"]
    return [*operations, *(replace(op, phase="recompute") for op in between)]


def with_expert_biases(operations: Sequence[Operation], *, wide_probabilities: bool) -> list[Operation]:
    """Return operations with the passes that clamp what the activation function gets, and that add experts' last biases.

    Both are single PyTorch operations, the latter expert by expert, in the format of the router's probabilities
    (Megatron-LM, megatron/core/fusions/fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`;
    megatron/core/transformer/moe/experts.py, `_apply_bias`). First biases, and their gradients, are part of products.

    wide_probabilities: whether these are 32-bit numbers.
    """
    found: list[Operation] = []
    products = [op for op in operations if _multiplies_rows(op)]
    for op in operations:
        place = next((number for number, one in enumerate(products) if one is op), None)
        if place == 2:
            found += _biases(products[1], op, wide_probabilities)
        if place == 3:
            found += _clamps(products[0], op)
        found.append(op)
        if place == 0:
            found += _clamps(op, op)
        if place == 1:
            found += _biases(op, op, wide_probabilities)
    return found


def _multiplies_rows(op: Operation) -> bool:
    return op.matmul is not None and op.matmul.groups > 0 and not op.weight_gradient


def _clamps(product: Operation, near: Operation) -> list[Operation]:
    """Return the passes that clamp the two halves of what `product` writes, and join them, in the pass of `near`."""
    assert product.matmul is not None
    half = product.matmul.m * product.matmul.n
    read = half if near.phase == "forward" else 2 * half
    return [_pass(near, read, half), _pass(near, read, half), _pass(near, 2 * half, 2 * half)]


def _biases(product: Operation, near: Operation, wide: bool) -> list[Operation]:
    """Return the passes that add bias times probability to what `product` writes, in the pass of `near`."""
    assert product.matmul is not None
    groups, every = product.matmul.groups, product.matmul.m * product.matmul.n
    one, width = every // groups, 4 if wide else 2

    def each(read: int, written: int) -> Operation:
        return replace(_pass(near, read * one, written * one), times=groups)

    if near.phase == "forward":
        found = [each(0, width), each(2 + width, width), _pass(near, width * every, width * every)]
        return found + [_pass(near, 4 * every, 2 * every)] * wide
    casts = [_pass(near, 2 * every, 4 * every), each(4, 2)] * wide
    # Gradients of bias and of probability are a product and a sum each; those of rows are joined again.
    return [*casts, *[each(width, width), each(width, 0)] * 2, _pass(near, 2 * every, 2 * every)]


def _pass(near: Operation, read: int, written: int) -> Operation:
    one = replace(near, name="pass", kind="pointwise", matmul=None, flops=0)
    return replace(one, bytes_read=read, bytes_written=written)
