"""Matrices in 8-bit floating point (Micikevicius et al. 2022, arXiv:2209.05433): scales, quantisation, products.

A matrix is kept as 8-bit numbers and scales by which these are to be multiplied: one of the whole matrix, one a row, or one
a block. Every scale is a power of two. A number then keeps the same digits whatever its scale is, and only what is below
2^-14 of the largest loses some: results depend as little as possible on which numbers share a scale, multiplying by it is
exact, and nothing is lost in accuracy, since floating-point numbers are as accurate at any size.

Numbers are rounded to bfloat16 first, whatever format they come in: a main parameter then gives what its copy in the
format of the activations gives, which other ranks may have gathered.

A product of the tensor cores reads both its operands along the dim that is summed over. The backward pass sums over other
dims than the forward pass, so that it needs the transposed of each operand: written in the same pass as the operand itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import kernels_for
from phalanx.torch_compat import common as compat

BLOCK = 128
"""Numbers along one dim that share a scale in the kernels of block-wise scaling (DeepSeek-V3, arXiv:2412.19437, 3.3)."""
LEAST = 2.0**-100
"""Largest number of what counts as zero: its scale is still a normal float32 number."""
ALIGNMENT = 16
"""Bytes that matrix products in 8 bits want the rows of their operands to be multiples of."""


@dataclass(frozen=True)
class ScaleBits:
    """How the scale of a largest number follows from its bits as a float32."""

    carry: int
    """What, added to the bits, raises the exponent where the digits are larger than those of the format's maximum."""
    shift: int
    """What is subtracted then: the exponent of the format's maximum."""


def _bits_of(most: float) -> ScaleBits:
    digits, exponent = math.frexp(most)
    return ScaleBits(0x7FFFFF - int((2 * digits - 1) * 2**23), (exponent - 1) << 23)


_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# A table: compilers trace what is looked up, and not how it is computed.
SCALE_BITS = {dtype: _bits_of(torch.finfo(dtype).max) for dtype in _FORMATS}
"""How scales for numbers of each 8-bit format are formed."""


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest powers of two that, divided by, bring numbers of size `amax` into the range of `dtype`.

    amax: largest absolute values; the scales are float32 of its shape. NaN where a largest value is infinite or NaN, so
    that what was computed with it is not taken for numbers.
    """
    # By integers: a quotient is rounded differently by each device, and a scale must be the same on all of them.
    how = SCALE_BITS[dtype]
    bits = amax.float().clamp(min=LEAST).view(torch.int32)
    scale = (((bits + how.carry) & 0x7F800000) - how.shift).view(torch.float32)
    return torch.where(amax.float() < torch.inf, scale, torch.nan)


# --- quantisation -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("phalanx::quantise", mutates_args=())
def quantise(
    x_NI: Tensor,
    scale: Tensor,
    column_scale: Tensor,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x divided by `scale`, [N, I], and the transposed of x divided by `column_scale`, [I, N], both in `dtype`.

    scale, column_scale: float32 [1], or [N] and [I]. rows, columns: whether each of the two is wanted; else it is empty.
    after: a tensor that is there before: else a compiler may do in the forward pass, and keep, what the backward pass asks
    for.
    """
    kernel = kernels_for(x_NI, "float8_triton")
    if kernel is None or not _kernel_takes(x_NI):
        return quantise_reference(x_NI, scale, column_scale, dtype, rows, columns)
    pair = _empty_pair(x_NI, dtype, rows, columns)
    kernel.run_quantise(x_NI.contiguous(), scale, column_scale, *pair)
    return pair


@quantise.register_fake
def _(
    x_NI: Tensor, _s: Tensor, _c: Tensor, dtype: torch.dtype, rows: bool, columns: bool, *_: object
) -> tuple[Tensor, Tensor]:
    return _empty_pair(x_NI, dtype, rows, columns)


