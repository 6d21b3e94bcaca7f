"""Times collectives, copies between devices, and matmuls that run beside either.

Every rank of the job calls these functions together. Groups are neighbouring ranks, and all groups of a size communicate at
once, as the axes of a layout do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.device import synchronize
from phalanx.layout.data_parallel.copy_engine import CopyEngine, PublishedShards
from phalanx.layout.data_parallel.fully_sharded import choose_exchanges
from phalanx.layout.data_parallel.peer_memory import reaches_peers
from phalanx.layout.mesh import Axis
from phalanx.layout.tensor_parallel.autograd_collectives import gather_parts
from phalanx.torch_compat import common as compat
from phalanx.torch_compat.fsdp import ShardSize
from phalanx.torch_compat.process_groups import new_group

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Exchanged:
    """One timed collective."""

    collective: str
    """Name in `hardware.collectives.COLLECTIVES`."""
    size: int
    """Bytes, as the collective counts them."""
    members: int
    seconds: float


@dataclass(frozen=True)
class Beside:
    """Seconds of products alone, of an exchange alone, and of both at once."""

    products: float
    exchange: float
    both: float


def groups_of(world: int, per_node: int) -> list[tuple[int, Group]]:
    """Return this rank's group of neighbours for each size to measure: powers of two within a node, and all ranks."""
    sizes = [size for size in (2, 4, 8, 16) if size < world and per_node % size == 0]
    found = []
    for size in sizes:
        first = dist.get_rank() // size * size
        group = new_group(list(range(first, first + size)), "calibrate")
        found.append((size, group))
    assert dist.group.WORLD is not None
    return [*found, (world, dist.group.WORLD)]


def time_collectives(
    clock: Clock, groups: Sequence[tuple[int, Group]], sizes: Sequence[int], more: Callable[[], bool]
) -> Iterator[Exchanged]:
    """Time every collective over every group and size until `more` returns False; the first size is always timed."""
    for size in sizes:
        if size != sizes[0] and not more():
            return
        for members, group in groups:
            for name, call in _collective_calls(size, members, group, clock.device).items():
                # Ranks that come late would make the others' first call seem slow.
                dist.barrier(group)
                yield Exchanged(name, size, members, clock.seconds(call, calls=_repeat_count(size)))


