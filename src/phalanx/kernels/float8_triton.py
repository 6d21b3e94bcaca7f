"""The Triton kernels behind `kernels.float8`; import only where Triton is installed.

Quantisation is bound by memory: a program reads a tile once and writes it in 8 bits as it is, transposed, or both. A tile is
as wide as a block of block-wise scaling, whose scales it finds by itself; other scales are given.

A transposed tile is quantised by itself, with a factor that is loaded for it: made from the same tile of 8 bits as what is
stored in order, its numbers were wrong on an H100 (Triton 3.6).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.float8 import LEAST, SCALE_BITS

TILE = 128
"""Rows and columns of a tile: a block of block-wise scaling."""
QUANTISE_WARPS = 8
QUANTISE_TILES = (128, 128, 8)
"""Rows, columns and warps of a program that quantises with scales that are given."""
SWIGLU_ROWS, SWIGLU_WARPS = 32, 4
"""Rows and warps of a tile of gated products, which is one group of gate and up features wide."""
SWIGLU_TILES = (32, 64, 4)
"""Rows, columns and warps of a tile that is quantised; of groups that have fewer features it has as many columns."""
FLAT_TILE, FLAT_WARPS, FLAT_PROGRAMS = 4096, 8, 1024
"""Numbers that a program quantises at a time where their order does not matter, its warps, and programs at most."""
PRODUCT_TILES = (128, 128, 128)
"""Rows of a, rows of b, and numbers of each that a program multiplies at a time: a block."""
PRODUCT_WARPS, PRODUCT_STAGES = 8, 3
PRODUCT_GROUP = 8
"""Tiles of rows whose programs follow each other, so that they find their operands in the cache."""


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(amax: tl.tensor, LEAST: tl.constexpr, CARRY: tl.constexpr, SHIFT: tl.constexpr) -> tl.tensor:
    """Do as `kernels.float8.power_of_two_scale`, for finite numbers."""
    bits = tl.maximum(amax, LEAST).to(tl.int32, bitcast=True)
    return (((bits + CARRY) & 0x7F800000) - SHIFT).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def quantise_kernel(
    x: tl.tensor,
    scale: tl.tensor,
    column_scale: tl.tensor,
    q: tl.tensor,
    q_t: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    """One tile of x [rows, columns], divided by one scale or, BY_ROW, by those of its rows and of its columns."""
    tiles = tl.cdiv(columns, TILE_C)
    row = (tl.program_id(0) // tiles) * TILE_R + tl.arange(0, TILE_R)
    column = (tl.program_id(0) % tiles) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # Whole tensors have more elements than 32 bits count.
    value = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.bfloat16).to(tl.float32)
    if ROWS:
        if BY_ROW:
            factor = tl.div_rn(1.0, tl.load(scale + row, mask=row < rows, other=1.0))[:, None]
        else:
            factor = tl.div_rn(1.0, tl.load(scale))
        place = q + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, (value * factor).to(q.dtype.element_ty), mask=inside)
    if COLUMNS:
        if BY_ROW:
            other = tl.div_rn(1.0, tl.load(column_scale + column, mask=column < columns, other=1.0))[None, :]
        else:
            other = tl.div_rn(1.0, tl.load(column_scale))
        place = q_t + column.to(tl.int64)[:, None] * rows + row[None, :]
        turned = tl.trans((value * other).to(q_t.dtype.element_ty))
        tl.store(place, turned, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def requantise_kernel(
    x: tl.tensor, scale: tl.tensor, present: tl.tensor, q: tl.tensor, n: tl.tensor, TILE: tl.constexpr
) -> None:
    """Write the `n` numbers of x divided by `scale`, unless `present` is that already.

    A program takes tiles as many apart as there are programs.
    """
    wanted = tl.load(scale)
    if wanted == tl.load(present):
        return
    factor = tl.div_rn(1.0, wanted)
    stride = tl.num_programs(0).to(tl.int64) * TILE
    for start in range(tl.program_id(0).to(tl.int64) * TILE, n, stride):
        place = start + tl.arange(0, TILE)
        value = tl.load(x + place, mask=place < n, other=0.0).to(tl.bfloat16).to(tl.float32)
        tl.store(q + place, (value * factor).to(q.dtype.element_ty), mask=place < n)


@triton.jit  # type: ignore[untyped-decorator]
def transpose_kernel(
    q: tl.tensor,
    scale: tl.tensor,
    column_scale: tl.tensor,
    q_t: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BY_ROW: tl.constexpr,
    MOST: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    """One tile of q [rows, columns] transposed. BY_ROW: brought from scales of its rows to those of its columns."""
    tiles = tl.cdiv(columns, TILE_C)
    row = (tl.program_id(0) // tiles) * TILE_R + tl.arange(0, TILE_R)
    column = (tl.program_id(0) % tiles) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(q + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    if BY_ROW:
        value *= tl.load(scale + row, mask=row < rows, other=1.0)[:, None]
        value *= tl.div_rn(1.0, tl.load(column_scale + column, mask=column < columns, other=1.0))[None, :]
        # By comparison: what is no number stays none.
        value = tl.where(value > MOST, MOST, tl.where(value < -MOST, -MOST, value))
    place = q_t + column.to(tl.int64)[:, None] * rows + row[None, :]
    turned = tl.trans(value.to(q_t.dtype.element_ty))
    tl.store(place, turned, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def quantise_blocks_kernel(
    x: tl.tensor,
    q: tl.tensor,
    scale: tl.tensor,
    q_t: tl.tensor,
    column_scale: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEAST: tl.constexpr,
    CARRY: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One tile of x [rows, columns]: a square block, or a block of each of its rows and of each of its columns."""
    across, down = tl.cdiv(columns, TILE), tl.cdiv(rows, TILE)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = tile_row * TILE + tl.arange(0, TILE), tile_column * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.bfloat16).to(tl.float32)
    size = tl.abs(value)
    if SQUARE:
        # Found twice, in two ways: numbers that are stored in two orders are each formed in the order that suits.
        by_row = scale_of(tl.max(tl.max(size, 1), 0), LEAST, CARRY, SHIFT)
        by_column = scale_of(tl.max(tl.max(size, 0), 0), LEAST, CARRY, SHIFT)
        if ROWS:
            tl.store(scale + tile_row * across + tile_column, by_row)
        if COLUMNS:
            tl.store(column_scale + tile_column * down + tile_row, by_column)
    else:
        of_row = scale_of(tl.max(size, 1), LEAST, CARRY, SHIFT)
        of_column = scale_of(tl.max(size, 0), LEAST, CARRY, SHIFT)
        by_row, by_column = of_row[:, None], of_column[None, :]
        if ROWS:
            tl.store(scale + row.to(tl.int64) * across + tile_column, of_row, mask=row < rows)
        if COLUMNS:
            tl.store(column_scale + column.to(tl.int64) * down + tile_row, of_column, mask=column < columns)
    if ROWS:
        place = q + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, (value * tl.div_rn(1.0, by_row)).to(q.dtype.element_ty), mask=inside)
    if COLUMNS:
        place = q_t + column.to(tl.int64)[:, None] * rows + row[None, :]
        turned = tl.trans((value * tl.div_rn(1.0, by_column)).to(q_t.dtype.element_ty))
        tl.store(place, turned, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def row_column_amax_kernel(
    x: tl.tensor,
    by_row: tl.tensor,
    by_column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write the largest sizes of the rows and of the columns of one tile.

    by_row: [tiles across, rows]. by_column: [tiles down, columns].
    """
    across = tl.cdiv(columns, TILE)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = tile_row * TILE + tl.arange(0, TILE), tile_column * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.bfloat16).to(tl.float32)
    size = tl.abs(value)
    tl.store(by_row + tile_column.to(tl.int64) * rows + row, tl.max(size, 1), mask=row < rows)
    tl.store(by_column + tile_row.to(tl.int64) * columns + column, tl.max(size, 0), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_gradients(
    grad_hidden: tl.tensor,
    gate_up: tl.tensor,
    row: tl.tensor,
    features: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Form the gradients of gate and up and their product, [rows of `row`, COLUMNS] each, of some features of one group."""
    group = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None]
    far = row.to(tl.int64)[:, None]
    gate_at = gate_up + far * (2 * features) + group * (2 * BLOCK) + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + BLOCK, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_hidden + far * features + group * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return grad * up * slope, grad * gate * sigmoid, gate * sigmoid * up


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_gradient_amax_kernel(
    grad_hidden: tl.tensor,
    gate_up: tl.tensor,
    amax: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the largest size of TILE rows of one group into amax [groups, tiles of rows]."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    of_gate, of_up, _ = swiglu_gradients(grad_hidden, gate_up, row, features, rows, BLOCK, BLOCK)
    largest = tl.max(tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up)), 1), 0)
    # Of the numbers as they are rounded before they are quantised.
    largest = largest.to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(amax + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), largest)


