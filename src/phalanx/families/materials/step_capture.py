"""Forward pass, forces and backward pass of a network as one recorded program, replayed on batches of one size.

A message-passing network consists of very many small kernels, and training on forces differentiates it twice: on an
accelerator a step waits for the host to launch them. Here a step's kernels are recorded once (a CUDA or HIP graph) and
launched together from then on. Batches differ in size, so they are padded to that of a recording
(below), of which there are a few: behind its own atoms, edges and structures stand atoms that belong to a last structure
without labels, so that they enter no loss and no gradient.

With `compiled`, what is recorded is first compiled as a whole: traced into one graph of operations, in which derivatives
are operations like any other, and then fused. That is done once, for batches of all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from phalanx.families.materials.data.graph_batches import PER_ATOM
from phalanx.torch_compat.compiler import SizedProgram

_MARGIN = 0.08
"""Room of a recording beyond the batch it is made for."""
_LEAST_USED = 0.75
"""Share of a recording's edges below which a smaller recording is made."""
_MOST = 12
"""Recordings there may be."""
_WARM_UP = 2
"""Runs before a recording, in which libraries allocate what they keep."""


class StepRecorder:
    """Losses of micro-batches whose gradients are already there when they are asked for."""

    def __init__(self, twin: Callable[[], nn.Module], *, source: int, cutoff: float, compiled: bool) -> None:
        """twin: makes the network, with parameters of its own on the device, into which those of a step are copied.
        source: a data set whose heads it has. cutoff: A, from which on its messages are 0."""
        self._make_twin = twin
        self._step: _Step | None = None
        self._source = source
        self._cutoff = cutoff
        self._compiled = compiled
        self._recordings: list[_Recording] = []
        self._pool: Any = None

    def losses(self, inputs: Mapping[str, Any], parameters: Sequence[Tensor], scale: Tensor | float) -> Tensor:
        """Summed losses [T] of one micro-batch.

        inputs: what the network's `forward` takes, by name; only tensors are used. parameters: the present ones, in the
        order of the twin's. The losses' gradient must be `scale`, a number or one a task: gradients of the parameters are
        computed for that.
        """
        recording, tensors = self._fitting(inputs, scale)
        losses: Tensor = _Recorded.apply(recording, tensors, scale, *parameters)
        return losses

    @torch.no_grad()
    def losses_alone(self, inputs: Mapping[str, Any], parameters: Sequence[Tensor], scale: Tensor | float) -> Tensor:
        """The same, with the gradients added to those of the parameters: no backward pass is asked for.

        PyTorch's would hand them over one by one, which takes the host a good part of a short step.
        """
        recording, tensors = self._fitting(inputs, scale)
        losses, gradients = recording.run(parameters, tensors, scale)
        sums, more = [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                sums.append(parameter.grad)
                more.append(gradient)
        if sums:
            torch._foreach_add_(sums, more)
        return losses

    def _fitting(self, inputs: Mapping[str, Any], scale: Tensor | float) -> tuple[_Recording, dict[str, Tensor]]:
        """A recording with room for these inputs, and their tensors."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        return self._with_room(sizes_of(tensors), tensors, scale), tensors

    def _with_room(self, sizes: BatchSizes, tensors: dict[str, Tensor], scale: Tensor | float) -> _Recording:
        large = [one for one in self._recordings if one.room.holds(sizes)]
        best = min(large, key=lambda one: one.room.edges, default=None)
        full = len(self._recordings) == _MOST
        if best is not None and (full or sizes.edges >= _LEAST_USED * best.room.edges):
            return best
        if full:
            # The largest gives way to one that is larger still.
            self._recordings.remove(max(self._recordings, key=lambda one: one.room.edges))
        device = tensors["species_N"].device
        # The losses' number is that of the tasks, which a plain number does not tell.
        tasks = scale.shape if isinstance(scale, Tensor) else ()
        factors = torch.zeros(tasks, dtype=torch.float64, device=device)
        room = sizes.room(_MARGIN)
        empty = empty_batch(tensors, room, source=self._source, cutoff=self._cutoff)
        self._step = self._step or _Step(self._make_twin(), list(empty))
        made = _Recording(self._step, empty, room, factors)
        if self._compiled:
            self._step.compile(made.arguments(), room)
        if device.type != "cpu":
            self._pool = made.capture(self._pool)
        self._recordings.append(made)
        return made


class _Step:
    """What is recorded: losses and gradients as a function of parameters, a batch's tensors and the gradient's scale."""

    def __init__(self, twin: nn.Module, inputs: list[str]) -> None:
        self._twin = twin
        self._inputs = inputs
        self._names = [name for name, _ in twin.named_parameters()]
        self.parameters = [parameter.detach() for parameter in twin.parameters()]
        self.used = [True] * len(self.parameters)
        """Whether anything depends on a parameter."""
        self.program: Callable[..., tuple[Tensor, Tensor]] = self._losses_and_gradients

    def compile(self, example: list[Tensor], room: BatchSizes) -> None:
        """Fuse what can be, of the same numbers up to rounding; nothing new where that is done for such sizes already."""
        if isinstance(self.program, SizedProgram) and self.program.holds_for(asdict(room)):
            return
        # Constants are on the device from then on, and need not be brought there by the program.
        self._losses_and_gradients(*example)
        varying = [None] * len(self.parameters) + [varying_size(name) for name in self._inputs] + [None]
        program = SizedProgram(self._losses_and_gradients, example, varying)
        self.program = program.compile(self.parameters[0].dtype)

    def _losses_and_gradients(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """Summed losses, and gradients one behind the other."""
        count = len(self.parameters)
        inputs = dict(zip(self._inputs, arguments[count:-1], strict=True))
        with torch.enable_grad():
            parameters = [parameter.detach().requires_grad_() for parameter in arguments[:count]]
            named = dict(zip(self._names, parameters, strict=True))
            losses: Tensor = functional_call(self._twin, named, (inputs.pop("species_N"),), inputs)
            found = torch.autograd.grad((losses * arguments[-1]).sum(), parameters, allow_unused=True)
        self.used = [gradient is not None for gradient in found]
        whole = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True))
        return losses.detach(), torch.cat([gradient.flatten() for gradient in whole])


class _Recording:
    """One program on tensors of its own, which inputs are copied into and results are copied out of."""

    def __init__(self, step: _Step, tensors: dict[str, Tensor], room: BatchSizes, scale: Tensor) -> None:
        self.room = room
        self._step = step
        self._tensors = tensors
        self._behind = {name: value.clone() for name, value in tensors.items()}
        self._scale = scale
        self._graph: Any = None
        self._results: tuple[Tensor, Tensor] | None = None

    def arguments(self) -> list[Tensor]:
        """What the program takes."""
        return [*self._step.parameters, *self._tensors.values(), self._scale]

    def capture(self, pool: Any) -> Any:
        """Record the kernels; returns the memory pool of the recording, which others that run at other times may share."""
        device = torch.get_device_module(self._scale.device)
        aside = device.Stream()
        aside.wait_stream(device.current_stream())
        with device.stream(aside):
            for _ in range(_WARM_UP):
                self._step.program(*self.arguments())
        device.current_stream().wait_stream(aside)
        graph = device.CUDAGraph()
        # Other threads may allocate meanwhile: batches are read ahead into pinned memory.
        with device.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._results = self._step.program(*self.arguments())
        self._graph = graph
        return graph.pool() if pool is None else pool

    @torch.no_grad()
    def run(
        self, parameters: Sequence[Tensor], tensors: Mapping[str, Tensor], scale: Tensor | float
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses, and the gradients of scale * losses; None of parameters that nothing depends on."""
        sizes = sizes_of(tensors)
        copies = list(zip(self._step.parameters, parameters, strict=True))
        for name, ours in self._tensors.items():
            for source, behind in ((tensors[name], False), (self._behind[name], True)):
                rows = (rows_of(name, tensor, sizes, behind=behind) for tensor in (ours, source))
                copies += zip(*rows, strict=True)
        _copy_all(copies)
        if isinstance(scale, Tensor):
            self._scale.copy_(scale)
        else:
            self._scale.fill_(scale)
        if self._graph is None:
            losses, gradients = self._step.program(*self.arguments())
        else:
            self._graph.replay()
            assert self._results is not None
            losses, gradients = self._results[0].clone(), self._results[1].clone()
        parts = gradients.split([parameter.numel() for parameter in self._step.parameters])
        found = zip(parts, self._step.parameters, self._step.used, strict=True)
        return losses, [part.view_as(parameter) if used else None for part, parameter, used in found]


def _copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """From the second to the first of each pair; those of one format in one kernel."""
    for dtype in dict.fromkeys(to.dtype for to, _ in copies):
        to, of = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
        torch._foreach_copy_(to, of)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recording: _Recording, tensors: dict[str, Tensor], scale: Tensor | float, *parameters: Tensor
    ) -> Tensor:
        losses, ctx.gradients = recording.run(parameters, tensors, scale)
        return losses

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, None, *gradients)