def _repeat_count(size: int) -> int:
    return max(2, min(20, 2**28 // size))


def _collective_calls(size: int, members: int, group: Group, device: torch.device) -> dict[str, Callable[[], object]]:
    count = size // 2 // members * members
    whole = torch.ones(count, device=device, dtype=torch.bfloat16)
    parts, other, name = whole.view(members, -1), torch.empty_like(whole), group.group_name
    calls: dict[str, Callable[[], object]] = {
        # A maximum leaves the numbers as they are, however often it is repeated; sums would overflow.
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: compat.all_gather(parts[0], name, members),
        "reduce_scatter": lambda: compat.reduce_scatter(parts, name, members),
        "all_to_all": lambda: compat.all_to_all(parts, name, members),
        "send": lambda: _pass_on(whole, other, members, group),
    }
    return calls


def _pass_on(sent: Tensor, received: Tensor, members: int, group: Group) -> None:
    """Send from each rank to the next one of its group."""
    here = dist.get_group_rank(group, dist.get_rank())
    following, before = (dist.get_global_rank(group, (here + step) % members) for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, sent, following, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def time_copies(clock: Clock, group: Group, sizes: Sequence[int]) -> Iterator[Exchanged]:
    """Time gathers by copies between devices (`data_parallel.copy_engine`); none where ranks cannot reach each other."""
    if not reaches_peers(clock.device, group):
        return
    for size in sizes:
        call = _copy_call(clock.device, group, size)
        yield Exchanged("copies", size, group.size(), clock.seconds(call, calls=_repeat_count(size)))


def _copy_call(device: torch.device, group: Group, size: int) -> Callable[[], object]:
    count = size // 2 // group.size()
    (gather,) = PublishedShards([[ShardSize(count, torch.bfloat16)]], device, group).gathers
    shard = torch.ones(count, device=device, dtype=torch.bfloat16)
    whole = torch.empty(count * group.size(), device=device, dtype=torch.bfloat16)
    return lambda: gather([shard], [whole])


def time_beside(clock: Clock, group: Group, rows: int, count: int, size: int, *, copies: bool) -> Beside | None:
    """Time `count` products of [rows, rows], alone and with gathers of `size` bytes beside most of them.

    copies: whether copy engines gather, in place of collectives; None is returned where ranks cannot reach each other's
    memory.
    """
    if copies and not reaches_peers(clock.device, group):
        return None
    device = clock.device
    a = torch.randn(rows, rows, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    gather = (
        _copy_call(device, group, size)
        if copies
        else _collective_calls(size, group.size(), group, device)["all_gather"]
    )
    side = _Side(device)
    dist.barrier(group)
    alone = clock.seconds(compute, calls=2)
    exchange = clock.seconds(gather, calls=_repeat_count(size))
    times = torch.tensor(max(1, int(_COVERED * alone / exchange)))
    # Every rank has to take part in as many.
    dist.all_reduce(times, op=dist.ReduceOp.MIN)

    def exchanges() -> None:
        for _ in range(int(times)):
            gather()

    def both() -> None:
        side.start(exchanges)
        compute()
        side.join()

    together = clock.seconds(both, calls=2)
    synchronize(device)
    return Beside(alone, int(times) * exchange, together)


_COVERED = 0.7
"""Share of the products' time with exchanges beside them."""


class _Side:
    """A second stream of work on an accelerator; on the CPU, work follows one after another."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def start(self, call: Callable[[], object]) -> None:
        """Issue `call` beside the work that follows."""
        if self._module is None:
            call()
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            call()

    def join(self) -> None:
        """Make later work wait for the second stream."""
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)


_UNITS, _TENSORS, _SIDE = 4, 12, 32
"""Modules that are sharded, parameters of each, and their rows and columns."""
_EXCHANGES = 16
"""Collectives in a row, each with its adjoint."""
_CALLS = 12
"""In a sample: as many on every rank."""


@dataclass(frozen=True)
class HostExchanges:
    """Seconds of the host."""

    exchange_s: float
    """Seconds per collective of activations, forward or backward."""
    shard_s: float
    """Seconds per parameter that is gathered, or whose gradient is reduced."""


def time_host_exchanges(clock: Clock) -> HostExchanges:
    """Time what the host does for exchanges in training over all ranks; the slowest rank's figures are returned."""
    sharded, plain = (
        clock.host_seconds(_training_pass(_build_stack(clock.device, shared)), calls=_CALLS) for shared in (True, False)
    )
    # Forward each is gathered; backward it is gathered again, and its gradient is reduced.
    per_shard = max(0.0, sharded - plain) / (3 * _UNITS * _TENSORS)
    found = torch.tensor([_exchange_seconds(clock), per_shard], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    exchange, shard = found.tolist()
    return HostExchanges(exchange, shard)


def _exchange_seconds(clock: Clock) -> float:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    axis = Axis("all", dist.get_rank(), world.size(), world, tuple(range(world.size())), world.group_name)

    def passes(exchange: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        x = torch.ones(_SIDE, device=clock.device, requires_grad=True)

        def call() -> None:
            y = x
            for _ in range(_EXCHANGES):
                y = exchange(y)
            torch.autograd.grad(y.sum(), x)

        return call

    # What it takes beside the exchange is what a view of the same takes.
    with_exchange = clock.host_seconds(passes(lambda y: gather_parts(y, axis, 0)[:_SIDE]), calls=_CALLS)
    without = clock.host_seconds(passes(lambda y: y.repeat(axis.size)[:_SIDE]), calls=_CALLS)
    return max(0.0, with_exchange - without) / (2 * _EXCHANGES)


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(_TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def _build_stack(device: torch.device, shared: bool) -> nn.Module:
    with torch.device(device):
        stack = nn.Sequential(*(_Unit() for _ in range(_UNITS)))
    if not shared:
        return stack.bfloat16()
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    mesh = init_device_mesh(device.type, (world.size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # As `layout.data_parallel.fully_sharded` does it, by copies between devices where training would take them.
    copies = None
    if device.type != "cpu" and reaches_peers(device, world):
        copies = CopyEngine(world, device)
    units: list[FSDPModule] = []
    for unit in (*stack, stack):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not stack)
        assert isinstance(unit, FSDPModule)
        units.append(unit)
    choose_exchanges(units, copies)
    return stack


def _training_pass(stack: nn.Module) -> Callable[[], object]:
    device = next(stack.parameters()).device
    x = torch.zeros(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)

    def call() -> None:
        stack(x).sum().backward()
        for parameter in stack.parameters():
            parameter.grad = None

    return call
