"""Expert parallelism: rows of tokens travel to the ranks that hold their experts, and the results travel back.

One all-to-all each way (GShard, arXiv:2006.16668, section 3), of just the rows that were chosen: first the ranks tell each
other how many, then the rows follow, sorted by expert within each sender. Between nodes rows may go in two stages, so that a
rank sends one message to a node and not one to each of its ranks. What does not need the rows is computed between
`begin` and `finish`, and tokens that travel in chunks are computed while others travel. Knows nothing of routing or of
gradients' sums.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.kernels.routed_rows import SortRows, SumCopies
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplit, TensorSplits
from phalanx.nn.experts import ApplyExperts, ExpertNetworks, MixtureOfExperts, OwnExperts
from phalanx.torch_compat import common as compat


def split_experts(
    model: nn.Module,
    ep: Axis,
    exchange: TokenExchange | None = None,
    *,
    slices: int = 1,
    chunks: int = 1,
    stages: Stages | None = None,
) -> TensorSplits:
    """Keep this rank's experts of every mixture in `model`, still on meta, and let their rows be exchanged over `ep`.

    Returns which part of which parameter this rank keeps. exchange: how rows travel; None lets them travel as the routers
    say. slices: neighbours of `ep` over which each expert is sharded; there are `ep.size / slices` experts then. Where it
    is 1, `ep.size` divides the number of experts. chunks, stages: as of `TokenExchange`.
    """
    kept: TensorSplits = {}
    if ep.size == 1:
        return kept
    for name, module in model.named_modules():
        if not isinstance(module, MixtureOfExperts):
            continue
        module.exchange = exchange or TokenExchange(ep, slices, chunks, stages)
        experts, place = module.experts, ep.rank // slices
        # Experts follow each other in the rows of a parameter: whole experts are whole parts of the rows, and so is a
        # slice of one expert's gate and up rows. Of `down` a slice is some columns.
        gate_up, rows = _keep_part(experts.gate_up, 0, ep.rank, ep.size)
        down, down_rows = _keep_part(experts.down, 0, place, ep.size // slices)
        if slices > 1:
            down, columns = _keep_part(down, 1, ep.rank % slices, slices)
            down_rows = replace(down_rows, across=columns)
        experts.gate_up, experts.down = gate_up, down
        experts.d_ff //= slices
        kept |= {f"{name}.experts.gate_up": rows, f"{name}.experts.down": down_rows}
    return kept


def _keep_part(parameter: nn.Parameter, dim: int, place: int, parts: int) -> tuple[nn.Parameter, TensorSplit]:
    """Return the part of number `place`, of equal `parts` along `dim`, and where it is."""
    whole = parameter.shape[dim]
    assert whole % parts == 0 and parameter.device.type == "meta"
    each = whole // parts
    part = nn.Parameter(parameter.detach().narrow(dim, place * each, each).contiguous())
    return part, TensorSplit(dim, place * each, whole)


class Trip:
    """One all-to-all of rows between the ranks of a group. A plain class: compiled code must not look inside."""

    def __init__(self, send: list[int], receive: list[int], group: str) -> None:
        self.send, self.receive, self.group = send, receive, group
        """Numbers of rows by rank, and the group's name."""
        self.returning_RD: Tensor | None = None
        """In the backward pass, gradients on their way back; not to be read before they have been awaited."""

    def back(self) -> Trip:
        """Return the way back of rows that took this one."""
        return Trip(self.receive, self.send, self.group)


class Stages(NamedTuple):
    """The groups of an exchange in two stages. Ranks of `ep` count through a node first."""

    across: Axis
    """Ranks of like place on all nodes."""
    within: Axis
    """Ranks of this node."""


