"""Graph parallelism: ranks of `cp` hold different atoms of the same structures, and send each other what edges ask for.

A rank computes the messages of all edges that end at its atoms. Of the atoms that these edges come from, those of other
ranks are its halo, and their rows are sent to it in every block. Everything here is linear, and each operation's gradient is
the gradient of another: derivatives of any order, as conservative forces need them.

Ranks must call collectives in the same order, in backward passes as well. Autograd runs what is ready in the reverse order
of its making, counted by each thread for itself; so as long as one thread makes everything, collectives of a backward pass
come in the reverse order of the forward pass on every rank, however many other operations (chunks of edges) lie between.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import set_multithreading_enabled

from phalanx.families.materials.model.geometry import Exchange
from phalanx.layout.mesh import Axis
from phalanx.torch_compat import common as compat


@dataclass(frozen=True)
class Gathering:
    """Rows of all ranks in one collective, and which of them this rank takes."""

    widest: int
    """Most rows of a rank; others send zeros besides."""
    taken: Tensor
    """int64: rank * widest + row, each pair once."""


@dataclass(frozen=True)
class Sending:
    """Rows sent to the ranks that ask for them, and nothing else."""

    sent: Tensor
    """int64: rows of this rank, those for rank 0 first."""
    sends: list[int]
    """Rows that each rank gets."""
    receives: list[int]
    """Rows that each rank sends here."""


Plan = Gathering | Sending | None
"""Way in of the halo; None where no rank has any."""


@dataclass(frozen=True)
class Halo:
    """One rank's view of the other ranks' atoms of one micro-batch. Indices are int64."""

    atoms: Plan
    """Way in of the halo's atoms."""
    own: int
    """Number of this rank's atoms."""
    senders: int
    """Number of atoms of this rank and of its halo."""
    atoms_G: Tensor
    """Number of atoms of each structure on all ranks."""
    largest: int
    """Most atoms of one structure that this rank holds."""
    edges: Plan = None
    """Way in of the edges that end at the halo's atoms; for backbones that ask for them."""
    edge_targets: Tensor | None = None
    """Where those edges end, among the atoms of this rank and its halo."""
    everyone: Gathering | None = None
    """Way in of all atoms; for attention that asks for them."""
    graph_A: Tensor | None = None
    """Structure of each of all atoms."""


class HaloExchange(Exchange):
    """See `Exchange`; the atoms at hand are those of one rank."""

    def __init__(self, halo: Halo, axis: Axis) -> None:
        self.halo = halo
        self.axis = axis

    def atoms(self, x_NC: Tensor) -> Tensor:
        """See `Exchange`."""
        return _extend_rows(x_NC, self.halo.atoms, self.axis)

    def to_owners(self, x_MC: Tensor) -> Tensor:
        """See `Exchange`."""
        return x_MC if self.halo.atoms is None else _applied(_Fold, x_MC, self.halo.own, self.halo.atoms, self.axis)

    def senders(self, atoms: int) -> int:
        """See `Exchange`."""
        return self.halo.senders

    def edges(self, x_EC: Tensor) -> Tensor:
        """See `Exchange`."""
        return _extend_rows(x_EC, self.halo.edges, self.axis)

    def edge_targets(self, target_E: Tensor) -> Tensor:
        """See `Exchange`."""
        return target_E if self.halo.edge_targets is None else torch.cat((target_E, self.halo.edge_targets))

    def everyone(self, x_NC: Tensor) -> Tensor:
        """See `Exchange`."""
        assert self.halo.everyone is not None
        return _applied(_Gathered, x_NC, self.halo.own, self.halo.everyone, self.axis)

    def graph_of_everyone(self, graph_N: Tensor) -> Tensor:
        """See `Exchange`."""
        assert self.halo.graph_A is not None
        return self.halo.graph_A

    def over_graphs(self, sums_G: Tensor) -> Tensor:
        """See `Exchange`."""
        return _applied(_Total, sums_G, self.axis)

    def atoms_by_graph(self, graph_N: Tensor, graphs: int) -> Tensor:
        """See `Exchange`."""
        return self.halo.atoms_G

    def largest(self, max_atoms: int | None) -> int | None:
        """See `Exchange`."""
        return self.halo.largest

    def in_order(self) -> AbstractContextManager[object]:
        """Keep autograd in the thread that made the forward pass: see the top of this file."""
        return set_multithreading_enabled(False)


