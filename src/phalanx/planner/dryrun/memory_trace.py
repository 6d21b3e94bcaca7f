"""Counts the memory behind all tensors while real code runs, and the collectives it issues; on fake tensors or real ones.

A dispatch mode sees every operation below autograd. Memory is known by its storage, so views count once, and it is gone
when Python and autograd have let go of it: what is counted is what PyTorch's caching allocator would count as allocated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from phalanx.host_memory import HostMemory
from phalanx.layout.context_parallel.ring_attention import (
    RING_ATTENTION,
    RING_GRADIENTS,
    Ring,
    attend_along,
    gradients_along,
)
from phalanx.torch_compat import common as compat
from phalanx.torch_compat import fake as compat_fake

ROUNDING = 512
"""Bytes of which the caching allocator gives out whole multiples."""

Category = Literal["parameters", "gradients", "optimizer", "gathered", "communication", "activations", "other"]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "communication",
    "other",
)


@dataclass(frozen=True)
class Moment:
    """Where in an optimizer step something happens."""

    phase: str
    """forward, backward, or update (gradient norm and optimizer)."""
    module: str = ""
    """stage, embedding, block N or head."""
    stage: int = 0
    microbatch: int = 0
    """From 1; 0 outside of micro-batches."""

    def __str__(self) -> str:
        """Return the moment in words."""
        if not self.microbatch:
            return self.phase
        return f"{self.phase} of {self.module}, micro-batch {self.microbatch}"


@dataclass(slots=True)
class Allocation:
    """A piece of memory from when it is made to when it is freed; times are numbers of events."""

    size: int
    """Bytes, rounded up."""
    made: int
    operation: str
    unit: int | None
    """The call of a module in a forward pass in which it was made."""
    freed: int | None = None
    category: Category | None = None
    """Where something says what it is; the rest follows from when it goes."""


@dataclass(frozen=True)
class Call:
    """A collective as one rank issues it."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, send, receive or broadcast."""
    group: str
    """Name of the process group."""
    bytes: int
    """Size of the whole tensor: gathered, not yet scattered, summed, exchanged or sent."""
    peer: int | None = None
    """The rank within the group that is sent to or received from."""


@dataclass(frozen=True)
class Point:
    """A stretch of an optimizer step and the most memory in it."""

    moment: Moment
    peak: int
    """Bytes."""


