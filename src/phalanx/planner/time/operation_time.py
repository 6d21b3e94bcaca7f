"""How long operations take on a device: arrays of what they are, and their seconds by a profile.

Matrix products: the rate of large ones, times how well the result's sides, its area and the sums' depth fill the device;
never faster than memory gives their data. Attention: the rate of long sequences, times how well length, head size and the
rows of queries fill it. Everything else is memory traffic. Any kernel takes a little more than its work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from phalanx.planner.time.profile import Profile
from phalanx.planner.time.timed_operations import Kind, correction
from phalanx.planner.trace.operations import Operation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class PartBreakdown(IntEnum):
    """Components of the time of a part of a model."""

    MATMUL = 0
    ATTENTION = 1
    MEMORY = 2
    TP = 3
    CP = 4
    HOST = 5
    """The device waits for the host to issue operations."""
    EP = 6
    """Rows on their way to experts and back, and the wait for how many they are."""


class Direction(IntEnum):
    """The pass an operation belongs to; recomputation belongs to the backward pass."""

    FORWARD = 0
    BACKWARD = 1


class Form(IntEnum):
    """What decides how long an operation takes."""

    TRAFFIC = 0
    """The bytes alone."""
    PRODUCT = 1
    ATTENTION = 2
    """A fused kernel, forward."""
    ATTENTION_BACKWARD = 3
    BIASED = 4
    """A fused kernel that adds a bias to the scores, forward."""
    BIASED_BACKWARD = 5
    EAGER_TRAFFIC = 6
    """The bytes alone, of kernels that were not compiled."""
    GROUPED = 7
    """Products of groups of rows with a matrix each, in one kernel; sizes are those of a mean group."""
    GROUPED_SUMS = 8
    """Products of the columns of two such groups, one matrix a group: sums over as many terms as a group has rows."""
    ALL_REDUCE = 9
    ALL_GATHER = 10
    REDUCE_SCATTER = 11
    ALL_TO_ALL = 12
    SEND = 13
    ALL_TO_ALL_ACROSS = 14
    """Between the ranks of like place on the nodes of a group."""
    ALL_TO_ALL_WITHIN = 15
    """Between the ranks of a group on one node."""


@dataclass(frozen=True)
class OperationTable:
    """Operations of many parts, one entry each."""

    part: Ints
    """Which part it belongs to."""
    direction: Ints
    component: Ints
    """What its time counts as."""
    form: Ints
    weight: npt.NDArray[np.bool_]
    """Whether it makes a parameter's gradient."""
    batch: Ints
    m: Ints
    """Rows of a product; queries of attention."""
    n: Ints
    """Columns of a product; keys of attention."""
    k: Ints
    """Depth of a product; head size of attention."""
    flops: Floats
    bytes: Floats
    """Read and written; of a collective, its tensor."""
    width: Ints
    """Bytes of an element of what a product multiplies, or attention compares."""
    times: Ints
    """How often it runs."""
    beside: Ints
    """Operations after it that run while it is under way."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> OperationTable:
        """Return a table of one tuple a row, in the order of the fields; `times` and `beside` may be left out: 1 and 0."""
        count = len(fields(cls))
        rows = [(*row, *(1, 0)[len(row) - count :]) if len(row) < count else row for row in rows]
        return cls.of_matrix(np.asarray(rows, np.float64).reshape(-1, count))

    @classmethod
    def of_matrix(cls, rows: Floats) -> OperationTable:
        """Return a table of an array of [operations, fields]."""
        names, columns = [field.name for field in fields(cls)], rows.T
        kinds = {"weight": np.bool_, "flops": np.float64, "bytes": np.float64}
        return cls(
            **{name: column.astype(kinds.get(name, np.int64)) for name, column in zip(names, columns, strict=True)}
        )

    def __len__(self) -> int:
        return len(self.part)

    def take(self, which: npt.ArrayLike) -> OperationTable:
        """Return the operations at these positions, or where this mask is true."""
        return OperationTable(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def shifted(self, parts: int) -> OperationTable:
        """Return the same operations, of parts numbered from `parts` on."""
        return replace(self, part=self.part + parts)

    @classmethod
    def joined(cls, tables: Sequence[OperationTable]) -> OperationTable:
        """Return the operations of several tables, one after the other."""
        return cls(
            **{field.name: np.concatenate([getattr(table, field.name) for table in tables]) for field in fields(cls)}
        )


def compute_seconds(table: OperationTable, profile: Profile) -> Floats:
    """Return the seconds of each operation on the device, all its times together, [operations]; 0 for collectives."""
    seconds = _by_curves(table, profile)
    if profile.measured:
        for kind, which in _measurable(table, {point.kind for point in profile.measured}):
            rows = np.flatnonzero(which)
            if len(rows):
                sizes = np.stack([table.batch[rows], table.m[rows], table.n[rows], table.k[rows]], axis=1)
                seconds[rows] *= correction(profile.measured, kind, sizes)
    return seconds * table.times


def _measurable(table: OperationTable, timed: Collection[Kind]) -> Iterable[tuple[Kind, npt.NDArray[np.bool_]]]:
    """Yield the kinds of operations that can be timed one by one, and a mask of those in `table`. timed: kinds that were."""
    product = table.form == Form.PRODUCT
    halves = table.width == 2
    yield "matmul", product & halves
    yield "matmul32", product & (table.width == 4)
    yield "matmul64", product & (table.width == 8)
    yield "matmul8", product & (table.width == 1)
    forward = halves & ((table.form == Form.ATTENTION) | (table.form == Form.BIASED))
    backward = halves & ((table.form == Form.ATTENTION_BACKWARD) | (table.form == Form.BIASED_BACKWARD))
    if "whole_attention" not in timed:
        # Causal calls of these sizes say something of them too.
        yield "attention", forward
        yield "attention_backward", backward
        return
    # Attention of all positions computes twice as much as where half of the scores is masked.
    products = np.where(np.isin(table.form, (Form.ATTENTION_BACKWARD, Form.BIASED_BACKWARD)), 5.0, 2.0)
    whole = table.flops > 1.5 * products * table.batch * table.m * table.n * table.k
    yield "attention", forward & ~whole
    yield "attention_backward", backward & ~whole
    yield "whole_attention", forward & whole
    yield "whole_attention_backward", backward & whole


def _by_curves(table: OperationTable, profile: Profile) -> Floats:
    rates = [profile.matmul64_flop_s, profile.matmul32_flop_s, profile.matmul8_flop_s]
    rate = np.select([table.width == 8, table.width == 4, table.width == 1], rates, profile.matmul_flop_s)
    rows = table.batch * table.m
    area = rows * table.n
    # Small sides, areas and depths leave a part of the device idle.
    edge, depth = profile.matmul_edge, profile.matmul_depth
    fill = table.m / (table.m + edge) * (table.n / (table.n + edge)) * (table.k / (table.k + depth))
    fill = fill * (area / (area + profile.matmul_area))
    aligned = _ALIGNED // table.width
    # Sums over the rows of a group read rows of other sizes, whatever the number of terms.
    depth_odd = np.where(table.form == Form.GROUPED_SUMS, 0.0, _odd(table.k, aligned))
    odd = np.maximum(_odd(table.n, aligned), depth_odd)
    fill = fill / (1 + profile.matmul_odd * odd)
    eager = np.where(table.form == Form.EAGER_TRAFFIC, profile.eager_share, 1.0)
    traffic = table.bytes / (profile.memory_b_s * eager)
    backward = (table.form == Form.ATTENTION_BACKWARD) | (table.form == Form.BIASED_BACKWARD)
    biased = (table.form == Form.BIASED) | (table.form == Form.BIASED_BACKWARD)
    fused = backward | biased | (table.form == Form.ATTENTION)
    attention = np.where(backward, profile.attention_backward_flop_s, profile.attention_flop_s)
    # Wider numbers go through the same kernels at the rate of their products.
    attention = attention * np.where(biased, profile.attention_biased, 1.0) * (rate / profile.matmul_flop_s)
    share = table.n / (table.n + profile.attention_length) * (table.k / (table.k + profile.attention_head))
    share = share * (rows / (rows + profile.attention_area))
    # Groups fill whole tiles each, and the kernel finds out where they begin.
    tiles = _GROUP_TILE / 2 / np.maximum(np.minimum(table.m, table.k), 1)
    groups = np.isin(table.form, (Form.GROUPED, Form.GROUPED_SUMS))
    grouped = np.where(groups, profile.grouped_share / (1 + tiles), 1.0)
    product = np.maximum(table.flops / (rate * fill * grouped), traffic)
    attended = np.maximum(table.flops / (attention * share), traffic)
    seconds = np.where(groups | (table.form == Form.PRODUCT), product, np.where(fused, attended, traffic))
    return np.where(table.form >= Form.ALL_REDUCE, 0.0, seconds + profile.kernel_s)


_GROUP_TILE = 256
"""Rows that kernels of grouped products compute at a time: on average half a tile of each group is left over."""
_ALIGNED = 128
"""Bytes that devices fetch at once."""


def _odd(size: Ints, aligned: Ints) -> Floats:
    """Return how far a side is from a multiple of `aligned`: 0 for one, nearly 1 for an odd number."""
    return np.asarray(1.0 / np.gcd(size, aligned) - 1.0 / aligned)


def operation_rows(
    part: int, operations: Sequence[Operation], *, biased: bool = False, eager: bool = False
) -> list[tuple[float, ...]]:
    """Return the rows of an `OperationTable` for one part.

    biased: whether attention adds a bias to the scores. eager: whether the part is not compiled.
    """
    return [(*_row_of(part, op, biased=biased, eager=eager), op.times, op.beside) for op in operations]


_COMPONENTS = {"attention": PartBreakdown.ATTENTION, "matmul": PartBreakdown.MATMUL}


def _row_of(part: int, op: Operation, *, biased: bool, eager: bool) -> tuple[float, ...]:
    """Return the fields of an `OperationTable` before `times`."""
    direction = Direction.FORWARD if op.phase == "forward" else Direction.BACKWARD
    traffic = op.bytes_read + op.bytes_written
    if op.collective is not None:
        axis, _, stage = op.collective.axis.upper().partition("_")
        component = PartBreakdown[axis]
        form = Form["_".join(filter(None, (op.collective.operation.upper(), stage)))]
        return (part, direction, component, form, False, 1, 1, 1, 1, 0.0, op.collective.bytes, op.dtype.itemsize)
    component = _COMPONENTS.get(op.kind, PartBreakdown.MEMORY)
    if op.attention is not None:
        x = op.attention
        form = Form.ATTENTION_BACKWARD if x.backward else Form.ATTENTION
        if biased:
            form = Form.BIASED_BACKWARD if x.backward else Form.BIASED
        sizes = (x.samples * x.heads, x.queries, x.keys, x.head_size, x.flops, traffic)
        return (part, direction, component, form, False, *sizes, x.width)
    if op.matmul is not None:
        y = op.matmul
        if y.groups:
            # The flops are those of all rows; sizes, by which the rate is known, those of a mean group.
            m, k = (max(1, size // y.groups) if y.ragged == name else size for name, size in (("m", y.m), ("k", y.k)))
            sizes = (y.groups, m, y.n, k, y.flops, traffic)
            form = Form.GROUPED_SUMS if y.ragged == "k" else Form.GROUPED
            return (part, direction, component, form, op.weight_gradient, *sizes, y.width)
        sizes = (y.batch, y.m, y.n, y.k, y.flops, traffic)
        return (part, direction, component, Form.PRODUCT, op.weight_gradient, *sizes, y.width)
    form = Form.EAGER_TRAFFIC if eager else Form.TRAFFIC
    return (part, direction, component, form, op.weight_gradient, 1, 1, 1, 1, 0.0, traffic, 1)
