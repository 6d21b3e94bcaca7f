"""Who holds what of a streamed projection pair, as plain numbers: no tensor is touched here, and nothing is sent.

A projection pair is y = sum over chunks k of act(x A_k) B_k. Its units (head groups, or groups of hidden features) are
divided over K chunks, and each chunk over the G = F / K ranks that hold a piece of it; K is F wherever there are as many
units.

    rank   0        1        2        3           F = 4, six units
    chunk  0        1        2        3           K = 4, G = 1:  units 0-1, 2-3, 4, 5
    chunk  0        0        1        1           K = 2, G = 2:  half of units 0-2, the other half, half of 3-5, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

Span = tuple[int, int]
"""First element and number of elements in a flat buffer."""


@dataclass(frozen=True)
class Matrix:
    """One parameter of a pair on this tensor-parallel rank; its rows are sharded, or those of its transpose for B."""

    name: str
    """Within the module that holds the pair, e.g. `qkv.weight`."""
    dim: int
    """The dim of the parameter that its rows count: 0 for A and its bias, 1 for B."""
    unit: int
    """Rows of a unit."""
    width: int
    """Elements of a row."""


def divide_evenly(count: int, parts: int) -> list[int]:
    """Return where each of `parts` nearly equal parts of `count` things begins, and the end; longer parts come first."""
    each, more = divmod(count, parts)
    return [part * each + min(part, more) for part in range(parts + 1)]


def chunk_count(units: int, places: int) -> int:
    """Return the most chunks that `places` divide into equally, and that all get a unit."""
    return max(count for count in range(1, places + 1) if places % count == 0 and count <= units)


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of one pair and the pieces of its ranks. Buffers hold matrices one after another, in rows."""

    matrices: tuple[Matrix, ...]
    units: int
    """Units of this tensor-parallel rank's part of the pair."""
    ranks: int
    """F: ranks that share the pair."""
    chunks: int
    """K."""

    @property
    def group(self) -> int:
        """G: ranks that hold a chunk together."""
        return self.ranks // self.chunks

    @cached_property
    def _bounds(self) -> list[int]:
        return divide_evenly(self.units, self.chunks)

    def units_of(self, chunk: int) -> range:
        """Return units of a chunk."""
        return range(self._bounds[chunk], self._bounds[chunk + 1])

    def piece(self, matrix: Matrix, rank: int) -> range:
        """Return rows of the tensor-parallel part that `rank` holds."""
        units = self.units_of(rank // self.group)
        first = units.start * matrix.unit
        bounds = divide_evenly(len(units) * matrix.unit, self.group)
        place = rank % self.group
        return range(first + bounds[place], first + bounds[place + 1])

    def rows(self, matrix: Matrix, chunk: int) -> int:
        """Return rows of a chunk."""
        return len(self.units_of(chunk)) * matrix.unit

    def chunk_size(self, chunk: int) -> int:
        """Return elements of a chunk."""
        return sum(self.rows(matrix, chunk) * matrix.width for matrix in self.matrices)

    def piece_size(self, rank: int) -> int:
        """Return elements of a rank's piece."""
        return sum(len(self.piece(matrix, rank)) * matrix.width for matrix in self.matrices)

    @cached_property
    def largest_chunk(self) -> int:
        """Elements of the largest chunk: the first one's, as `divide_evenly` goes."""
        return self.chunk_size(0)

    def spans_in_chunk(self, rank: int) -> list[Span]:
        """Return where the piece of `rank` lies in the buffer of its chunk: one span a matrix, joined where they touch."""
        chunk = rank // self.group
        begin, spans = 0, []
        for matrix in self.matrices:
            first = self.units_of(chunk).start * matrix.unit
            rows = self.piece(matrix, rank)
            spans.append((begin + (rows.start - first) * matrix.width, len(rows) * matrix.width))
            begin += self.rows(matrix, chunk) * matrix.width
        return list(_join_spans(spans))

    def spans_in_piece(self, rank: int) -> list[Span]:
        """Return the same spans in a buffer that holds the piece alone."""
        lengths = [length for _, length in self.spans_in_chunk(rank)]
        return [(sum(lengths[:place]), length) for place, length in enumerate(lengths)]


def _join_spans(spans: list[Span]) -> Iterator[Span]:
    begin, length = spans[0]
    for start, count in spans[1:]:
        if count and length and start == begin + length:
            length += count
        elif count:
            if length:
                yield begin, length
            begin, length = start, count
    if length:
        yield begin, length