class StepTrace(compat_fake.UncompiledMode):
    """While active, keeps account of memory and collectives; `begin` starts anew what belongs to one step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes."""
        self.moment = Moment("build")
        self.calls: Counter[Call] = Counter()
        self._fake = compat_fake.active_fake_mode()
        self._allocations: dict[int, Allocation] = {}
        self._on_host: set[int] = set()
        self.host = 0
        """Bytes that were given out in host memory, which are no part of all else."""
        self._giving_host = False
        self._ended: list[Allocation] = []
        self._time = 0
        self._units: list[int] = []
        self._unit_end: dict[int, int] = {}
        self._unit_count = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step: forget peaks, collectives and what has gone by now."""
        self.calls.clear()
        self._ended.clear()
        self.peak, self.peak_time, self.peak_moment = self.now, self._time, self.moment
        self.points: list[Point] = []
        self._stretch_peak = self.now

    @contextlib.contextmanager
    def watching(self) -> Iterator[StepTrace]:
        """Keep account of all that runs in here, and of what changes sizes unseen."""
        with compat_fake.watch_resizes(self._resized), self:
            yield self

    def go_to(self, moment: Moment) -> None:
        """Attribute what follows to `moment`."""
        if moment != self.moment:
            self.points.append(Point(self.moment, self._stretch_peak))
            self.moment, self._stretch_peak = moment, self.now

    def enter_unit(self) -> None:
        """Enter a module's forward pass; what is made in it and outlives it is kept for the backward pass."""
        self._unit_count += 1
        self._units.append(self._unit_count)

    def leave_unit(self) -> None:
        """Leave the innermost module's forward pass."""
        self._time += 1
        self._unit_end[self._units.pop()] = self._time

    def label(self, tensors: Any, category: Category) -> None:
        """Say what the memory behind `tensors` is."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and (found := self._allocations.get(compat.storage_key(tensor))):
                found.category = category

    def give_host_memory(
        self, give: Callable[[HostMemory, Tensor], Tensor], memory: HostMemory, like: Tensor
    ) -> Tensor:
        """Give out host memory as `HostMemory.allocate_like`, which is `give`, does, and leave it out of the account."""
        self._giving_host = True
        try:
            found = give(memory, like)
        finally:
            self._giving_host = False
        self.host += like.nbytes
        return found

    def at_peak(self) -> dict[Category, int]:
        """Return the bytes by category at the moment of the peak; to be asked once the step is over."""
        found: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for allocation in (*self._ended, *self._allocations.values()):
            if allocation.made <= self.peak_time and (allocation.freed is None or allocation.freed > self.peak_time):
                category = allocation.category or "other"
                end = self._unit_end.get(allocation.unit or 0)
                kept = end is not None and (allocation.freed is None or allocation.freed > end)
                # What tensor parallelism gathers is kept for the backward pass like any other input of a matrix.
                if kept and category in ("communication", "other"):
                    category = "activations"
                found[category] += allocation.size
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and account for what it makes."""
        if func is compat_fake.ASK_DEVICE:
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            # The whole of a sharded tensor is nowhere; what becomes of this rank's part comes by on its own.
            return NotImplemented
        keywords = kwargs or {}
        if func is RING_ATTENTION or func is RING_GRADIENTS:
            # What stands behind ring attention is one operation to PyTorch, which makes memory and communicates.
            *tensors, group, rank, size = args
            ring = Ring(rank, size, compat.process_group(group))
            with self:
                return (attend_along if func is RING_ATTENTION else gradients_along)(ring, *tensors)
        # Shape propagation runs operations on fake tensors of its own, which stand for no memory of this rank.
        if compat_fake.active_fake_mode() is not self._fake:
            return func(*args, **keywords)
        if self._fake is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            # What was awaited is the tensor itself; the fake operation would make another, which no rank has.
            return args[0]
        result = func(*args, **keywords)
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            # Tensors on meta have no memory; views share a storage, which counts once.
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            storage, key = tensor.untyped_storage(), compat.storage_key(tensor)
            if key in self._on_host:
                continue
            if self._giving_host:
                self._on_host.add(key)
                weakref.finalize(storage, self._on_host.discard, key).atexit = False
            elif key not in self._allocations:
                weakref.finalize(storage, self._free, key).atexit = False
                self._allocate(key, storage.nbytes(), str(func))
        if func.namespace == "fsdp":
            self._label_unowned((args, keywords, result), "gathered")
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._communicate(func, args, keywords, result)
        return result

    def _allocate(self, key: int, size: int, operation: str, category: Category | None = None) -> None:
        # As the caching allocator counts: each tensor takes whole multiples of its rounding.
        size = -(-size // ROUNDING) * ROUNDING
        self._time += 1
        self.now += size
        # In a backward pass modules run again to recompute: what is made there is no kept activation.
        unit = self._units[-1] if self._units and not compat_fake.in_backward() else None
        self._allocations[key] = Allocation(size, self._time, operation, unit, None, category)
        self._stretch_peak = max(self._stretch_peak, self.now)
        if self.now > self.peak:
            self.peak, self.peak_time, self.peak_moment = self.now, self._time, self.moment

    def _free(self, key: int) -> Allocation | None:
        allocation = self._allocations.pop(key, None)
        if allocation is not None:
            self._time += 1
            self.now -= allocation.size
            allocation.freed = self._time
            self._ended.append(allocation)
        return allocation

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key in self._allocations:
            before = self._free(key)
            assert before is not None
            self._allocate(key, storage.nbytes(), before.operation, before.category)

    def _label_unowned(self, tensors: Any, category: Category) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                found = self._allocations.get(compat.storage_key(tensor))
                if found is not None and found.category is None:
                    found.category = category

    def _communicate(self, func: Any, args: Any, keywords: dict[str, Any], result: Any) -> None:
        operation = _OPERATIONS.get(func._opname)
        if operation is None:
            return
        named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **keywords}
        group = named.get("process_group", named.get("group_name"))
        name = compat_fake.group_name(group)
        assert name is not None, f"no process group in {func}"
        tensors = {id(t): t for t in tree_leaves((args, keywords, result)) if isinstance(t, Tensor)}.values()
        # In place or out of place, the whole tensor is the largest one; coalesced operations have several.
        sizes = [tensor.nbytes for tensor in tensors]
        if operation in ("all_reduce", "send", "receive", "broadcast"):
            size = sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        else:
            size = max(sizes)
        peer = named.get("dst", named.get("src")) if operation in ("send", "receive") else None
        self.calls[Call(operation, name, size, peer)] += 1
        self._label_unowned(list(tensors), "communication")


_OPERATIONS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""PyTorch's names of collectives."""
