"""A traced pass as a list of steps over numbered buffers, and what follows from it: operations, kept and peak memory.

Both ways of tracing, running operations one by one and reading a compiler's graphs, give a timeline. Nothing here knows
PyTorch beyond its dtypes. Counts are of elements in the traced micro-batch; a `Scale` leads from them to any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from phalanx.planner.trace.operations import Attention, Collective, Kind, Matmul, Operation, Phase, Scale

Role = Literal["made", "input", "incoming", "given"]
"""made: by the traced part. input: the activations it is called with. incoming: the gradient of its result. given: there
before and after it: parameters, and what all blocks share."""


@dataclass
class Buffer:
    """A piece of memory."""

    name: str
    """Name of the operation that made it."""
    elements: int
    itemsize: int
    role: Role = "made"

    def bytes(self, scale: Scale) -> int:
        """Return its size in the micro-batch that `scale` leads to, bytes."""
        return scale(self.elements) * self.itemsize


@dataclass(frozen=True)
class Access:
    """Elements of a buffer that a step reads or writes."""

    buffer: int
    elements: int
    in_order: bool = False
    """Whether a fused kernel reads each element where it writes its result."""


@dataclass
class Step:
    """One kernel or collective."""

    name: str
    kind: Kind | Literal["free"]
    """free: only makes memory."""
    phase: Phase
    dtype: torch.dtype
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    """Buffers allocated before it runs."""
    drops: list[int] = field(default_factory=list)
    """Buffers freed after it has run."""
    reuses: list[int] = field(default_factory=list)
    """Buffers among `drops` whose memory its results take over while it runs."""
    rows_of_tables: bool = False
    """Whether what it reads more of than it writes is a table, of which it finds rows."""
    work: list[int] = field(default_factory=list)
    """Elements of each pointwise operation or reduction in it."""
    matmul: Matmul | None = None
    attention: Attention | None = None
    collective: Collective | None = None

    def scaled(self, scale: Scale) -> Step:
        """Return the same step in the micro-batch that `scale` leads to."""
        return replace(
            self,
            reads=[replace(access, elements=scale(access.elements)) for access in self.reads],
            writes=[replace(access, elements=scale(access.elements)) for access in self.writes],
            work=[scale(elements) for elements in self.work],
            matmul=None if self.matmul is None else scale.matmul(self.matmul),
            attention=None if self.attention is None else scale.attention(self.attention),
            collective=None if self.collective is None else scale.collective(self.collective, self.dtype.itemsize),
        )


@dataclass(frozen=True)
class Kept:
    """Memory held from a part's forward pass to its backward pass."""

    name: str
    """The operation that made it, or `input`."""
    bytes: int


@dataclass(frozen=True)
class Costs:
    """What one part of a model costs one rank for one micro-batch, forward and backward."""

    kept: tuple[Kept, ...]
    """Held between forward and backward. The part's input is in it where backward needs it, its result never: that is the
    next part's input."""
    input_bytes: int
    """Activations it is called with."""
    output_bytes: int
    """Bytes of the part's result."""
    forward_peak: int
    """Most bytes held at once in forward of what the part makes, results and kept values among them, input not."""
    backward_peak: int
    """Most bytes held at once in backward: what is kept (input among it), incoming gradient, temporaries and gradients."""
    pending_bytes: int
    """Most bytes that the first micro-batch of a step holds more in backward: gradients of streamed matrices."""
    gradient_bytes: int
    """Gradients of whole parameters, in the format they are computed in, at the end of backward."""
    behind_experts: tuple[int, int]
    """Bytes held in backward when the gradients of experts are made, and most from then on, without these; 0 where there are
    none."""
    beside_experts: int
    """Most bytes held in backward from the first product of experts that is computed again to the last operation that is;
    0 where there is none."""
    list_operations: Callable[[], tuple[Operation, ...]] = field(compare=False, repr=False)

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """In the order they run; collectives among them. Listed when first asked for: most layouts' memory says enough."""
        return self.list_operations()

    @property
    def kept_bytes(self) -> int:
        """Everything held between forward and backward."""
        return sum(kept.bytes for kept in self.kept)

    def flops(self, *phases: Phase) -> int:
        """Return the floating-point operations of matmuls and attention in these phases (all of them if none is named)."""
        return sum(op.flops * op.times for op in self._of(phases) if op.kind in ("matmul", "attention"))

    def traffic(self, *phases: Phase) -> int:
        """Return the bytes that kernels, collectives aside, read and write in these phases, or in all if none is named."""
        return sum((op.bytes_read + op.bytes_written) * op.times for op in self._of(phases) if op.kind != "collective")

    def collectives(self, *phases: Phase) -> list[Collective]:
        """Return the collectives of these phases (all of them if none is named), in order."""
        return [op.collective for op in self._of(phases) if op.collective is not None for _ in range(op.times)]

    def _of(self, phases: tuple[Phase, ...]) -> Iterator[Operation]:
        return (op for op in self.operations if not phases or op.phase in phases)