def _extend_rows(x: Tensor, plan: Plan, axis: Axis) -> Tensor:
    return x if plan is None else _applied(_Extend, x, len(x), plan, axis)


def _applied(function: type[torch.autograd.Function], x: Tensor, *how: Any) -> Tensor:
    result: Tensor = function.apply(x, *how)
    return result


class _Extend(torch.autograd.Function):
    """A rank's own rows, then its halo's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, plan: Gathering | Sending, axis: Axis) -> Tensor:
        ctx.how = rows, plan, axis
        return torch.cat((x, _fetch_rows(x, plan, axis)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _Fold.apply(grads[0], *ctx.how), None, None, None


class _Fold(torch.autograd.Function):
    """The adjoint: a rank's own rows, to which others add what they have for them in their halos."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, plan: Gathering | Sending, axis: Axis) -> Tensor:
        ctx.how = rows, plan, axis
        return _deliver_rows(x[rows:], plan, axis, x[:rows])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _Extend.apply(grads[0], *ctx.how), None, None, None


class _Gathered(torch.autograd.Function):
    """Taken rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, plan: Gathering, axis: Axis) -> Tensor:
        ctx.how = rows, plan, axis
        return _fetch_rows(x, plan, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _Scattered.apply(grads[0], *ctx.how), None, None, None


class _Scattered(torch.autograd.Function):
    """The adjoint: what all ranks have for a rank's rows, added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, plan: Gathering, axis: Axis) -> Tensor:
        ctx.how = rows, plan, axis
        return _deliver_rows(x, plan, axis, x.new_zeros((rows, *x.shape[1:])))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _Gathered.apply(grads[0], *ctx.how), None, None, None


class _Total(torch.autograd.Function):
    """The sum over ranks, on every rank; of which each rank's gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        # A copy: all_reduce writes the sum into its argument, which others may still read.
        total = x.contiguous().clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # A sum over ranks is its own adjoint, so that derivatives of any order are this operation again.
        return _Total.apply(grads[0], ctx.axis), None


def _fetch_rows(x: Tensor, plan: Gathering | Sending, axis: Axis) -> Tensor:
    """Return rows of other ranks, for this rank's rows `x`."""
    if isinstance(plan, Gathering):
        # A gather takes as many rows of each rank; those behind a rank's own are never taken.
        padded = x.new_zeros((plan.widest, *x.shape[1:]))
        padded[: len(x)] = x
        return compat.all_gather(padded, axis.group_name, axis.size).flatten(0, 1).index_select(0, plan.taken)
    return _exchange_rows(x.index_select(0, plan.sent), plan.sends, plan.receives, axis)


def _deliver_rows(y: Tensor, plan: Gathering | Sending, axis: Axis, own: Tensor) -> Tensor:
    """Return `own` with what other ranks' `y` add to it: the adjoint of `_fetch_rows`."""
    if isinstance(plan, Gathering):
        # Each place is taken once, so that copying needs no sum.
        places = y.new_zeros((axis.size * plan.widest, *y.shape[1:])).index_copy_(0, plan.taken, y)
        parts = places.unflatten(0, (axis.size, plan.widest))
        return own + compat.reduce_scatter(parts, axis.group_name, axis.size)[: len(own)]
    # Several ranks may have something for one row.
    return own.index_add(0, plan.sent, _exchange_rows(y, plan.receives, plan.sends, axis))


def _exchange_rows(x: Tensor, sends: list[int], receives: list[int], axis: Axis) -> Tensor:
    received = x.new_empty((sum(receives), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), receives, sends, group=axis.group)
    return received
