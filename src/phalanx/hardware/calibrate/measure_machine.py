"""Everything that is measured on one rank, in order, and what all ranks found put together.

Ranks measure at the same time, as they will train: they share power, cooling and memory of their node.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.errors import ConfigError
from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.calibrate.measured_sizes import Effort, shapes_for
from phalanx.hardware.calibrate.time_exchanges import (
    Beside,
    Exchanged,
    HostExchanges,
    groups_of,
    time_beside,
    time_collectives,
    time_copies,
    time_host_exchanges,
)
from phalanx.hardware.calibrate.time_operations import (
    Passed,
    TimedBlock,
    time_blocks,
    time_host,
    time_optimizer,
    time_shapes,
    time_traffic,
    warm_up,
)
from phalanx.hardware.device import device_name, synchronize
from phalanx.hardware.device_facts import device_kind
from phalanx.hardware.interconnect import Links, Switch
from phalanx.hardware.machine import Machine, Node, described_names, load_machine
from phalanx.planner.time.timed_operations import TimedOperation

Report = Callable[[str], None]

_FOR_BLOCKS = 0.55
"""Share of the time after which single operations and exchanges stop, so that blocks have the rest."""
_FOR_COMPILED = 0.85
"""Share of it after which no other block is compiled; uncompiled ones take a second each."""
_WARM_S = 3.0


@dataclass(frozen=True)
class Measurements:
    """Measurements of one rank, or of all of them together."""

    operations: tuple[TimedOperation, ...]
    traffic: tuple[Passed, ...]
    optimizer: tuple[Passed, ...]
    host_s: float
    exchanged: tuple[Exchanged, ...] = ()
    host_exchanges: HostExchanges | None = None
    """None on the CPU, where host and device are one."""
    collectives_beside: Beside | None = None
    copies_beside: Beside | None = None
    blocks: tuple[TimedBlock, ...] = ()
    """Blocks timed as they run in training: compiled, but on the CPU."""
    eager_blocks: tuple[TimedBlock, ...] = ()
    """Not compiled; none on the CPU, where no others are."""
    beside: dict[str, float] | None = None
    """Bytes of the device that no tensor has: `context`, and `communicator` for each group; None on the CPU."""


@dataclass
class Deadline:
    """When to stop. All ranks agree on it, or they would wait for one another for ever."""

    seconds: float
    together: bool
    """Whether there are other ranks."""
    start: float = field(default_factory=time.monotonic)

    def before(self, share: float) -> bool:
        """Return whether less than this share of the time has passed, on every rank."""
        more = time.monotonic() - self.start < share * self.seconds
        if not self.together:
            return more
        verdict = torch.tensor(int(more))
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict)


def measure_rank(device: torch.device, effort: Effort, per_node: int, seconds: float, report: Report) -> Measurements:
    """Measure on this rank. per_node: ranks on each node. seconds: how long it may take, about."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    clock = Clock(device, effort.span_s, effort.samples)
    free = 2.0**32 if device.type == "cpu" else float(torch.get_device_module(device).mem_get_info(device)[0])
    shapes = shapes_for(effort, free)
    deadline = Deadline(seconds, several)
    warm_up(clock, _WARM_S)
    count = len(shapes.products) + len(shapes.singles) + len(shapes.doubles) + len(shapes.eighths)
    report(f"{count} matrix products and {len(shapes.attentions)} calls of attention")
    operations = tuple(time_shapes(clock, shapes, lambda: deadline.before(_FOR_BLOCKS)))
    report("memory traffic, optimizer, host")
    found = Measurements(
        operations=operations,
        traffic=tuple(time_traffic(clock, [size for size in effort.traffic if size < free / 4])),
        optimizer=tuple(time_optimizer(clock, [count for count in effort.optimizer if 16 * count < free / 2])),
        host_s=time_host(clock),
    )
    # Before any group communicates: what is taken later belongs to the communicators.
    context = _unowned_bytes(device)
    if several:
        sized = groups_of(dist.get_world_size(), per_node)
        report(f"collectives of {', '.join(str(members) for members, _ in sized)} ranks")
        timed = list(time_collectives(clock, sized, effort.exchanged, lambda: deadline.before(_FOR_BLOCKS)))
        report("copies between devices, computing beside exchanges, and what the host does for them")
        _, group = max((pair for pair in sized if pair[0] <= per_node), key=lambda pair: pair[0], default=sized[0])
        timed += time_copies(clock, group, effort.copied)
        rows, calls, bytes_of_one = effort.beside
        found = replace(
            found,
            exchanged=tuple(timed),
            host_exchanges=None if clock.device.type == "cpu" else time_host_exchanges(clock),
            collectives_beside=time_beside(clock, group, rows, calls, bytes_of_one, copies=False),
            copies_beside=time_beside(clock, group, rows, calls, bytes_of_one, copies=True),
        )
    if context is not None:
        groups = len({one.members for one in found.exchanged})
        more = (_unowned_bytes(device) or context) - context
        found = replace(found, beside={"context": context, "communicator": max(0.0, more / max(1, groups))})
    report(f"up to {len(effort.blocks)} whole blocks")
    compiled = device.type != "cpu"
    blocks = tuple(time_blocks(clock, effort.blocks, lambda: deadline.before(_FOR_COMPILED), compiled=compiled))
    if not compiled:
        return replace(found, blocks=blocks)
    eager = tuple(time_blocks(clock, effort.blocks, lambda: deadline.before(1.0), compiled=False))
    return replace(found, blocks=blocks, eager_blocks=eager)


