"""Matrices that ranks hold in parts, whole for as long as an update takes: each on one of the ranks that hold parts of it.

Works from what each rank holds (`layout.place`), so it is the same over FSDP shards, tensor-parallel and expert-parallel
parts, streamed matrices and replicas. Matrices are spread by their cost, those that some ranks have whole among these alone;
they travel in rounds, so that a rank never holds many whole ones. Knows nothing of what is done with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout.place import TensorSplits, place_of
from phalanx.nn.parameters import MatrixRows
from phalanx.optimizers.whole_matrices import WholeMatrices, Work, work_on_parts
from phalanx.torch_compat.process_groups import exchanges_nothing

ROUND_ELEMENTS = 2**26
"""Elements of whole matrices that a rank holds at a time, and that it sends to all that hold parts of them; more where a
single matrix has more."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and size along each dim of a part, in the whole parameter."""


class GatheredMatrices(WholeMatrices):
    """The matrices among this rank's parameters, of which ranks of `group` hold parts."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        splits: TensorSplits,
        rows: Mapping[str, MatrixRows],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        alike: range,
    ) -> None:
        """Keep this rank's `parameters` by name, whose parts are `splits`. rows: of those that hold matrices.

        alike: ranks of `group` that hold parts of the same parameters.
        """
        super().__init__({parameters[name]: of_name for name, of_name in rows.items()}, dtype)
        self.named = {name: parameters[name] for name in rows}
        self.rows_by_name = rows
        self.splits = splits
        self.group, self.alike = group, alike
        self.device = next(iter(parameters.values())).device

    def transform(self, parts: Mapping[Tensor, Tensor], work: Work) -> dict[Tensor, Tensor]:
        """See `WholeMatrices`."""
        mine = {name: parts[parameter] for name, parameter in self.named.items()}
        results = {name: torch.empty_like(part) for name, part in mine.items()}
        for exchange in self.rounds:
            self._transform_round(exchange, mine, results, work)
        return {parameter: results[name] for name, parameter in self.named.items()}

    @cached_property
    def rounds(self) -> list[Round]:
        """Return who gathers what, as this rank takes part in it; all ranks make it together."""
        # Only when the first update asks: optimizers that need no whole matrices never talk about them.
        places = {name: place_of(parameter, self.splits.get(name)) for name, parameter in self.named.items()}
        mine = {
            name: Holding(
                box=(place.offsets, tuple(place.local.shape)), shape=place.shape, stack=self.rows_by_name[name].stack
            )
            for name, place in places.items()
        }
        return plan_rounds(gather_holdings(mine, self.group, self.alike), dist.get_rank(self.group))

    def _transform_round(
        self, exchange: Round, mine: Mapping[str, Tensor], results: Mapping[str, Tensor], work: Work
    ) -> None:
        """Gather the matrices of a round where they belong, work on them there, and send the parts back."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        whole: dict[Unit, Tensor] = {}
        stacked: dict[str, Tensor] = {}
        for name, units in exchange.owned.items():
            stacked[name] = like.new_empty((len(units), *units[0].shape))
            whole |= dict(zip(units, stacked[name], strict=True))
        # Parts go to the owners of their matrices, and there into whole ones.
        outgoing = [[exchange.own_part(mine, piece) for piece in pieces] for pieces in exchange.sends]
        _copy_pieces(
            _exchange_pieces(outgoing, exchange.gathers, self.group, like), lambda piece: piece.of_whole(whole)
        )
        # Matrices of one parameter in one call: many small ones would be as many small kernels.
        for name, matrices_NRC in stacked.items():
            matrices_NRC.copy_(work_on_parts(matrices_NRC, self.rows_by_name[name], work).view_as(matrices_NRC))
        # Results go back to all that hold parts, replicas included.
        outgoing = [[piece.of_whole(whole) for piece in pieces] for pieces in exchange.returns]
        returned = _exchange_pieces(outgoing, exchange.receives, self.group, like)
        _copy_pieces(returned, lambda piece: exchange.own_part(results, piece))


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a parameter."""

    box: Box
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    stack: int
    """Equal parts that follow each other in its rows; each is gathered by itself."""


Holdings = dict[str, Holding]
"""What one rank holds, by parameter name."""


@dataclass(frozen=True)
class Unit:
    """Rows of a parameter that one rank gathers: one part of its stack."""

    name: str
    begin: tuple[int, ...]
    """First row and column in the whole parameter."""
    shape: tuple[int, ...]
    owner: int = -1
    """Rank in the group that gathers it."""

    @property
    def cost(self) -> int:
        """Return the size of the product of a matrix with itself, in multiplications."""
        return math.prod(self.shape) * min(self.shape)

    def overlap(self, box: Box) -> Box | None:
        """Return what a part has of it, None where that is nothing."""
        first = tuple(map(max, self.begin, box[0]))
        last = (min(a + n, b + m) for a, n, b, m in zip(self.begin, self.shape, *box, strict=True))
        sizes = tuple(end - start for start, end in zip(first, last, strict=True))
        return (first, sizes) if min(sizes) > 0 else None


@dataclass(frozen=True)
class Piece:
    """A part of a unit that some ranks hold."""

    unit: Unit
    box: Box

    def of_whole(self, whole: Mapping[Unit, Tensor]) -> Tensor:
        """Return its elements in the whole unit, where this rank gathers it."""
        return _narrow_to_box(whole[self.unit], self.unit.begin, self.box)


@dataclass(frozen=True)
class Round:
    """What one rank does with the matrices that are whole at the same time. Lists go by the other rank."""

    begins: Mapping[str, tuple[int, ...]]
    """Where this rank's parts begin in whole parameters."""
    owned: dict[str, list[Unit]]
    """What it gathers, by parameter."""
    sends: list[list[Piece]]
    """To their owners, before the work."""
    gathers: list[list[Piece]]
    """Messages with parts of units that this rank owns, from ranks that hold them."""
    returns: list[list[Piece]]
    """Messages with updated parts of units that this rank owns, to all that hold them, replicas too."""
    receives: list[list[Piece]]
    """Messages with updated parts that this rank holds, from the owners of their units."""

    def own_part(self, tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
        """Return the elements of `piece` in this rank's part of its parameter. tensors: like this rank's parameters."""
        return _narrow_to_box(tensors[piece.unit.name], self.begins[piece.unit.name], piece.box)


def plan_rounds(held: Sequence[Holdings], rank: int) -> list[Round]:
    """Return what `rank` does in each round. held: what every rank holds, in their order."""
    parts: Parts = {}
    for holder, holdings in enumerate(held):
        for name, holding in holdings.items():
            parts.setdefault(name, {}).setdefault(holding.box, []).append(holder)
    begins = {name: holding.box[0] for name, holding in held[rank].items()}
    rounds = []
    for units in _fill_rounds(assign_units(units_of(held), parts, len(held)), parts):
        lists: list[list[list[Piece]]] = [[[] for _ in held] for _ in range(4)]
        sends, gathers, returns, receives = lists
        owned: dict[str, list[Unit]] = {}
        for number, unit in enumerate(units):
            if unit.owner == rank:
                owned.setdefault(unit.name, []).append(unit)
            # Senders and receivers go through the same pieces in the same order: nothing is told beside the elements.
            for box, ranks in _holders_of_parts(unit, parts).items():
                piece = Piece(unit, box)
                # Of replicas another one sends each matrix, so that none has to send all.
                sender = unit.owner if unit.owner in ranks else ranks[number % len(ranks)]
                if sender == rank:
                    sends[unit.owner].append(piece)
                if unit.owner == rank:
                    gathers[sender].append(piece)
                    for other in ranks:
                        returns[other].append(piece)
                if rank in ranks:
                    receives[unit.owner].append(piece)
        rounds.append(Round(begins, owned, sends, gathers, returns, receives))
    return rounds


def gather_holdings(mine: Holdings, group: dist.ProcessGroup, alike: range) -> list[Holdings]:
    """Return what every rank of `group` holds. alike: those that hold parts of the same parameters as this one."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    held: list[Holdings] = [{} for _ in range(size)]
    if exchanges_nothing(group):
        # A dry run has one rank: the others of its stage hold as much, each the next part.
        for other in alike:
            held[other] = {name: _following_part(one, other - rank) for name, one in mine.items()}
        return held
    dist.all_gather_object(held, mine, group=group)
    return held


def _following_part(mine: Holding, by: int) -> Holding:
    """Return the part that comes `by` parts after `mine`, all parts being as large."""
    (first_row, first_column), sizes = mine.box
    rows, columns = (max(size, 1) for size in sizes)
    down, across = -(-mine.shape[0] // rows), -(-mine.shape[1] // columns)
    row, column = divmod(first_row // rows * across + first_column // columns + by, across)
    first = (row % down * rows, column * columns)
    return replace(
        mine, box=(first, tuple(min(s, whole - f) for s, whole, f in zip(sizes, mine.shape, first, strict=True)))
    )


Parts = dict[str, dict[Box, list[int]]]
"""The parts of each parameter, and the ranks that hold each."""


def units_of(held: Sequence[Holdings]) -> list[Unit]:
    """Return all matrices that anyone holds a part of, each part of a stack by itself."""
    known = {name: holding for holdings in held for name, holding in holdings.items()}
    found = []
    for name, holding in known.items():
        each, columns = holding.shape[0] // holding.stack, holding.shape[1]
        found += [Unit(name, (place * each, 0), (each, columns)) for place in range(holding.stack)]
    return found


def _holders_of_parts(unit: Unit, parts: Parts) -> dict[Box, list[int]]:
    """Return the parts of a matrix, and the ranks that hold each."""
    found: dict[Box, list[int]] = {}
    for box, ranks in parts[unit.name].items():
        overlap = unit.overlap(box)
        if overlap is not None:
            found.setdefault(overlap, []).extend(ranks)
    return found


def assign_units(units: Sequence[Unit], parts: Parts, ranks: int) -> list[Unit]:
    """Return `units` with their owners: costly ones first, each to the rank that has least to do so far.

    A matrix that some ranks hold whole, as experts are, goes to one of these: it has no way to go there. Any other goes to
    one of those that hold a part. parts: who holds what. ranks: how many there are.
    """
    load = [0] * ranks
    assigned = []
    # Cheap ones come last, and even out what the costly ones have left uneven.
    for unit in sorted(units, key=lambda unit: (-unit.cost, unit.name, unit.begin)):
        holders = _holders_of_parts(unit, parts)
        able = holders.get((unit.begin, unit.shape)) or [rank for each in holders.values() for rank in each]
        owner = min(able, key=lambda rank: (load[rank], rank))
        load[owner] += unit.cost
        assigned.append(replace(unit, owner=owner))
    return assigned


def _fill_rounds(units: Sequence[Unit], parts: Parts) -> list[list[Unit]]:
    """Return `units` in rounds in which no rank holds or sends more elements than `ROUND_ELEMENTS` allow."""
    rounds: list[list[Unit]] = []
    reached: dict[int, tuple[int, int]] = {}
    for unit in units:
        # Every replica gets the updated matrix: what is sent back is a multiple of what was gathered.
        sent = sum(math.prod(box[1]) * len(ranks) for box, ranks in _holders_of_parts(unit, parts).items())
        size = max(math.prod(unit.shape), sent)
        number, elements = reached.get(unit.owner, (0, 0))
        if elements and elements + size > ROUND_ELEMENTS:
            number, elements = number + 1, 0
        reached[unit.owner] = (number, elements + size)
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(unit)
    return rounds


def _narrow_to_box(tensor: Tensor, begin: tuple[int, ...], box: Box) -> Tensor:
    """Return the elements of `box` in a tensor that begins at `begin` of the whole."""
    for dim, (origin, first, size) in enumerate(zip(begin, *box, strict=True)):
        tensor = tensor.narrow(dim, first - origin, size)
    return tensor


def _copy_pieces(arrived: Iterable[tuple[Piece, Tensor]], place: Callable[[Piece], Tensor]) -> None:
    """Copy pieces where they belong. The buffer that they came in goes with this call, before anything is made of them."""
    for piece, part in arrived:
        place(piece).copy_(part)


def _exchange_pieces(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Piece]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[tuple[Piece, Tensor]]:
    """Send `outgoing`, by receiver, and return every piece that arrives. incoming: by sender.

    like: an empty tensor of the format and the device of all of them.
    """
    sizes = [math.prod(piece.box[1]) for pieces in incoming for piece in pieces]
    receive = [sum(math.prod(piece.box[1]) for piece in pieces) for pieces in incoming]
    send = [sum(part.numel() for part in parts) for parts in outgoing]
    sent = torch.cat([like, *(part.reshape(-1) for parts in outgoing for part in parts)])
    received = like.new_empty(sum(receive))
    # One exchange of all: many small ones would each wait for the network's latency.
    dist.all_to_all_single(received, sent, receive, send, group=group)
    pieces = [piece for pieces in incoming for piece in pieces]
    return [(piece, part.view(piece.box[1])) for piece, part in zip(pieces, received.split(sizes), strict=True)]
