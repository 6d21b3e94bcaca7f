"""The order in which pipeline ranks compute: for each rank its stages' forward and backward passes, micro-batch by
micro-batch, exactly as `layout.pipeline` runs them.

PyTorch's own schedule object gives the order of `zbv`. The interleaved ones are written here, since PyTorch's take long to
make, and those with one stage a rank, which run as code without a table behind it; the tests compare them with PyTorch's
objects and with what a real run does. Knows nothing of time: that is `planner.schedule.simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import ZERO_BUBBLE, ResolvedLayout
from phalanx.layout.stage_assignment import TORCH_SCHEDULES
from phalanx.torch_compat.common import schedule_actions

IntArray = npt.NDArray[np.int64]


class Pass(IntEnum):
    """What a rank computes of one stage and one micro-batch at a time."""

    FORWARD = 0
    BACKWARD = 1
    """The whole backward pass of a stage."""
    INPUT = 2
    """Gradients of the stage's input alone."""
    WEIGHT = 3
    """Gradients of its weights alone, some time after those of its input."""


LETTERS = {"F": Pass.FORWARD, "B": Pass.BACKWARD, "I": Pass.INPUT, "W": Pass.WEIGHT}
"""PyTorch's letter of each kind."""


class Action(NamedTuple):
    """One piece of work of a rank."""

    kind: Pass
    stage: int
    microbatch: int


@dataclass(frozen=True, eq=False)
class ScheduleTable:
    """What every rank computes, in order. The arrays are [ranks, actions]: all ranks have equally many."""

    schedule: str
    pp: int
    stages_per_rank: int
    microbatches: int
    kind: IntArray
    """`Pass` of each action."""
    stage: IntArray
    microbatch: IntArray

    @property
    def n_stages(self) -> int:
        """Stages in all."""
        return self.pp * self.stages_per_rank

    @property
    def split_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return bool((self.kind == Pass.WEIGHT).any())

    def actions(self, rank: int) -> list[Action]:
        """Return the actions of `rank`, in order."""
        columns = zip(self.kind[rank], self.stage[rank], self.microbatch[rank], strict=True)
        return [Action(Pass(kind), int(stage), int(microbatch)) for kind, stage, microbatch in columns]

    @cached_property
    def rank_of_stage(self) -> IntArray:
        """The rank that holds each stage, [stages]."""
        ranks = np.zeros(self.n_stages, dtype=np.int64)
        ranks[self.stage] = np.arange(self.pp)[:, None]
        return ranks

    @cached_property
    def stages_of_rank(self) -> IntArray:
        """The stages each rank holds, ascending, [ranks, stages_per_rank]."""
        return np.argsort(self.rank_of_stage, kind="stable").reshape(self.pp, self.stages_per_rank)


def table_of(layout: ResolvedLayout) -> ScheduleTable:
    """Return the table that the pipeline ranks of a legal layout follow."""
    return schedule_table(layout.schedule, layout.pp, layout.stages_per_rank, layout.accumulation)