@dataclass
class Timeline:
    """The steps of one forward and one backward pass."""

    buffers: list[Buffer] = field(default_factory=list)
    forward: list[Step] = field(default_factory=list)
    backward: list[Step] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    """Buffers of the part's result."""
    kept: list[int] = field(default_factory=list)
    """Buffers alive between the passes, the result not counted unless backward needs it."""
    gradients: list[int] = field(default_factory=list)
    """Buffers of parameters' gradients."""
    pending: list[int] = field(default_factory=list)
    """Buffers of gradients that the first micro-batch of a step makes and further ones add to."""
    expert_gradients: list[int] = field(default_factory=list)
    """Buffers of the gradients of experts that are sharded over ranks."""
    adds_experts: bool = False
    """Whether further micro-batches add these at once to what the first has made, as autograd does on its own."""

    def new(self, name: str, elements: int, itemsize: int, role: Role = "made") -> int:
        """Add a buffer; return its number."""
        self.buffers.append(Buffer(name, elements, itemsize, role))
        return len(self.buffers) - 1

    def costs(self, scale: Scale, times: Sequence[int] = ()) -> Costs:
        """Return the costs of the micro-batch that `scale` leads to.

        times: how often each step runs, forward and backward; once each where it is empty.
        """
        output, gradients = set(self.output), set(self.gradients)
        sizes = [buffer.bytes(scale) for buffer in self.buffers]
        kept = [
            Kept("input" if self.buffers[number].role == "input" else self.buffers[number].name, sizes[number])
            for number in self.kept
            if number not in output
        ]
        # A backward pass begins with what was kept, and with the gradient that the next part sends.
        before = sum(part.bytes for part in kept) + sum(sizes[number] for number in self._numbers("incoming"))
        pending = frozenset(self.pending)
        # Further micro-batches add to gradients that the first one has made.
        later = [0 if number in pending else size for number, size in enumerate(sizes)] if pending else sizes
        added = frozenset(self.expert_gradients if self.adds_experts else ())
        backward_peak = _peak(self.backward, before, later, added)
        return Costs(
            kept=tuple(kept),
            input_bytes=sum(sizes[number] for number in self._numbers("input")),
            output_bytes=sum(sizes[number] for number in output),
            forward_peak=_peak(self.forward, 0, sizes),
            backward_peak=backward_peak,
            pending_bytes=_peak(self.backward, before, sizes) - backward_peak if pending or added else 0,
            gradient_bytes=sum(sizes[number] for number in gradients),
            behind_experts=self._peak_behind_experts(before, sizes),
            beside_experts=self._peak_beside_experts(before, sizes),
            list_operations=lambda: self._operations(gradients, scale, times),
        )

    def _peak_beside_experts(self, before: int, sizes: Sequence[int]) -> int:
        again = [place for place, step in enumerate(self.backward) if step.phase == "recompute"]
        products = [place for place in again if (x := self.backward[place].matmul) is not None and x.groups]
        if not products:
            return 0
        # Experts are computed again from their first grouped product on; what is held by then stays.
        first = products[0]
        held = before + sum(sizes[number] for step in self.backward[:first] for number in step.makes)
        held -= sum(sizes[number] for step in self.backward[:first] for number in step.drops)
        return _peak(self.backward[first : again[-1] + 1], held, sizes)

    def _peak_behind_experts(self, before: int, sizes: Sequence[int]) -> tuple[int, int]:
        own = set(self.expert_gradients)
        if not own:
            return 0, 0
        # The last of them: until then some experts have no gradients yet.
        made = max(place for place, step in enumerate(self.backward) if own.intersection(step.makes))
        without = [0 if number in own else size for number, size in enumerate(sizes)]
        steps = self.backward[: made + 1]
        held = before + sum(without[number] for step in steps for number in step.makes)
        held -= sum(without[number] for step in steps for number in step.drops)
        return held, _peak(self.backward[made + 1 :], held, without)

    def _operations(self, gradients: set[int], scale: Scale, times: Sequence[int]) -> tuple[Operation, ...]:
        """Return the operations of all steps in the micro-batch of `scale`. times: how often each runs; empty for once."""
        steps = [*self.forward, *self.backward]
        found: list[Operation] = []
        for step, count, beside in zip(steps, times or [1] * len(steps), self._beside, strict=True):
            if step.kind == "free":
                continue
            # Traced sizes become those of the wanted micro-batch.
            matmul, attention, collective = step.matmul, step.attention, step.collective
            # Pointwise work and reductions count one operation an element.
            flops = sum(scale(elements) for elements in step.work)
            if attention is not None:
                attention = scale.attention(attention)
                flops = attention.flops
            if matmul is not None:
                matmul = scale.matmul(matmul)
                flops = matmul.flops
            if collective is not None:
                collective = scale.collective(collective, step.dtype.itemsize)
            reads = step.reads
            if step.rows_of_tables:
                # A lookup touches the rows it finds, not the table.
                reads = [read for read in reads if scale(read.elements) <= scale(step.writes[0].elements)]
            operation = Operation(
                name=step.name,
                kind=step.kind,
                phase=step.phase,
                dtype=step.dtype,
                flops=flops,
                bytes_read=self._accessed(reads, scale),
                bytes_written=self._accessed(step.writes, scale),
                matmul=matmul,
                attention=attention,
                collective=collective,
                weight_gradient=any(access.buffer in gradients for access in step.writes),
                times=count,
                beside=beside,
            )
            found.append(operation)
        return tuple(found)

    @cached_property
    def _beside(self) -> list[int]:
        """Operations that run beside each step, whatever the micro-batch. Asked for when all steps are there."""
        return _count_beside([*self.forward, *self.backward])

    def _numbers(self, role: Role) -> list[int]:
        return [number for number, buffer in enumerate(self.buffers) if buffer.role == role]

    def _accessed(self, accesses: list[Access], scale: Scale) -> int:
        count, buffers = 0, self.buffers
        for access in accesses:
            count += scale(access.elements) * buffers[access.buffer].itemsize
        return count


