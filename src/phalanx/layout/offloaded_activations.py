"""Activations in host memory: what a block keeps for its backward pass leaves while the next block computes.

They are copied at the block's end and gone at the end of the next one; they come back while the block behind goes backward
(Megatron-Core's `--cpu-offloading`, torchtune's `OffloadActivations`). So at most those of two blocks are on the device,
beside those of a stage's last block, which would have to come back at once and stay. What a block keeps is seen through
PyTorch's hooks of saved tensors, around the block: outside its compiled program, and of a block that is recomputed it is the
block's input. Parameters, what all blocks read and small tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from phalanx.copy_stream import CopyStream
from phalanx.host_memory import HostMemory
from phalanx.nn.layers import Linear
from phalanx.torch_compat import common as compat

SMALLEST_BYTES = 1 << 16
"""Bytes of the smallest tensor that leaves: a copy of fewer takes as long as it takes to ask for it."""


def leaves_device(size: int) -> bool:
    """Return whether activations of `size` bytes are worth a copy."""
    return size >= SMALLEST_BYTES


def offload_blocks(blocks: Sequence[nn.Module], activations: OffloadedActivations, *, held_input: bool) -> None:
    """Let what `blocks` keep for their backward passes lie in `activations`, but for the last block.

    blocks: those of one stage, in the order in which they compute. held_input: whether somebody else keeps the input of the
    first one, as a pipeline does.
    """
    for number, block in enumerate(blocks):
        kind: Any = type(block)
        # As with recompute, a class for all blocks: equal ones share one compiled program, inside of this call.
        block.__class__ = _offloaded_class(kind)
        place = _Place(activations, first=number == 0, last=number == len(blocks) - 1, held_input=held_input)
        # Past `nn.Module`, which would look through it for parameters.
        object.__setattr__(block, "_activations_place", place)


@cache
def _offloaded_class(kind: Any) -> Any:
    # The call, not `forward`: hooks of FSDP2 and compiled programs are inside of it.
    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.__call__(self, *args, **named)
        place: _Place = self._activations_place  # type: ignore[assignment]
        return place.run(lambda: kind.__call__(self, *args, **named), self, args, named)

    return type(f"Offloaded{kind.__name__}", (kind,), {"__call__": call})


@dataclass(frozen=True)
class _Place:
    """Says where a block stands in its stage, and runs it there."""

    activations: OffloadedActivations
    first: bool
    last: bool
    held_input: bool

    def run(self, call: Callable[[], Any], block: nn.Module, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return what `call` gives, which is the block on these arguments, and offload what it keeps."""
        given = args if self.first and self.held_input else args[1:]
        group = self.activations.begin(block, tree_leaves((given, named)), first=self.first, stays=self.last)
        with saved_tensors_hooks(group.pack, _unpack):
            result = call()
        self.activations.end(group, result)
        return result


class OffloadedActivations:
    """Activations of the blocks of a rank in host memory. Passes of several micro-batches and stages may alternate."""

    def __init__(self, device: torch.device) -> None:
        self.memory = HostMemory(device)
        # One stream for both ways: a copy to a piece of host memory then follows the one that has read it.
        self.copies = CopyStream(device)
        self._free: dict[int, list[Tensor]] = {}
        """Host memory that nothing lies in, by bytes."""
        self._leaving: _Group | None = None
        """Group that left last, still on the device too."""

    def begin(self, block: nn.Module, given: Sequence[Any], *, first: bool, stays: bool) -> _Group:
        """Return the group for what a call of `block` keeps. given: what it is called with that others keep. first: whether
        the pass through its stage begins with it. stays: whether all stays on the device."""
        # After a pass that failed, something may be left of it.
        previous = self._leaving = None if first else self._leaving
        return _Group(self, block, given, previous, stays=stays)

    def end(self, group: _Group, result: Any) -> None:
        """Begin to copy what `group` keeps, and give up what the block before has left. result: of the block."""
        if self._leaving is not None:
            self.copies.hold_present()
            self._leaving.give_up()
        group.leave(result)
        self._leaving = group

    def take_memory(self, like: Tensor) -> Tensor:
        """Return host memory for `like`, which is one row of bytes."""
        free = self._free.get(like.numel())
        return free.pop() if free else self.memory.allocate_like(like)

    def return_memory(self, home: Tensor) -> None:
        """Take host memory back whose content nobody needs once the copies so far are done."""
        self._free.setdefault(home.numel(), []).append(home)


@dataclass
class _Kept:
    """A piece of memory that a block keeps, whole: several saved tensors may be views of it."""

    on_device: Tensor | None
    """Bytes, [size]."""
    home: Tensor | None = None
    """The same in host memory."""
    readers: int = 0
    """Saved tensors that are to be read still."""