def _unowned_bytes(device: torch.device) -> float | None:
    """Return the bytes of the device that PyTorch's allocator does not have: contexts, libraries, buffers of collectives."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    synchronize(device)
    module.empty_cache()
    free, total = module.mem_get_info(device)
    return float(total - free - module.memory_reserved(device))


# --- several ranks -----------------------------------------------------------------------------------------------------


def gather_measurements(mine: Measurements) -> Measurements:
    """Return what all ranks found: medians over the ranks, slowed down to the slowest, which the others wait for."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return mine
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return join_measurements(every)


def join_measurements(every: Sequence[Measurements]) -> Measurements:
    """Join the measurements of several ranks, which each has in the same order."""
    first = every[0]
    times = np.array([[x.seconds for x in one.operations] for one in every])
    typical = np.median(times, axis=0)
    # A synchronous step is as slow as its slowest device, whose ratio to the median is the same in most operations.
    slowest = float(np.median(times / typical, axis=1).max(initial=1.0))
    return Measurements(
        operations=tuple(
            replace(x, seconds=slowest * s) for x, s in zip(first.operations, typical.tolist(), strict=True)
        ),
        traffic=_median_seconds([one.traffic for one in every]),
        optimizer=_median_seconds([one.optimizer for one in every]),
        host_s=max(one.host_s for one in every),
        exchanged=_median_seconds([one.exchanged for one in every]),
        host_exchanges=first.host_exchanges,
        collectives_beside=_slowest_beside([one.collectives_beside for one in every]),
        copies_beside=_slowest_beside([one.copies_beside for one in every]),
        blocks=_slowest_blocks([one.blocks for one in every]),
        eager_blocks=_slowest_blocks([one.eager_blocks for one in every]),
        beside=_largest_bytes([one.beside for one in every]),
    )


def _median_seconds(every: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    seconds = np.median([[x.seconds for x in one] for one in every], axis=0).tolist()
    return tuple(replace(x, seconds=s) for x, s in zip(every[0], seconds, strict=True))


def _slowest_blocks(every: Sequence[tuple[TimedBlock, ...]]) -> tuple[TimedBlock, ...]:
    return tuple(
        replace(
            block,
            forward_s=max(one[place].forward_s for one in every),
            backward_s=max(one[place].backward_s for one in every),
        )
        for place, block in enumerate(every[0])
    )


def _slowest_beside(every: Sequence[Beside | None]) -> Beside | None:
    known = [one for one in every if one is not None]
    return max(known, key=lambda one: one.both, default=None)


def _largest_bytes(every: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [one for one in every if one is not None]
    return {name: max(one[name] for one in known) for name in known[0]} if known else None


def describe_this_machine(device: torch.device, per_node: int, cluster: str | None) -> Machine:
    """Return the machine that `device` belongs to.

    per_node: ranks on this node. cluster: a shipped name or a description's path. Raises ConfigError for a description of
    other devices, or of fewer on a node.
    """
    name = device_kind(device_name(device))
    if cluster is None:
        return _find_shipped(name, per_node) or plain_machine(name, per_node)
    machine = load_machine(cluster)
    if machine.node.device != name:
        raise ConfigError(
            f"--cluster {cluster} has {machine.node.device} devices, this is {name} ({device_name(device)}); "
            "leave --cluster out, or give the description of this machine"
        )
    if machine.node.devices < per_node:
        raise ConfigError(
            f"--cluster {cluster} has {machine.node.devices} devices a node, {per_node} ranks run on this one"
        )
    return machine


def _find_shipped(device: str, per_node: int) -> Machine | None:
    """Return the smallest shipped description of such devices; None where there is none."""
    machines = [load_machine(each) for each in described_names()]
    fitting = [one for one in machines if one.node.device == device and one.node.devices >= per_node]
    return min(fitting, key=lambda one: (one.node.devices, one.name), default=None)


def plain_machine(device: str, per_node: int) -> Machine:
    """Return a machine of one node whose devices all reach one another alike."""
    name = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    # Measured rates are stored as shares of this nominal bandwidth, so any figure will do.
    links = Links(source="assumption", kind="nvlink3", switch=Switch(gb_s=100.0))
    return Machine(
        name=name if name and name[0].isalpha() else f"device-{name}",
        about=f"one node of {device}",
        documents={},
        node=Node(source="this machine", devices=max(per_node, 1), device=device, cores_per_task=1),
        links=links,
        slurm=None,
    )