class SecondStage:
    """From the rank of a node that rows have come to, to that of their expert; plain for the same reason."""

    def __init__(self, trip: Trip, crossed_NL: Tensor) -> None:
        self.trip, self.back = trip, trip.back()
        self.crossed_NL = crossed_NL
        """How many rows have come here from each node for each rank of this one, in that order."""

    def go(self, arrived_RD: Tensor) -> Tensor:
        """Bring rows to the ranks of their experts. arrived: by node they come from, then by rank they go to."""
        place_R, _ = order_by_expert(self.crossed_NL, arrived_RD.shape[0])
        by_rank_RD = SortRows.apply(arrived_RD, place_R.argsort(), place_R[:, None].int())
        rows_RD: Tensor = AwaitTrip.apply(BeginTrip.apply(by_rank_RD, self.trip), self.trip)
        return rows_RD

    def go_back(self, rows_RD: Tensor) -> Tensor:
        """Bring results to where `go` took their rows from, in the same order."""
        by_rank_RD = AwaitTrip.apply(BeginTrip.apply(rows_RD, self.back), self.back)
        place_R, _ = order_by_expert(self.crossed_NL, by_rank_RD.shape[0])
        arrived_RD: Tensor = SortRows.apply(by_rank_RD, place_R, place_R.argsort()[:, None].int())
        return arrived_RD


class Arrivals(NamedTuple):
    """Rows that have arrived, in the order of this rank's experts."""

    by_expert_R: Tensor
    """Where each row stands then, int64."""
    source_R: Tensor
    """Which row stands there, int64."""
    ends_E: Tensor
    """One past each expert's last row, int32."""


class Copies(NamedTuple):
    """Rows that set out several times, to the neighbours that share their expert."""

    source_C: Tensor
    """Which row each copy is of, int64."""
    position_RS: Tensor
    """Where the copies of a row stand, in the order of the slices of its expert, int32."""


class Dispatched:
    """Rows of a chunk of tokens on their way to their experts; plain for the same reason."""

    def __init__(self, rows_RD: Tensor, trip: Trip, second: SecondStage | None, sent: list[int]) -> None:
        self.rows_RD = rows_RD
        """What arrives here, rank after rank, or node after node; not to be read before it has been awaited."""
        self.trip, self.back = trip, trip.back()
        self.second = second
        """From there to the ranks of their experts; None where they are there."""
        self.sent = sent
        """Rows to each rank."""
        self.copies: Copies | None = None
        """Of rows that go to all ranks which share their expert; None where one rank has it."""
        self.arriving_PE: Tensor
        """How many rows each rank sends to each expert here."""
        self.left: int
        """Rows that have no expert and stay."""


class Departures:
    """The chunks of tokens whose rows are on their way; plain for the same reason."""

    def __init__(self, chunks: list[Dispatched]) -> None:
        self.chunks = chunks