_PER_EDGE = ("edges_2E", "shifts_E3")
_WITHOUT_LABELS = ("positions_N3", "shifts_E3", "cells_G33", "total_charge_G")
_BEYOND = 1.25
"""Length of edges that stand for none, in cutoffs: messages have faded to exactly 0, so that features of these atoms, and
with them whatever is multiplied by 0 later on, stay small in every model."""
_EDGES_BY_ATOM = 1024
"""Edges of a batch for each atom that stands for none: threads take turns at the sums of one atom."""


@dataclass(frozen=True)
class BatchSizes:
    """How much a batch holds, or has room for."""

    graphs: int
    atoms: int
    edges: int

    def room(self, margin: float) -> BatchSizes:
        """Room for batches larger by the factor 1 + margin, and for what stands behind them."""
        graphs, atoms, edges = (
            -int(-size * (1.0 + margin) // 16) * 16 for size in (self.graphs + 1, self.atoms, max(self.edges, 1))
        )
        return BatchSizes(graphs, atoms + _spare_atoms(edges), edges)

    def holds(self, other: BatchSizes) -> bool:
        """Whether a batch of these sizes fits, with what must stand behind it."""
        atoms = self.atoms - _spare_atoms(self.edges)
        return other.graphs < self.graphs and other.atoms <= atoms and other.edges <= self.edges


def sizes_of(tensors: Mapping[str, Tensor]) -> BatchSizes:
    """Of a batch's tensors by name, as `GraphBatch` has them."""
    return BatchSizes(len(tensors["cells_G33"]), len(tensors["species_N"]), tensors["edges_2E"].shape[1])


def empty_batch(like: Mapping[str, Tensor], room: BatchSizes, *, source: int, cutoff: float) -> dict[str, Tensor]:
    """Tensors of the names, formats and devices of `like` and the sizes `room`, in which nothing has a label.

    All atoms are hydrogen in the last structure, which belongs to the data set of number `source`. Every edge joins one of
    the last atoms to its own image beyond `cutoff` (A).
    """
    content = {"graph_N": room.graphs - 1, "source_G": source, "species_N": 1, **dict.fromkeys(_WITHOUT_LABELS, 0)}
    found = {}
    for name, value in like.items():
        if name == "edges_2E":
            spare = _spare_atoms(room.edges)
            ends_E = torch.arange(room.edges, device=value.device) * spare // max(room.edges, 1) + room.atoms - spare
            found[name] = ends_E.expand(2, -1).contiguous()
        else:
            shape = (_rows(name, room), *value.shape[1:])
            found[name] = value.new_full(shape, content.get(name, torch.nan))
    found["shifts_E3"][:, 0] = _BEYOND * cutoff
    return found


def varying_size(name: str) -> tuple[str, int]:
    """Which of `BatchSizes` changes the shape of a batch's tensor, and the dimension that has that size."""
    if name in _PER_EDGE:
        return "edges", 1 if name == "edges_2E" else 0
    return "atoms" if name in PER_ATOM else "graphs", 0


def rows_of(name: str, tensor: Tensor, sizes: BatchSizes, *, behind: bool) -> Sequence[Tensor]:
    """The parts of a padded tensor that a batch of `sizes` fills, or those behind it; contiguous, none empty."""
    count = _rows(name, sizes)
    whole = tensor.unbind() if name == "edges_2E" else (tensor,)
    parts = [part[count:] if behind else part[:count] for part in whole]
    return [part for part in parts if part.numel()]


def _rows(name: str, sizes: BatchSizes) -> int:
    count: int = getattr(sizes, varying_size(name)[0])
    return count


def _spare_atoms(edges: int) -> int:
    """Atoms at the end of a padded batch that always stand for none."""
    return 8 + edges // _EDGES_BY_ATOM