@dataclass(frozen=True)
class _Saved:
    """Stands in autograd's graph for a tensor that leaves."""

    group: _Group
    kept: _Kept
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Stays:
    """Stands there for a tensor that stays on the device, in a group whose backward pass has to be noticed."""

    group: _Group
    tensor: Tensor


class _Group:
    """Holds what one call of a block keeps for its backward pass."""

    def __init__(
        self,
        owner: OffloadedActivations,
        block: nn.Module,
        given: Sequence[Any],
        previous: _Group | None,
        *,
        stays: bool,
    ) -> None:
        self.owner, self.block, self.previous, self.stays = owner, block, previous, stays
        self.kept: dict[int, _Kept] = {}
        self.shared: set[int] = {compat.storage_key(one) for one in given if isinstance(one, Tensor)}
        """Memory that others hold."""
        if previous is not None:
            self.shared |= previous.handed_on
        self.handed_on: set[int] = set()
        """Memory of the block's result, where the block keeps that too."""
        self.parameters: set[int] | None = None
        """Memory of the block's parameters, once it has been asked for."""
        self.waits = False
        """Whether what comes back has not been waited for."""

    def pack(self, tensor: Tensor) -> Tensor | _Saved | _Stays:
        """Return what stands for a saved tensor until its backward pass."""
        if self.stays:
            return _Stays(self, tensor)
        key = compat.storage_key(tensor)
        kept = self.kept.get(key)
        if kept is None:
            if not self._leaves(tensor, key):
                return tensor
            kept = self.kept[key] = _Kept(_all_bytes(tensor))
        kept.readers += 1
        return _Saved(self, kept, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _leaves(self, tensor: Tensor, key: int) -> bool:
        size = tensor.untyped_storage().nbytes()
        if not leaves_device(size) or size % tensor.itemsize or key in self.shared or compat.wraps_tensors(tensor):
            return False
        if self.parameters is None:
            # Asked here, once parameters have been gathered.
            layers = [one for one in self.block.modules() if isinstance(one, Linear)]
            beside = tree_leaves([(layer.held, layer.gradient_sum) for layer in layers])
            held: Iterator[Tensor] = chain(self.block.parameters(), self.block.buffers(), beside)
            self.parameters = {compat.storage_key(one) for one in held if one is not None}
        return key not in self.parameters

    def leave(self, result: Any) -> None:
        """Begin to copy all to host memory. result: of the block."""
        given_on = {compat.storage_key(one) for one in tree_leaves(result) if isinstance(one, Tensor)}
        # The next block keeps it too, which goes backward first: it stays.
        self.handed_on = given_on & self.kept.keys()
        with self.owner.copies.behind_present():
            for key, kept in self.kept.items():
                if key not in self.handed_on:
                    assert kept.on_device is not None
                    kept.home = self.owner.take_memory(kept.on_device)
                    kept.home.copy_(kept.on_device, non_blocking=True)

    def give_up(self) -> None:
        """Free on the device what has been copied."""
        for kept in self.kept.values():
            if kept.home is not None:
                kept.on_device = None

    def fetch(self) -> None:
        """Begin to copy all back, unless it is there or under way."""
        gone = [kept for kept in self.kept.values() if kept.on_device is None and kept.home is not None]
        # Of the stream that computes, which reads and frees it.
        for kept in gone:
            assert kept.home is not None
            kept.on_device = torch.empty_like(kept.home, device=self.owner.memory.device)
        with self.owner.copies.behind_present():
            for kept in gone:
                assert kept.home is not None and kept.on_device is not None
                kept.on_device.copy_(kept.home, non_blocking=True)
                self.owner.return_memory(kept.home)
                kept.home = None
        self.waits = self.waits or bool(gone)

    def enter_backward(self) -> None:
        """Have all of the group on the device, and what the block before it keeps on its way."""
        self.fetch()
        if self.waits:
            self.owner.copies.hold_present()
            self.waits = False
        if self.previous is not None:
            self.previous.fetch()
            self.previous = None


def _unpack(saved: Tensor | _Saved | _Stays) -> Tensor:
    """Return a saved tensor for its backward pass."""
    if isinstance(saved, Tensor):
        return saved
    saved.group.enter_backward()
    if isinstance(saved, _Stays):
        return saved.tensor
    kept = saved.kept
    assert kept.on_device is not None, "activations in host memory are read once"
    found = kept.on_device.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
    kept.readers -= 1
    if not kept.readers:
        # From here on autograd alone holds it, and frees it when the operation is done.
        kept.on_device = None
    return found


def _all_bytes(tensor: Tensor) -> Tensor:
    """Return the memory behind `tensor` as one row of bytes."""
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