class TokenExchange(OwnExperts):
    """Has rows computed by the experts of all ranks of `ep`.

    Where each expert is sharded over neighbours, a row goes to all of them, as if each had an expert of a part of the hidden
    features, and what these give is summed on arrival: what Megatron-LM's expert tensor parallelism gathers and reduces
    among neighbours is a part of the exchange here.

    Tokens may travel in chunks: the rows of one are under way while those of another are computed (Tutel, arXiv:2206.03382,
    section 3.3). All chunks set out before the first is awaited, and all set out back before the first is awaited there: in
    the backward pass, which does all that in reverse, they overlap alike.

    In two stages rows first go to the rank of like place on the node of their expert, and from there over the node's own
    links: as many bytes leave a node, in messages that are fewer and larger by the number of its ranks. They come back the
    other way round. Rows arrive in another order, but meet their experts in the same one: no bit of a result changes.
    """

    def __init__(self, ep: Axis, slices: int = 1, chunks: int = 1, stages: Stages | None = None) -> None:
        """Exchange over `ep`.

        slices: as of `split_experts`. chunks: of tokens, whose rows travel one after the other. stages: None sends each row
        to the rank of its expert at once.
        """
        self.ep = ep
        self.slices = slices
        self.chunks = chunks
        self.stages = stages

    # What arrives has a size that only the routers know: a compiled program ends before it and begins anew behind it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, rows: list[Tensor], ends: list[Tensor], complete: bool) -> Departures:
        """Let rows set out to the ranks of their experts, and return before they have arrived.

        rows: of each chunk, [R, D], sorted by expert, over all experts. ends: of each chunk, int32 [E], one past each
        expert's last row. complete: whether every row has an expert; all ranks say the same.
        """
        size, slices = self.ep.size, self.slices
        counts_CE = torch.stack(ends).diff(dim=1, prepend=ends[0].new_zeros((len(ends), 1)))
        sent_PCE = counts_CE.unflatten(1, (size // slices, -1)).transpose(0, 1).repeat_interleave(slices, 0).long()
        told = self._tell_counts(sent_PCE)
        # The one wait for the device: memory for what arrives cannot be had without its size.
        sizes = self.read_sizes([each_PCE.sum(2) for each_PCE in (sent_PCE, *told)], [len(each) for each in rows])
        begun = []
        for chunk, rows_RD in enumerate(rows):
            one = self._plan_trips([each_CP[chunk] for each_CP in sizes], told[0][:, chunk])
            chosen = sum(one.sent) // slices
            chosen_RD = rows_RD if complete else rows_RD[:chosen]
            if slices > 1:
                one.copies = order_copies(sent_PCE[::slices, chunk].sum(1), chosen, slices)
                chosen_RD = SortRows.apply(chosen_RD, *one.copies)
            one.rows_RD = BeginTrip.apply(chosen_RD, one.trip)
            one.arriving_PE, one.left = told[-1][:, chunk].contiguous(), len(rows_RD) - chosen
            begun.append(one)
        return Departures(begun)

    def _tell_counts(self, sent_PCE: Tensor) -> list[Tensor]:
        """Return how many rows each rank sends here, [P, C, E]; in two stages, before that how many pass by here.

        Those are in the order of the nodes that they come from and of the ranks of this node that they go to.
        """
        if self.stages is None:
            return [compat.all_to_all(sent_PCE.contiguous(), self.ep.group_name, self.ep.size)]
        across, within = self.stages
        sent_NLCE = sent_PCE.unflatten(0, (across.size, within.size)).contiguous()
        crossed_NLCE = compat.all_to_all(sent_NLCE, across.group_name, across.size)
        by_place_LNCE = crossed_NLCE.transpose(0, 1).contiguous()
        arriving_LNCE = compat.all_to_all(by_place_LNCE, within.group_name, within.size)
        return [crossed_NLCE.flatten(0, 1), arriving_LNCE.transpose(0, 1).flatten(0, 1)]

    def _plan_trips(self, sizes: list[list[int]], crossed_PE: Tensor) -> Dispatched:
        """Return a chunk that is yet to set out. sizes: rows of it by rank, as of `read_sizes`."""
        send, *crossed, receive = sizes
        nowhere = crossed_PE.new_empty(0)
        if self.stages is None:
            return Dispatched(nowhere, Trip(send, receive, self.ep.group_name), None, send)
        across, within = self.stages

        def of_nodes(rows: list[int]) -> list[int]:
            return [sum(rows[first : first + within.size]) for first in range(0, len(rows), within.size)]

        def of_places(rows: list[int]) -> list[int]:
            return [sum(rows[place :: within.size]) for place in range(within.size)]

        first = Trip(of_nodes(send), of_nodes(crossed[0]), across.group_name)
        second = Trip(of_places(crossed[0]), of_places(receive), within.group_name)
        crossed_NL = crossed_PE.sum(1).unflatten(0, (across.size, within.size))
        return Dispatched(nowhere, first, SecondStage(second, crossed_NL), send)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, networks: ExpertNetworks, begun: Departures) -> list[Tensor]:
        """Return each row's expert applied to it, [R, D] of each chunk; 0 for rows behind the last expert's.

        begun: from `begin`.
        """
        chunks = begun.chunks
        if len(chunks) == 1:
            # Gathered when the rows have arrived, and freed once their gradients are formed: for as short as can be.
            (one,) = chunks
            sorted_RD, order = self._arrive(one.rows_RD, one)
            (out_RD,) = networks([sorted_RD], lambda apply, rows: [apply(rows[0], order.ends_E, True)])
            returning = [self._leave(out_RD, order, one)]
        else:

            def compute_chunks(apply_experts: ApplyExperts, rows: list[Tensor]) -> list[Tensor]:
                return [self._compute(apply_experts, *each) for each in zip(rows, chunks, strict=True)]

            # One call, so that they are gathered once.
            returning = networks([one.rows_RD for one in chunks], compute_chunks)
        return [self._collect(*each) for each in zip(returning, chunks, strict=True)]

    def _compute(self, apply_experts: ApplyExperts, rows_RD: Tensor, begun: Dispatched) -> Tensor:
        """Have the rows of a chunk computed here and let them set out back. rows: `begun`'s, which are awaited."""
        sorted_RD, order = self._arrive(rows_RD, begun)
        return self._leave(apply_experts(sorted_RD, order.ends_E, True), order, begun)

    def _arrive(self, rows_RD: Tensor, begun: Dispatched) -> tuple[Tensor, Arrivals]:
        """Wait for the rows of a chunk; return them sorted by expert, and their order."""
        arrived_RD = AwaitTrip.apply(rows_RD, begun.trip)
        places = 1 if self.stages is None else self.stages.within.size
        if begun.second is not None:
            arrived_RD = begun.second.go(arrived_RD)
        by_expert, ends_E = order_by_expert(begun.arriving_PE, arrived_RD.shape[0], places)
        order = Arrivals(by_expert, by_expert.argsort(), ends_E)
        return SortRows.apply(arrived_RD, order.source_R, by_expert[:, None].int()), order

    def _leave(self, out_RD: Tensor, order: Arrivals, begun: Dispatched) -> Tensor:
        """Let the results of a chunk's rows set out back. out: sorted by expert, in the order of `_arrive`."""
        as_arrived_RD = SortRows.apply(out_RD, order.by_expert_R, order.source_R[:, None].int())
        if begun.second is not None:
            as_arrived_RD = begun.second.go_back(as_arrived_RD)
        returning_RD: Tensor = BeginTrip.apply(as_arrived_RD, begun.back)
        return returning_RD

    def _collect(self, returning_RD: Tensor, begun: Dispatched) -> Tensor:
        """Return the results of a chunk's rows, in the order in which the rows set out. returning: from `_compute`."""
        back_RD: Tensor = AwaitTrip.apply(returning_RD, begun.back)
        if begun.copies is not None:
            back_RD = SumCopies.apply(back_RD, *begun.copies)
        if not begun.left:
            return back_RD
        return torch.cat((back_RD, back_RD.new_zeros((begun.left, back_RD.shape[1]))))

    def read_sizes(self, counts: list[Tensor], rows: list[int]) -> list[list[list[int]]]:
        """Return how many rows of each chunk go to each rank, pass by, and come from each rank: for each of `counts` [C, P].

        `BalancedExchange` stands in where counts have no values. counts: int64 [P, C] each; none pass by in one stage. rows:
        of each chunk here, those without an expert among them.
        """
        sizes: list[list[list[int]]] = torch.stack([each_PC.t() for each_PC in counts]).tolist()
        return sizes


class BalancedExchange(TokenExchange):
    """The exchange as cost models and dry runs see it: no router has chosen, every rank gets an equal part."""

    def __init__(
        self,
        ep: Axis,
        load: Fraction = Fraction(1),
        slices: int = 1,
        chunks: int = 1,
        stages: Stages | None = None,
        *,
        experts: int = 0,
    ) -> None:
        """Exchange over `ep`.

        load: rows that arrive here, over those that leave. slices, chunks, stages: as of `TokenExchange`. experts: of this
        rank, where these are not an equal part of all; 0 where they are.
        """
        super().__init__(ep, slices, chunks, stages)
        self.load, self.experts = load, experts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, rows: list[Tensor], ends: list[Tensor], complete: bool) -> Departures:
        """See `TokenExchange`; counts have no values, so that those of other experts stand in for those of these."""
        begun: Departures = super().begin(rows, ends, complete)
        for each in begun.chunks:
            if self.experts not in (0, each.arriving_PE.shape[1]):
                # Made of what arrived, so that who computes it again has the ranks tell each other again.
                each.arriving_PE = each.arriving_PE[:, :1].repeat(1, self.experts)
        return begun

    def read_sizes(self, counts: list[Tensor], rows: list[int]) -> list[list[list[int]]]:
        """Return equal parts of all rows, and `load` times as many that arrive."""
        places = [even_parts(each, self.ep.size // self.slices) for each in rows]
        sent_CP = [[part for part in parts for _ in range(self.slices)] for parts in places]
        crossed_CP = [even_parts(each * self.slices, self.ep.size) for each in rows]
        arriving_CP = [even_parts(int(each * self.slices * self.load), self.ep.size) for each in rows]
        return [sent_CP, *[crossed_CP] * (len(counts) - 2), arriving_CP]


def even_parts(total: int, parts: int) -> list[int]:
    """Return whole numbers that sum to `total` and differ by at most one."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def order_by_expert(arriving_PE: Tensor, rows: int, places: int = 1) -> tuple[Tensor, Tensor]:
    """Return where each row that arrived stands when all are sorted by expert, int64 [R], and each expert's end, int32 [E].

    arriving: how many rows each rank sends to each expert here; they arrive sorted by expert in each rank. rows: their sum.
    places: ranks of a node, where rows arrive by the place of their ranks on their nodes, and then node after node; 1 where
    they arrive rank after rank. An expert's rows stand in the order of their ranks.
    """
    counts_EP = arriving_PE.t().contiguous()
    before_sorted_PE = (counts_EP.flatten().cumsum(0).view_as(counts_EP) - counts_EP).t()

    def in_arrival(each_PE: Tensor) -> Tensor:
        by_place: Tensor = each_PE.unflatten(0, (-1, places)).transpose(0, 1).flatten()
        return by_place

    size_of_block = in_arrival(arriving_PE)
    before_arrival = size_of_block.cumsum(0)
    row_R = torch.arange(rows, device=arriving_PE.device)
    block_R = torch.searchsorted(before_arrival, row_R, right=True)
    by_expert = row_R - (before_arrival - size_of_block)[block_R] + in_arrival(before_sorted_PE)[block_R]
    return by_expert, counts_EP.sum(1).cumsum(0).int()


def order_copies(counts_G: Tensor, rows: int, slices: int) -> Copies:
    """Return the order of `slices` copies of each row: those of a group of rows stand together, a whole group a slice.

    counts: rows of each group, int64. rows: their sum.
    """
    ends_G = counts_G.cumsum(0)
    row_R = torch.arange(rows, device=counts_G.device)
    group_R = torch.searchsorted(ends_G, row_R, right=True)
    counts_R = counts_G[group_R]
    first_R = row_R + (slices - 1) * (ends_G[group_R] - counts_R)
    position_RS = first_R[:, None] + counts_R[:, None] * torch.arange(slices, device=counts_G.device)
    return Copies(position_RS.flatten().argsort() // slices, position_RS.int())


class BeginTrip(torch.autograd.Function):
    """Rows set out; `apply(rows_RD, trip)`.

    In the backward pass the two halves of a trip change places: that of `AwaitTrip`, which is the first to run, lets the
    gradients set out, and what was computed between the two in the forward pass forms its gradients meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, trip: Trip) -> Tensor:
        """Return the memory that the rows of all ranks arrive in, rank after rank."""
        ctx.trip = trip
        return compat.begin_all_to_all_rows(rows_RD, trip.send, trip.receive, trip.group)

    @staticmethod
    def backward(ctx: Any, _grad_RD: Tensor) -> tuple[Tensor, None]:
        """Wait for the gradients that `AwaitTrip` has sent here."""
        returning_RD, ctx.trip.returning_RD = ctx.trip.returning_RD, None
        return compat.await_tensor(returning_RD), None


class AwaitTrip(torch.autograd.Function):
    """Rows arrive; `apply(arriving_RD, trip)`, what `BeginTrip` returned for the same trip."""

    @staticmethod
    def forward(ctx: Any, arriving_RD: Tensor, trip: Trip) -> Tensor:
        """Return the rows that arrived."""
        ctx.trip = trip
        return compat.await_tensor(arriving_RD).view_as(arriving_RD)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        """Send the gradients the way back."""
        trip = ctx.trip
        trip.returning_RD = compat.begin_all_to_all_rows(grad_RD, trip.receive, trip.send, trip.group)
        # Autograd wants the shape of what arrived; the gradients of what set out have another, and go by the trip.
        return grad_RD, None
