"""How long devices wait for the host to prepare what data-parallel ranks exchange: parameter by parameter, pass after pass.

`part_time` knows what the host takes to issue the operations of a part. Gathering and reducing its parameters comes to that,
and depends on how the layout shares them out, which a part does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.planner.time.operation_time import Direction, Floats, Ints, PartBreakdown
from phalanx.planner.time.part_time import PartTimes, slower_of
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps

_FELT = 0.4
"""Share of the device's time below which the host's is not felt: by the mean that `slower_of` takes, under 0.1%."""


@dataclass(frozen=True)
class HostWaits:
    """Seconds that a device waits more than `PartTimes` says, in one micro-batch of each part: [layouts, directions]."""

    block: Floats
    leading: Floats
    """Of a leading block."""
    embedding: Floats
    head: Floats

    @classmethod
    def of(cls, steps: Steps, times: PartTimes, profile: Profile) -> HostWaits | None:
        """Return the waits of these steps; None where no micro-batch gathers or reduces shards."""
        layouts = steps.layouts
        sharded = layouts.data_ranks * layouts.cp > 1
        if not np.any(sharded & (layouts.zero >= 2)):
            return None
        each = sharded & layouts.gathers_each
        # What a pipeline gathers for a backward pass stays for the next forward pass.
        gathered = each & (layouts.pp == 1)
        again = each & layouts.reshard_after_forward
        reduced = sharded & layouts.reduces_each
        gathers = profile.shard_host_s * np.stack([gathered, again], axis=1)
        reductions = profile.shard_host_s * np.stack([np.zeros_like(reduced), reduced], axis=1)
        # Chunks go around once forward; backward they and their gradients do.
        messages = profile.exchange_host_s * np.outer(steps.streams.messages, [1, 2])
        held, trained = steps.tensors, steps.trained_tensors

        def exchanges(gathered: Floats, reduced: Floats) -> Floats:
            return gathers * gathered[:, None] + reductions * reduced[:, None]

        return cls(
            block=_waits(times, steps.block, exchanges(held.block, trained.block) + messages),
            leading=_waits(times, steps.leading, exchanges(held.leading, trained.leading) + messages),
            embedding=_waits(times, steps.embedding, exchanges(held.embedding, trained.embedding)),
            head=_waits(times, steps.head, exchanges(held.head, trained.head)),
        )


def _waits(times: PartTimes, part: Ints, more: Floats) -> Floats:
    """part: of each layout. more: seconds of the host beside those that `times` knows, [layouts, directions]."""
    whole = times.seconds.sum(axis=2)
    device = whole - times.seconds[..., PartBreakdown.HOST]
    found = np.zeros((len(part), len(Direction)))
    for direction in Direction:
        busy, host = device[part, direction], times.issued[part, direction] + more[:, direction]
        some = np.flatnonzero((more[:, direction] > 0) & (host > _FELT * busy))
        found[some, direction] = slower_of(busy[some], host[some]) - whole[part[some], direction]
    return found