@triton.jit  # type: ignore[untyped-decorator]
def quantise_swiglu_gradient_kernel(
    grad_hidden: tl.tensor,
    gate_up: tl.tensor,
    scale: tl.tensor,
    same_scale: tl.tensor,
    hidden_scale: tl.tensor,
    q: tl.tensor,
    q_t: tl.tensor,
    hidden_t: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write TILE rows of gradients of some features in 8 bits, as they are and transposed, and of their product, transposed.

    same_scale: `scale` once more, so that no compiler takes the two quantisations for one.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    of_gate, of_up, hidden = swiglu_gradients(grad_hidden, gate_up, row, features, rows, BLOCK, COLUMNS)
    narrow = gate_up.dtype.element_ty
    kind = q.dtype.element_ty
    # Rounded to 16 bits first, as a gradient that lies in memory is: tiles change their order in that format.
    of_gate, of_up = of_gate.to(narrow).to(tl.float32), of_up.to(narrow).to(tl.float32)
    inner = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.program_id(1) * (2 * BLOCK) + inner
    factor = tl.div_rn(1.0, tl.load(scale))
    place = q + row.to(tl.int64)[:, None] * (2 * features) + column[None, :]
    tl.store(place, (of_gate * factor).to(kind), mask=(row < rows)[:, None])
    tl.store(place + BLOCK, (of_up * factor).to(kind), mask=(row < rows)[:, None])
    other = tl.div_rn(1.0, tl.load(same_scale))
    turned = q_t + column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(turned, tl.trans((of_gate * other).to(kind)), mask=(row < rows)[None, :])
    turned += tl.cast(rows, tl.int64) * BLOCK
    tl.store(turned, tl.trans((of_up * other).to(kind)), mask=(row < rows)[None, :])
    hidden = hidden.to(narrow).to(tl.float32) * tl.div_rn(1.0, tl.load(hidden_scale))
    feature = tl.program_id(1) * BLOCK + inner
    place = hidden_t + feature.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(place, tl.trans(hidden.to(hidden_t.dtype.element_ty)), mask=(row < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def block_product_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    a_scale: tl.tensor,
    b_scale: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One tile of out [m, n] = a [m, k] b [n, k]^T. SQUARE: whether b has square blocks. EVEN: whether TILE_K divides k."""
    tiles_m, tiles_n, blocks = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), tl.cdiv(k, TILE_K)
    in_group = GROUP * tiles_n
    first = (tl.program_id(0) // in_group) * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + (tl.program_id(0) % in_group) % high
    tile_n = (tl.program_id(0) % in_group) // high
    row, column = tile_m * TILE_M + tl.arange(0, TILE_M), tile_n * TILE_N + tl.arange(0, TILE_N)
    # What is read behind the last row is some other row, and not written.
    read_row, read_column = (row % m).to(tl.int64), (column % n).to(tl.int64)
    along = tl.arange(0, TILE_K)
    a_at = a + read_row[:, None] * k + along[None, :]
    b_at = b + read_column[None, :] * k + along[:, None]
    a_scale_at = a_scale + read_row * blocks
    if SQUARE:
        b_scale_at = b_scale + tile_n * blocks
    else:
        b_scale_at = b_scale + read_column * blocks
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for block in range(blocks):
        if EVEN:
            a_tile, b_tile = tl.load(a_at), tl.load(b_at)
        else:
            left = k - block * TILE_K
            a_tile = tl.load(a_at, mask=(along < left)[None, :], other=0.0)
            b_tile = tl.load(b_at, mask=(along < left)[:, None], other=0.0)
        part = tl.dot(a_tile, b_tile)
        if SQUARE:
            total += part * (tl.load(a_scale_at + block) * tl.load(b_scale_at + block))[:, None]
        else:
            total += part * tl.load(a_scale_at + block)[:, None] * tl.load(b_scale_at + block)[None, :]
        a_at += TILE_K
        b_at += TILE_K
    place = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def run_quantise(x_NI: Tensor, scale: Tensor, column_scale: Tensor, q_NI: Tensor, q_IN: Tensor) -> None:
    """Do as `kernels.float8.quantise_reference` into `q_NI` and `q_IN`, of which either may be empty."""
    rows, columns = x_NI.shape
    tile_r, tile_c, warps = QUANTISE_TILES
    with torch.cuda.device(x_NI.device):
        quantise_kernel[(triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)](
            x_NI,
            scale.contiguous(),
            column_scale.contiguous(),
            q_NI,
            q_IN,
            rows,
            columns,
            BY_ROW=scale.numel() > 1 or column_scale.numel() > 1,
            ROWS=q_NI.numel() > 0,
            COLUMNS=q_IN.numel() > 0,
            TILE_R=tile_r,
            TILE_C=tile_c,
            num_warps=warps,
        )


def run_requantise(x: Tensor, scale: Tensor, present: Tensor, q: Tensor) -> None:
    """Do as `kernels.float8.requantise_reference`, for contiguous tensors of a CUDA or ROCm device."""
    n = x.numel()
    with torch.cuda.device(x.device):
        # Few programs: most often each has but to look whether there is anything to do.
        requantise_kernel[(min(triton.cdiv(n, FLAT_TILE), FLAT_PROGRAMS),)](
            x, scale, present, q, n, TILE=FLAT_TILE, num_warps=FLAT_WARPS
        )


def run_transpose(q_OI: Tensor, scale: Tensor | None, column_scale: Tensor | None, q_IO: Tensor) -> None:
    """Do as `kernels.float8.transpose_reference` into `q_IO`, for contiguous matrices of a CUDA or ROCm device."""
    rows, columns = q_OI.shape
    tile_r, tile_c, warps = QUANTISE_TILES
    with torch.cuda.device(q_OI.device):
        transpose_kernel[(triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)](
            q_OI,
            # Where there are no scales, whatever stands for them is not read.
            q_OI if scale is None else scale.contiguous(),
            q_OI if column_scale is None else column_scale.contiguous(),
            q_IO,
            rows,
            columns,
            BY_ROW=scale is not None,
            MOST=torch.finfo(q_OI.dtype).max,
            TILE_R=tile_r,
            TILE_C=tile_c,
            num_warps=warps,
        )


def run_quantise_blocks(
    x_NI: Tensor, q_NI: Tensor, scale: Tensor, q_IN: Tensor, column_scale: Tensor, square: bool
) -> None:
    """Do as `kernels.float8.quantise_blocks_reference` into the tensors given, of which either pair may be empty."""
    rows, columns = x_NI.shape
    how = SCALE_BITS[q_NI.dtype]
    with torch.cuda.device(x_NI.device):
        quantise_blocks_kernel[(triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)](
            x_NI,
            q_NI,
            scale,
            q_IN,
            column_scale,
            rows,
            columns,
            SQUARE=square,
            ROWS=q_NI.numel() > 0,
            COLUMNS=q_IN.numel() > 0,
            LEAST=LEAST,
            CARRY=how.carry,
            SHIFT=how.shift,
            TILE=TILE,
            num_warps=QUANTISE_WARPS,
        )


def run_row_column_amax(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `kernels.float8.row_column_amax_reference`, for contiguous tensors of a CUDA or ROCm device."""
    rows, columns = x_NI.shape
    across, down = triton.cdiv(columns, TILE), triton.cdiv(rows, TILE)
    by_row = x_NI.new_empty((across, rows), dtype=torch.float32)
    by_column = x_NI.new_empty((down, columns), dtype=torch.float32)
    with torch.cuda.device(x_NI.device):
        row_column_amax_kernel[(across * down,)](
            x_NI, by_row, by_column, rows, columns, TILE=TILE, num_warps=QUANTISE_WARPS
        )
    return by_row.amax(0), by_column.amax(0)


def run_swiglu_gradient_amax(grad_NF: Tensor, gate_up: Tensor, block: int) -> Tensor:
    """Do as `kernels.float8_swiglu.swiglu_gradient_amax`, for contiguous tensors of a CUDA or ROCm device."""
    rows, features = grad_NF.shape
    grid = (triton.cdiv(rows, SWIGLU_ROWS), features // block)
    amax = grad_NF.new_empty(grid, dtype=torch.float32)
    with torch.cuda.device(grad_NF.device):
        swiglu_gradient_amax_kernel[grid](
            grad_NF, gate_up, amax, rows, features, BLOCK=block, TILE=SWIGLU_ROWS, num_warps=SWIGLU_WARPS
        )
    return amax.amax().view(1)


def run_quantise_swiglu_gradient(
    grad_NF: Tensor,
    gate_up: Tensor,
    block: int,
    scale: Tensor,
    hidden_scale: Tensor,
    q: Tensor,
    q_t: Tensor,
    hidden_t: Tensor,
) -> None:
    """Do as `kernels.float8_swiglu.quantise_swiglu_gradient` into the last three."""
    rows, features = grad_NF.shape
    tile, columns, warps = SWIGLU_TILES
    columns = min(columns, block)
    with torch.cuda.device(grad_NF.device):
        quantise_swiglu_gradient_kernel[(triton.cdiv(rows, tile), features // block, block // columns)](
            grad_NF,
            gate_up,
            scale,
            scale,
            hidden_scale,
            q,
            q_t,
            hidden_t,
            rows,
            features,
            BLOCK=block,
            TILE=tile,
            COLUMNS=columns,
            num_warps=warps,
        )


def run_block_product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Do as `kernels.float8.block_product_reference`, for contiguous matrices of a CUDA or ROCm device."""
    (m, k), n = a_MK.shape, b_NK.shape[0]
    out_MN = a_MK.new_empty((m, n), dtype=dtype)
    tile_m, tile_n, tile_k = PRODUCT_TILES
    with torch.cuda.device(a_MK.device):
        block_product_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),)](
            a_MK,
            b_NK,
            out_MN,
            a_scale,
            b_scale,
            m,
            n,
            k,
            SQUARE=b_scale.shape[0] != n,
            EVEN=k % tile_k == 0,
            TILE_M=tile_m,
            TILE_N=tile_n,
            TILE_K=tile_k,
            GROUP=PRODUCT_GROUP,
            num_warps=PRODUCT_WARPS,
            num_stages=PRODUCT_STAGES,
        )
    return out_MN