def _count_beside(steps: Sequence[Step]) -> list[int]:
    """Return how many operations run while rows of each exchange for experts are under way; 0 for all other steps."""
    found = [0] * len(steps)
    for place, step in enumerate(steps):
        # What is sent in whole numbers are counts, for which the host waits; the stage within a node is awaited at once.
        axis = None if step.collective is None else step.collective.axis
        if axis not in ("ep", "ep_across") or not step.dtype.is_floating_point:
            continue
        arrived = {access.buffer for access in step.writes}
        behind = [later for later in steps[place + 1 :] if later.kind != "free"]
        readers = (
            number
            for number, later in enumerate(behind)
            if later.phase == "forward" or step.phase != "forward"
            if any(access.buffer in arrived for access in later.reads)
        )
        found[place] = next(readers, 0)
    return found


def _peak(steps: Sequence[Step], before: int, sizes: Sequence[int], passing: frozenset[int] = frozenset()) -> int:
    """Return the most bytes that are held at once.

    before: held when the steps begin. sizes: of buffers. passing: buffers that go at once.
    """
    now = peak = before
    for step in steps:
        reused = 0
        for number in step.reuses:
            reused += sizes[number]
        for number in step.makes:
            now += sizes[number]
        # A result that takes over the memory of an input needs none of its own.
        now -= reused
        if now > peak:
            peak = now
        for number in step.drops:
            now -= sizes[number]
        # Gradients that are added to others at once are gone when their step has run.
        if passing:
            now -= sum(sizes[number] for number in step.makes if number in passing)
        now += reused
    return peak
