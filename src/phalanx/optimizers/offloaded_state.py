"""Optimizer state in host memory: it comes to the device for the update, a bucket of parameters at a time.

While one bucket is updated, the state of the next is on its way to the device, and that of the one before on its way back
(ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, leaves the update to the CPU; here it stays where the gradients are). What
updates is the optimizer itself, called for some parameters after the others: it gives the same bits as for all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from phalanx.config.schema import Optimizer
from phalanx.copy_stream import CopyStream
from phalanx.errors import ConfigError
from phalanx.host_memory import HostMemory
from phalanx.optimizers.optimizer_kind import (
    Group,
    HeldParameters,
    OptimizerKind,
    ScaledUpdates,
    ScaledUpdatesKind,
    find_optimizer,
    local_part,
)
from phalanx.torch_compat.sharded import with_local_part

BUCKET_BYTES = 1 << 27
"""Bytes of parameters whose state is on the device at a time, or those of one parameter that is larger. As much again is on
its way; copies of this size reach the link's full rate."""

Bucket = Sequence[Tensor]
"""Parameters that are updated together."""


class OffloadedOptimizer(ScaledUpdates):
    """An optimizer whose state lies in host memory between updates; its groups and its state are those of `inner`.

    Counts, which are single numbers, stay on the device.
    """

    def __init__(self, inner: torch.optim.Optimizer, kind: OptimizerKind) -> None:
        """inner: the optimizer, made by `kind`, whose updates of one parameter must not depend on others."""
        super().__init__(inner.param_groups, {})
        self.inner, self.kind = inner, kind
        self.state = inner.state
        self.written: list[Tensor] = []
        """See `OptimizerKind.written_copies`."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._memory = HostMemory(device)
        self._arriving, self._leaving = CopyStream(device), CopyStream(device)
        self._at_home: dict[tuple[Tensor, str], Tensor] = {}
        """State in host memory, by parameter and key."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update with the gradients as they are; when this returns, the state may be read."""
        assert closure is None
        self._update_buckets(self.inner.step)
        self.synchronise()

    @torch.no_grad()
    def update(self, divisor: Tensor, skip: Tensor) -> None:
        """See `ScaledUpdates`. The process does not wait; see `synchronise`."""
        self._update_buckets(lambda: self.kind.update(self.inner, divisor, skip))

    def synchronise(self) -> None:
        """Wait until all state is back in host memory; to be called before anything reads it there."""
        self._leaving.synchronise()

    def _update_buckets(self, update: Callable[[], object]) -> None:
        self.written = []
        buckets = self._split()
        if buckets:
            self._fetch(buckets[0])
        for bucket, following in zip_longest(buckets, buckets[1:], fillvalue=()):
            # What arrives next may take the memory of what has left.
            self._leaving.hold_present()
            self._arriving.hold_present()
            self._fetch(following)
            with self._only(bucket):
                update()
            self.written += self.kind.written_copies(self.inner)
            self._send_back(bucket)
        self._leaving.hold_present()

    def _split(self) -> Sequence[Bucket]:
        """Return the parameters with a gradient, in buckets of neighbours."""
        buckets: list[list[Tensor]] = []
        room = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size = local_part(parameter).nbytes
                if size > room:
                    buckets.append([])
                    room = BUCKET_BYTES
                buckets[-1].append(parameter)
                room -= size
        return buckets

    @contextmanager
    def _only(self, bucket: Bucket) -> Iterator[None]:
        """Let the groups hold the parameters of `bucket` alone."""
        chosen, whole = set(bucket), [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, whole, strict=True):
            group["params"] = [parameter for parameter in parameters if parameter in chosen]
        try:
            yield
        finally:
            for group, parameters in zip(self.param_groups, whole, strict=True):
                group["params"] = parameters

    def _fetch(self, bucket: Bucket) -> None:
        """Begin to copy the state of `bucket` to the device, where its optimizer finds it."""
        places = [
            (parameter, key, home)
            for parameter in bucket
            for key in self.state.get(parameter, {})
            if (home := self._at_home.get((parameter, key))) is not None
        ]
        # Of the stream that computes, which reads and frees it.
        there = [torch.empty_like(home, device=self._memory.device) for _, _, home in places]
        with self._arriving.behind_present():
            for (parameter, key, home), arriving in zip(places, there, strict=True):
                arriving.copy_(home, non_blocking=True)
                self.state[parameter][key] = with_local_part(self.state[parameter][key], arriving)

    def _send_back(self, bucket: Bucket) -> None:
        """Begin to copy the state of `bucket` to host memory, which is where it is from now on."""
        with self._leaving.behind_present():
            for parameter in bucket:
                for key, value in self.state.get(parameter, {}).items():
                    leaving = local_part(value)
                    if leaving.dim() == 0:
                        continue
                    home = self._at_home.get((parameter, key))
                    if home is None:
                        home = self._at_home[parameter, key] = self._memory.allocate_like(leaving)
                    home.copy_(leaving, non_blocking=True)
                    self.state[parameter][key] = with_local_part(value, home)


@dataclass(frozen=True)
class OffloadedKind(ScaledUpdatesKind):
    """An optimizer of another kind whose state is kept in host memory."""

    kind: OptimizerKind

    @property
    def state_values(self) -> float:  # type: ignore[override]
        """See `OptimizerKind`."""
        return self.kind.state_values

    @property
    def value_passes(self) -> int:  # type: ignore[override]
        """See `OptimizerKind`."""
        return self.kind.value_passes

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> OffloadedOptimizer:
        """See `OptimizerKind`. Raises ConfigError for a kind whose update of one parameter depends on others."""
        if not self.kind.per_parameter:
            raise ConfigError(
                f"layout.offload_optimizer=true: optimizer.name={config.name} does not update each parameter by itself; "
                "take adamw, adamw8bit or lion, or layout.offload_optimizer=false"
            )
        return OffloadedOptimizer(self.kind.build(groups, config, held), self.kind)

    def update_gain(self, config: Optimizer) -> float | None:
        """See `OptimizerKind`."""
        return self.kind.update_gain(config)

    def written_copies(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        """Return the copies that the updates of all buckets wrote."""
        assert isinstance(optimizer, OffloadedOptimizer)
        return optimizer.written


def choose_kind(config: Optimizer, *, offloaded: bool) -> OptimizerKind:
    """Return the optimizer that the run file names; offloaded: with its state in host memory."""
    kind = find_optimizer(config)
    return OffloadedKind(kind) if offloaded else kind