def quantise_reference(
    x_NI: Tensor, scale: Tensor, column_scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Do as `quantise` in plain PyTorch, for every device and format."""
    q_NI, q_IN = _empty_pair(x_NI, dtype, rows, columns)
    wide_NI = x_NI.bfloat16().to(torch.promote_types(x_NI.dtype, torch.float32))
    if rows:
        q_NI.copy_(wide_NI / scale.view(-1, 1))
    if columns:
        q_IN.copy_(wide_NI.t() / column_scale.view(-1, 1))
    return q_NI, q_IN


@dataclass(frozen=True)
class QuantisedCopy:
    """A parameter in 8 bits with one scale, which the optimizer may write as it updates the parameter.

    It then divides by the scale that is there, which is right as long as it suits the numbers written: `renew` sees to that.
    """

    q: Tensor
    """Like the part of the parameter that this rank holds."""
    scale: Tensor
    """What `q` is to be multiplied by, float32 [1]; NaN where `q` holds nothing yet."""
    amax: Tensor
    """Largest size of a number of that part, float32 [1]."""

    @classmethod
    def empty(cls, q: Tensor) -> QuantisedCopy:
        """Return a copy that is to be written into `q`."""
        # A rank may hold no row.
        return cls(q, torch.full((1,), torch.nan, device=q.device), torch.zeros(1, device=q.device))

    def renew(self, parameter: Tensor, scale: Tensor) -> None:
        """Let the copy be `parameter` by `scale`, float32 [1], where the scale of what is there differs."""
        if parameter.numel():
            requantise(parameter, scale, self.scale, self.q)
        self.scale.copy_(scale)


def measure_copies(parameters: Sequence[Tensor], copies: Sequence[QuantisedCopy], written: Collection[Tensor]) -> None:
    """Find the largest size in each parameter of whose copy no optimizer has `written` the numbers, and this with them."""
    # By identity: tensors compare element by element.
    done = {id(q) for q in written}
    stale = [
        (x, copy) for x, copy in zip(parameters, copies, strict=True) if id(copy.q) not in done and copy.q.numel() > 0
    ]
    if stale:
        found = torch._foreach_norm([x for x, _ in stale], torch.inf)
        torch._foreach_copy_([copy.amax for _, copy in stale], [amax.view(1) for amax in found])
        # What is there are other numbers.
        torch._foreach_mul_([copy.scale for _, copy in stale], torch.nan)


@torch.library.custom_op("phalanx::requantise", mutates_args=("q",))
def requantise(x: Tensor, scale: Tensor, present: Tensor, q: Tensor) -> None:
    """Write x divided by `scale` into `q`, as `quantise` does, unless `present` is `scale`; both float32 [1].

    A device looks for itself which it is: the host does not wait for it.
    """
    kernel = kernels_for(x, "float8_triton")
    if kernel is None or not (_kernel_takes(x) and x.is_contiguous() and q.is_contiguous()):
        requantise_reference(x, scale, present, q)
    else:
        kernel.run_requantise(x, scale, present, q)


@requantise.register_fake
def _(x: Tensor, scale: Tensor, present: Tensor, q: Tensor) -> None:
    return None


def requantise_reference(x: Tensor, scale: Tensor, present: Tensor, q: Tensor) -> None:
    """Do as `requantise` in plain PyTorch, for every device and format."""
    if not torch.equal(scale, present):
        q.copy_(quantise_reference(x, scale, scale, q.dtype, True, False)[0])


@torch.library.custom_op("phalanx::transpose_quantised", mutates_args=())
def transpose_quantised(
    q_OI: Tensor, scale: Tensor | None, column_scale: Tensor | None, after: Tensor | None = None
) -> Tensor:
    """Return the transposed of a matrix in 8 bits, [I, O]: its numbers as they are, or brought to other scales.

    scale: what rows are multiplied by, float32 [O]. column_scale: what rows of the transposed will be, [I]; numbers that
    rounding made too large for these become the largest of the format. None for both leaves the numbers alone. after: see
    `quantise`.
    """
    kernel = kernels_for(q_OI, "float8_triton")
    if kernel is None or not q_OI.numel():
        return transpose_reference(q_OI, scale, column_scale)
    q_IO = q_OI.new_empty(q_OI.shape[::-1])
    kernel.run_transpose(q_OI.contiguous(), scale, column_scale, q_IO)
    return q_IO


@transpose_quantised.register_fake
def _(q_OI: Tensor, scale: Tensor | None, column_scale: Tensor | None, after: Tensor | None = None) -> Tensor:
    return q_OI.new_empty(q_OI.shape[::-1])


def transpose_reference(q_OI: Tensor, scale: Tensor | None, column_scale: Tensor | None) -> Tensor:
    """Do as `transpose_quantised` in plain PyTorch, for every device and format."""
    if scale is None or column_scale is None:
        return q_OI.view(torch.uint8).t().contiguous().view(q_OI.dtype)
    most = torch.finfo(q_OI.dtype).max
    turned_IO = q_OI.float().mul(scale.view(-1, 1)).div(column_scale).clamp(-most, most).t()
    return turned_IO.contiguous().to(q_OI.dtype)


@torch.library.custom_op("phalanx::quantise_blocks", mutates_args=())
def quantise_blocks(
    x_NI: Tensor,
    dtype: torch.dtype,
    block: int,
    square: bool,
    rows: bool,
    columns: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x [N, I] with a scale for each block, and the transposed of x [I, N] likewise: numbers, scales, both again.

    Blocks are `block` numbers of a row; of x as scales [N, I / block], of the transposed as [I, N / block], rounded up.
    square: blocks are `block` rows of as many numbers, the same of x and of the transposed. rows, columns, after: see
    `quantise`.
    """
    kernel = kernels_for(x_NI, "float8_triton")
    if kernel is None or block != BLOCK or not _kernel_takes(x_NI):
        return quantise_blocks_reference(x_NI, dtype, block, square, rows, columns)
    four = _empty_blocks(x_NI, dtype, block, square, rows, columns)
    kernel.run_quantise_blocks(x_NI.contiguous(), *four, square)
    return four


@quantise_blocks.register_fake
def _(
    x_NI: Tensor, dtype: torch.dtype, block: int, square: bool, rows: bool, columns: bool, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_blocks(x_NI, dtype, block, square, rows, columns)


def quantise_blocks_reference(
    x_NI: Tensor, dtype: torch.dtype, block: int, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as `quantise_blocks` in plain PyTorch, for every device and format."""
    four = _empty_blocks(x_NI, dtype, block, square, rows, columns)
    for wanted, matrix, q, scales in ((rows, x_NI, *four[:2]), (columns, x_NI.t(), *four[2:])):
        if wanted:
            wide = matrix.bfloat16().to(torch.promote_types(matrix.dtype, torch.float32))
            amax = _pad(wide.abs(), block if square else 1, block)
            amax = amax.unflatten(1, (-1, block)).amax(-1)
            if square:
                amax = amax.unflatten(0, (-1, block)).amax(1)
            scales.copy_(power_of_two_scale(amax, dtype))
            q.copy_(wide / _spread(scales, block, *matrix.shape))
    return four


def quantise_with_blocks(x_NI: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x divided by given scales of square blocks, [N / BLOCK, I / BLOCK] rounded up, in `dtype`: [N, I]."""
    wide = x_NI.bfloat16().to(torch.promote_types(x_NI.dtype, torch.float32))
    return (wide / _spread(scales, BLOCK, *x_NI.shape)).to(dtype)


def _empty_pair(x_NI: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    count, width = x_NI.shape
    return (
        x_NI.new_empty((count, width) if rows else (0, width), dtype=dtype),
        x_NI.new_empty((width, count) if columns else (0, count), dtype=dtype),
    )


def _empty_blocks(
    x_NI: Tensor, dtype: torch.dtype, block: int, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_NI, q_IN = _empty_pair(x_NI, dtype, rows, columns)
    scales = []
    for wanted, (count, width) in ((rows, x_NI.shape), (columns, x_NI.shape[::-1])):
        lines = (-(-count // block) if square else count) if wanted else 0
        scales.append(x_NI.new_empty((lines, -(-width // block)), dtype=torch.float32))
    return q_NI, scales[0], q_IN, scales[1]


@torch.library.custom_op("phalanx::row_column_amax", mutates_args=())
def row_column_amax(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest absolute value of each row, [N], and of each column, [I], of x in float32: one pass over x."""
    kernel = kernels_for(x_NI, "float8_triton")
    if kernel is None or not _kernel_takes(x_NI):
        return row_column_amax_reference(x_NI)
    result: tuple[Tensor, Tensor] = kernel.run_row_column_amax(x_NI.contiguous())
    return result


@row_column_amax.register_fake
def _(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x_NI.new_empty(size, dtype=torch.float32) for size in x_NI.shape)  # type: ignore[return-value]


def row_column_amax_reference(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `row_column_amax` in plain PyTorch, for every device and format."""
    size_NI = x_NI.bfloat16().abs()
    return size_NI.amax(1).float(), size_NI.amax(0).float()


# --- products -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("phalanx::scaled_product", mutates_args=())
def scaled_product(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return the product of a and the transposed b, both in 8 bits, each multiplied by its scales, [M, N] in `dtype`.

    Scales are float32 [1] of whole matrices, or [M] and [N] of rows. fast: whether tensor cores may add up in their own
    registers, which keep about 14 digits, all the way. On devices that multiply no 8-bit numbers, the CPU among them, the
    operands are brought back into a wide format first: the same numbers, added up more exactly.
    """
    by_row = a_scale.numel() > 1 or b_scale.numel() > 1
    if compat.float8_refusal(a_MK.device) or (by_row and dtype != torch.bfloat16):
        return product_reference(a_MK, b_NK, a_scale.view(-1, 1), b_scale.view(-1, 1), dtype)
    rows, columns = a_MK.shape[0], b_NK.shape[0]
    a, b = _pad_bytes(a_MK, 1, ALIGNMENT), _pad_bytes(b_NK, ALIGNMENT, ALIGNMENT)
    if by_row:
        a_scale = a_scale.expand(rows).contiguous().view(-1, 1)
        b_scale = F.pad(b_scale.expand(columns), (0, b.shape[0] - columns), value=1.0).view(1, -1)
    else:
        a_scale, b_scale = a_scale.view(()), b_scale.view(())
    product = torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
    return product if product.shape[1] == columns else product[:, :columns].contiguous()


@scaled_product.register_fake
def _(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=dtype)


def scaled_product_into(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, out_MN: Tensor, fast: bool
) -> None:
    """Fill `out`, contiguous, with the `scaled_product` of whole matrices' scales in its format."""
    aligned = not (a_MK.shape[1] % ALIGNMENT or b_NK.shape[0] % ALIGNMENT)
    if aligned and not compat.float8_refusal(a_MK.device):
        scales = a_scale.view(()), b_scale.view(())
        torch._scaled_mm(a_MK, b_NK.t(), *scales, out_dtype=out_MN.dtype, use_fast_accum=fast, out=out_MN)
    else:
        out_MN.copy_(scaled_product(a_MK, b_NK, a_scale, b_scale, out_MN.dtype, fast))


SCALED_PRODUCT = torch.ops.phalanx.scaled_product.default
"""The operation itself, as cost models and recomputation see it."""


@torch.library.custom_op("phalanx::block_product", mutates_args=())
def block_product(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, block: int
) -> Tensor:
    """Return the product of a and the transposed b, both in 8 bits with scales of blocks, [M, N] in `dtype`.

    a_scale: [M, K / block]. b_scale: [N, K / block], or [N / block, K / block] of square blocks; all rounded up. Partial
    sums over `block` numbers are scaled and added up in float32.
    """
    kernel = kernels_for(a_MK, "float8_triton")
    known = block == BLOCK and dtype in (torch.bfloat16, torch.float16, torch.float32)
    if kernel is None or not known or compat.float8_refusal(a_MK.device):
        return block_product_reference(a_MK, b_NK, a_scale, b_scale, dtype, block)
    # A row that begins between two words of memory could not be read in words.
    a, b = _pad_bytes(a_MK, 1, ALIGNMENT), _pad_bytes(b_NK, 1, ALIGNMENT)
    result: Tensor = kernel.run_block_product(a, b, a_scale, b_scale, dtype)
    return result


@block_product.register_fake
def _(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=dtype)


BLOCK_PRODUCT = torch.ops.phalanx.block_product.default
"""The operation itself, as cost models and recomputation see it."""


def block_product_reference(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, block: int
) -> Tensor:
    """Do as `block_product` in plain PyTorch, for every device and format."""
    wide_a, wide_b = _spread(a_scale, block, *a_MK.shape), _spread(b_scale, block, *b_NK.shape)
    return product_reference(a_MK, b_NK, wide_a, wide_b, dtype)


def product_reference(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of a and the transposed b, multiplied by scales that are broadcast to them, in `dtype`.

    Computed in at least float32.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return ((a_MK.to(wide) * a_scale) @ (b_NK.to(wide) * b_scale).t()).to(dtype)


def _spread(scales: Tensor, block: int, count: int, width: int) -> Tensor:
    """Return scales of blocks for each number of a matrix [count, width]."""
    if scales.shape[0] != count:
        scales = scales.repeat_interleave(block, 0)[:count]
    return scales.repeat_interleave(block, 1)[:, :width]


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return `x` with zeros behind it until its dims are multiples of these."""
    more = (-x.shape[1] % columns, -x.shape[0] % rows)
    return F.pad(x, (0, more[0], 0, more[1])) if any(more) else x


def _pad_bytes(x: Tensor, rows: int, columns: int) -> Tensor:
    # Few operations know 8-bit floating point; zero is zero in any format.
    return _pad(x.view(torch.uint8), rows, columns).view(x.dtype)


def _kernel_takes(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.numel() > 0