@lru_cache(maxsize=16)
def schedule_table(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> ScheduleTable:
    """Return the table of a schedule, by its name in the run file, for a legal number of stages and micro-batches.

    Of 1f1b there may be fewer micro-batches than stages, which PyTorch refuses and other frameworks run. One rank computes
    its micro-batches one after another, whatever the schedule says. The table is complete: every stage computes every
    micro-batch once forward and once backward.
    """
    assert pp > 1 or stages_per_rank == 1, "one rank holds one stage"
    if pp == 1 or schedule == "1f1b":
        columns = _one_forward_one_backward(pp, microbatches)
    elif schedule == "gpipe":
        columns = _all_forward_all_backward(pp, microbatches)
    elif schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        columns = _interleaved(pp, stages_per_rank, microbatches, splits_backward=schedule in ZERO_BUBBLE)
    else:
        # Which the other schedules can do without for a second.
        from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: PLC0415

        found = schedule_actions(get_schedule_class(TORCH_SCHEDULES[schedule]), pp, stages_per_rank, microbatches)
        rows = [[(LETTERS[kind], stage, number) for kind, stage, number in rank] for rank in found]
        columns = np.asarray(rows, dtype=np.int64).transpose(2, 0, 1)
    table = ScheduleTable(schedule, pp, stages_per_rank, microbatches, *np.ascontiguousarray(columns))
    _check_complete(table)
    return table


def _all_forward_all_backward(pp: int, microbatches: int) -> IntArray:
    """Return the columns kind, stage and micro-batch of GPipe, each [ranks, actions].

    Huang et al., arXiv:1811.06965, section 2.3.
    """
    kind = np.repeat([Pass.FORWARD, Pass.BACKWARD], microbatches)
    microbatch = np.tile(np.arange(microbatches), 2)
    # The order is the same on every rank; each computes its own stage.
    shape = (pp, len(kind))
    stage = np.broadcast_to(np.arange(pp)[:, None], shape)
    return np.stack([np.broadcast_to(kind, shape), stage, np.broadcast_to(microbatch, shape)])


def _one_forward_one_backward(pp: int, microbatches: int) -> IntArray:
    """Return the columns of PipeDream-flush, called 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2.1), as above.

    Stage s begins with min(m, p - s) forward passes, then backward and forward passes alternate until the forward passes
    are used up. PyTorch's own table of it has the last stage one micro-batch off (2.13: `3F1, 3B0, 3F2, ...`).
    """
    order = []
    for stage in range(pp):
        ahead = min(microbatches, pp - stage)
        # Slots: the forward pass of micro-batch k is followed by the backward pass of k - ahead + 1, if there is one.
        forward = np.arange(microbatches)
        backward = np.arange(microbatches)
        slot = np.concatenate([2 * forward, 2 * (backward + ahead - 1) + 1])
        order.append(np.argsort(slot, kind="stable"))
    ordered = np.stack(order)
    kind = np.repeat([Pass.FORWARD, Pass.BACKWARD], microbatches)[ordered]
    stage_of_row = np.broadcast_to(np.arange(pp)[:, None], kind.shape)
    return np.stack([kind, stage_of_row, ordered % microbatches])


def _interleaved(pp: int, stages_per_rank: int, microbatches: int, *, splits_backward: bool) -> IntArray:
    """Order the passes of interleaved 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2.2) as PyTorch has it.

    Micro-batches come in rounds of about pp, of which each stage of a rank takes one after the other. splits_backward: the
    zero-bubble form (Qi et al., arXiv:2401.10241, ZB-H1): fewer forward passes ahead, and rank r computes the gradients of
    weights r backward passes later than those of inputs. PyTorch's own make an object of each action, which of thousands of
    micro-batches takes many seconds; a test holds these to them.
    """
    together = microbatches // max(1, microbatches // pp)
    number = np.arange(stages_per_rank * microbatches)
    turn = number // together % stages_per_rank
    microbatch = number // (together * stages_per_rank) * together + number % together
    most, rank = len(number), np.arange(pp)[:, None]
    hops = (1 if splits_backward else 2) * (pp - 1 - rank)
    ahead = np.minimum((stages_per_rank - 1) * together + hops, most)
    # In slot n of a rank: its forward pass n, backward pass n - ahead, and weights' gradients n - ahead - rank.
    slots = [np.broadcast_to(3 * number, (pp, most)), 3 * (number + ahead) + 1]
    kinds, turns = [Pass.FORWARD, Pass.INPUT if splits_backward else Pass.BACKWARD], [turn, stages_per_rank - 1 - turn]
    if splits_backward:
        slots, kinds, turns = [*slots, 3 * (number + ahead + rank) + 2], [*kinds, Pass.WEIGHT], [*turns, turns[1]]
    ordered = np.argsort(np.concatenate(slots, axis=1), axis=1, kind="stable")
    stage = np.concatenate(turns)[ordered] * pp + rank
    return np.stack([np.repeat(kinds, most)[ordered], stage, np.tile(microbatch, len(kinds))[ordered]])


def _check_complete(table: ScheduleTable) -> None:
    """Assert that each stage computes each micro-batch once forward and once backward, in an order that it can run."""
    name = f"{table.schedule} over {table.pp} x {table.stages_per_rank} stages, {table.microbatches} micro-batches"
    place = positions(table)
    count = np.bincount(table.kind.ravel(), minlength=len(Pass))
    each = table.n_stages * table.microbatches
    wanted = [each, 0, each, each] if count[Pass.WEIGHT] else [each, each, 0, 0]
    assert count.tolist() == wanted, f"{name}: {count.tolist()} actions by kind, not {wanted}"
    used = [kind for kind in Pass if wanted[kind]]
    assert (place[used] >= 0).all(), f"{name}: an action is missing"
    assert all((place[a] < place[b]).all() for a, b in pairwise(used)), f"{name}: out of order"
    ranks = np.zeros((table.pp, table.n_stages), dtype=np.bool_)
    ranks[np.arange(table.pp)[:, None], table.stage] = True
    assert (ranks.sum(axis=0) == 1).all(), f"{name}: a stage on several ranks"
    assert (ranks.sum(axis=1) == table.stages_per_rank).all(), f"{name}: stages unevenly spread"


def positions(table: ScheduleTable) -> IntArray:
    """Return where each action stands in its rank's order, [kinds, stages, micro-batches]; -1 where there is none."""
    place = np.full((len(Pass), table.n_stages, table.microbatches), -1, dtype=np.int64)
    place[table.kind, table.stage, table.microbatch] = np.arange(table.kind.shape[1])
    return place
