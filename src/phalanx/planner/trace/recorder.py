"""Runs a part on meta tensors and writes down every operation, and when memory is made and freed: an eager run's timeline.

Autograd, recomputation and Python's own freeing of memory take part, so what is kept is what an uncompiled run keeps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.planner.schedule.timeline import Access, Role, Step, Timeline
from phalanx.planner.trace.operations import (
    COLLECTIVES,
    FREE,
    Collective,
    Phase,
    attention_of,
    base_name,
    kind_of,
    matmul_of,
    tensors_in,
)
from phalanx.torch_compat.common import storage_key

Opaque = Callable[..., Any]
"""Runs what stands behind an operation that PyTorch sees as a whole."""


class Recorder(TorchDispatchMode):
    """While active, adds what runs to `timeline`; the values it computes with are meta tensors."""

    def __init__(self, axes: dict[str, str], opaque: dict[Any, Opaque] | None = None) -> None:
        """Begin an empty timeline. axes: the layout's axes by names of process groups. opaque: operations to look into."""
        super().__init__()
        self.timeline = Timeline()
        self.backward = False
        self.axes = axes
        self.opaque = opaque or {}
        self._numbers: dict[int, int] = {}
        self._inside = 0
        self._inner = 0
        self._closed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and write it down."""
        keywords = kwargs or {}
        name = base_name(func)
        # Nothing is under way on meta: what is waited for is the tensor itself.
        if name == "wait_tensor":
            return args[0]
        if func in self.opaque:
            self._inner += 1
            try:
                with self:
                    return self.opaque[func](self, *args, **keywords)
            finally:
                self._inner -= 1
        if self._inner:
            # Below autograd, where what stands behind an operation runs, compound operations arrive whole.
            with self:
                parts = func.decompose(*args, **keywords)
            if parts is not NotImplemented:
                return parts
        # Nothing is computed on meta, and PyTorch 2.11 cannot add there into a matrix of another format.
        result = keywords["out"] if "out" in keywords else on_meta(func, args, keywords)
        # A view makes no memory and moves none.
        if not func.is_view:
            self._record(func, name, args, keywords, result)
        return result

    @contextlib.contextmanager
    def recomputable(self) -> Iterator[None]:
        """Mark what runs in here as part of a forward pass: in the backward pass it is recompute."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def hold(self, tensor: Tensor, role: Role, name: str = "") -> int:
        """Return the number of the buffer behind `tensor`, which is not counted as made by a step."""
        return self._number(tensor, name or role, role)[0]

    def add(self, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Add a step that ran without being seen; its results are buffers from here on."""
        for tensor in reads:
            number, _ = self._number(tensor, step.name, "given")
            # An expanded view has more elements than its memory.
            step.reads.append(Access(number, min(tensor.numel(), self.timeline.buffers[number].elements)))
        for tensor in writes:
            number, new = self._number(tensor, step.name, "made")
            if new:
                step.makes.append(number)
            step.writes.append(Access(number, tensor.numel()))
        self._steps.append(step)

    def relabel(self, tensor: Tensor, role: Role) -> None:
        """Give the buffer behind `tensor` another role than that of something made here."""
        number = self._number(tensor, role, role)[0]
        self.timeline.buffers[number].role = role
        for step in self._steps:
            if number in step.makes:
                step.makes.remove(number)

    def adopt(self, tensor: Tensor, number: int) -> None:
        """Let `tensor` stand for a buffer of the timeline."""
        storage = tensor.untyped_storage()
        self._numbers[storage._cdata] = number
        self._watch(storage, storage._cdata)

    def extend(self, steps: list[Step]) -> None:
        """Add finished steps."""
        self._steps.extend(steps)

    def close(self) -> list[Step]:
        """End the recording and return all steps, in order; what is freed from here on is no part of them."""
        self._closed = True
        return [*self.timeline.forward, *self.timeline.backward]

    def living(self) -> list[int]:
        """Return the buffers that are alive and were made by a step."""
        found = sorted(self._numbers.values())
        return [number for number in found if self.timeline.buffers[number].role == "made"]

    @property
    def phase(self) -> Phase:
        """Phase of what runs now."""
        if not self.backward:
            return "forward"
        return "recompute" if self._inside else "backward"

    @property
    def _steps(self) -> list[Step]:
        return self.timeline.backward if self.backward else self.timeline.forward

    def _record(self, func: Any, name: str, args: Any, keywords: dict[str, Any], result: Any) -> None:
        reads, writes = tensors_in((args, keywords)), tensors_in(result)
        if not writes:
            return
        kind: Any = "free" if name in FREE else kind_of(name)
        step = Step(name, kind, self.phase, writes[0].dtype)
        if kind == "free":
            reads = []
        elif kind == "collective":
            step.collective = collective_of(name, args, reads[0], writes[0], self.axes)
        else:
            step.matmul, step.attention = matmul_of(name, args), attention_of(func, args, keywords)
            if kind in ("pointwise", "reduction"):
                step.work = [max(tensor.numel() for tensor in (*reads, *writes))]
            step.rows_of_tables = kind == "lookup"
        self.add(step, reads, writes)
        if kind == "free":
            # Making memory writes nothing into it.
            step.writes = []

    def _number(self, tensor: Tensor, name: str, role: Role) -> tuple[int, bool]:
        """Return the number of the buffer behind `tensor`, and whether it is seen for the first time."""
        storage = tensor.untyped_storage()
        # Views share a storage, so its address tells buffers apart; `_drop` forgets it before it is used again.
        key = storage._cdata
        if key in self._numbers:
            return self._numbers[key], False
        number = self.timeline.new(name, storage.nbytes() // tensor.itemsize, tensor.itemsize, role)
        self._numbers[key] = number
        self._watch(storage, key)
        return number, True

    def _watch(self, storage: torch.UntypedStorage, key: int) -> None:
        # Storages are freed when Python and autograd let go of them: that is when an eager run frees their memory.
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        number = self._numbers.pop(key)
        if self._steps and not self._closed:
            self._steps[-1].drops.append(number)


def collective_of(name: str, arguments: Any, x: Tensor, result: Tensor, axes: dict[str, str]) -> Collective:
    """Return what ranks communicate, from a functional collective's arguments."""
    operation = COLLECTIVES[name]
    whole = max(x.numel(), result.numel())
    axis = axes[arguments[-1]]
    size = whole // min(x.numel(), result.numel())
    if operation == "all_to_all":
        size = len(arguments[1])
    return Collective(operation, axis, size, whole * x.itemsize)


_Format = tuple[torch.Size, tuple[int, ...], torch.dtype]
_Formats = tuple[bool, tuple[_Format | None, ...]]
"""Whether there is a single result, and the format of each."""

_known: dict[Any, _Formats | None] = {}
"""By operation and formats of arguments; None where formats do not say all."""


def on_meta(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the result of an operation on meta tensors; new tensors where the operation gives such."""
    if not _makes_all(operation):
        return operation(*arguments, **keywords)
    try:
        key = operation, _format_key(arguments), _format_key(tuple(keywords.items()))
    except _Unclear:
        return operation(*arguments, **keywords)
    formats = _known.get(key)
    if formats is not None:
        single, each = formats
        made = tuple(None if one is None else _empty_meta(one) for one in each)
        return made[0] if single else made
    result = operation(*arguments, **keywords)
    if key not in _known:
        _known[key] = _formats_of(result, tensors_in((arguments, keywords)))
    return result


class _Unclear(Exception):
    """A format of an argument does not say how it takes part."""


@cache
def _makes_all(operation: Any) -> bool:
    """Return whether an operation is declared to give new tensors alone, and to leave others as they are."""
    schema = operation._schema
    return all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _format_key(value: Any) -> Any:
    """Return a key of everything in an argument that the formats of results depend on."""
    if isinstance(value, Tensor):
        if not value.dim():
            # It may stand for a number, which takes less part in what formats become.
            raise _Unclear
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple([_format_key(each) for each in value])
    # True is 1 and 1.0 for a dictionary.
    return type(value), value


def _formats_of(result: Any, arguments: list[Tensor]) -> _Formats | None:
    """Return the formats of what an operation gave; None where that is no new tensor, or not all of its memory."""
    single = isinstance(result, Tensor)
    every = (result,) if single else result
    tensors = tensors_in(every)
    before, made = set(map(storage_key, arguments)), [storage_key(tensor) for tensor in tensors]
    if not isinstance(every, tuple) or len({*before, *made}) < len(before) + len(made):
        return None
    for each in every:
        if each is None:
            continue
        # A result that is a part of some memory, or no tensor on meta, cannot be made from its format.
        if not isinstance(each, Tensor) or each.device.type != "meta" or each.storage_offset():
            return None
        if each.untyped_storage().nbytes() != _empty_meta(_format_of(each)).untyped_storage().nbytes():
            return None
    return single, tuple(None if each is None else _format_of(each) for each in every)


def _format_of(tensor: Tensor) -> _Format:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty_meta(form: _Format) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
