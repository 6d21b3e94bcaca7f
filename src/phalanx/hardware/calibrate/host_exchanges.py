"""Times what the host does for exchanges: parameters that are gathered and reduced one by one, collectives in autograd.

All is so small that devices wait for the host. Every rank of the job calls these functions together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.hardware.calibrate.clock import Clock
from phalanx.layout.data_parallel.copy_engine.exchanges import CopyEngine
from phalanx.layout.data_parallel.copy_engine.peer_memory import reaches_peers
from phalanx.layout.data_parallel.fully_sharded import choose_exchanges
from phalanx.layout.mesh import Axis
from phalanx.layout.tensor_parallel.collectives import gather

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
    """For one collective of activations, forward or backward."""
    shard_s: float
    """For one parameter that is gathered, or whose gradient is reduced."""


def time_host_exchanges(clock: Clock) -> HostExchanges:
    """Of training over all ranks: the slowest rank's."""
    found = torch.tensor([_exchange_seconds(clock), _shard_seconds(clock)], dtype=torch.float64)
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
    with_exchange = clock.host_seconds(passes(lambda y: gather(y, axis, 0)[:_SIDE]), calls=_CALLS)
    without = clock.host_seconds(passes(lambda y: y.repeat(axis.size)[:_SIDE]), calls=_CALLS)
    return max(0.0, with_exchange - without) / (2 * _EXCHANGES)


def _shard_seconds(clock: Clock) -> float:
    sharded, plain = (
        clock.host_seconds(_passes(_stack(clock.device, shared)), calls=_CALLS) for shared in (True, False)
    )
    # Forward each is gathered; backward it is gathered again, and its gradient is reduced.
    return max(0.0, sharded - plain) / (3 * _UNITS * _TENSORS)


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(_TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def _stack(device: torch.device, shared: bool) -> nn.Module:
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
        copies = CopyEngine(world, device, torch.bfloat16)
    units: list[FSDPModule] = []
    for unit in (*stack, stack):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not stack)
        assert isinstance(unit, FSDPModule)
        units.append(unit)
    choose_exchanges(units, copies)
    return stack


def _passes(stack: nn.Module) -> Callable[[], object]:
    device = next(stack.parameters()).device
    x = torch.zeros(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)

    def call() -> None:
        stack(x).sum().backward()
        for parameter in stack.parameters():
            parameter.grad = None

    return call
