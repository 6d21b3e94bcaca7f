"""CUDA-graph capture of a training step: forward pass, forces and backward pass replayed as one program.

A message-passing network consists of very many small kernels, and training on forces differentiates it twice: on an
accelerator a step waits for the host to launch them. Here a step's kernels are captured once (in a CUDA or HIP graph) and
launched together from then on. A captured step runs on tensors of one shape, so batches, which differ in size, are padded to
that of one of a few captured steps: behind a batch's own atoms, edges and structures stand atoms that belong to a last
structure without labels, so that they enter no loss and no gradient.

With `compiled`, what is captured is first compiled as a whole: traced into one graph of operations, in which derivatives
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
from phalanx.torch_compat.compiler import SizedProgram, begin_loading

_MARGIN = 0.08
"""Room of a captured step beyond the batch that it is made for."""
_LEAST_USED = 0.75
"""Share of a captured step's edges below which a smaller one is made."""
_MOST = 12
"""Captured steps there may be."""
_WARM_UP = 2
"""Runs before a capture, in which libraries allocate what they keep."""


class StepCapture:
    """Computes losses of micro-batches whose gradients are already there when they are asked for."""

    def __init__(self, replica: Callable[[], nn.Module], *, source: int, cutoff: float, compiled: bool) -> None:
        """replica: makes the network, with parameters of its own on the device, into which those of a step are copied.
        source: number of a data set whose heads it has. cutoff: distance (A) from which on its messages are 0."""
        self._make_replica = replica
        self._program: _StepProgram | None = None
        self._source = source
        self._cutoff = cutoff
        self._compiled = compiled
        if compiled:
            # Until the first batch is there: parameters get their values, and data are opened.
            begin_loading()
        self._captured: list[_CapturedStep] = []
        self._pool: Any = None

    def losses(self, inputs: Mapping[str, Any], parameters: Sequence[Tensor], scale: Tensor | float) -> Tensor:
        """Return the summed losses [T] of one micro-batch.

        inputs: what the network's `forward` takes, by name; only tensors are used. parameters: the present ones, in the
        order of the replica's. The losses' gradient must be `scale`, a number or one a task: gradients of the parameters
        are computed for that.
        """
        step, tensors = self._fitting_step(inputs, scale)
        losses: Tensor = _CapturedLosses.apply(step, tensors, scale, *parameters)
        return losses

    @torch.no_grad()
    def add_gradients(self, inputs: Mapping[str, Any], parameters: Sequence[Tensor], scale: Tensor | float) -> Tensor:
        """Return the losses without a graph, and add the gradients to those of the parameters.

        PyTorch's backward pass would hand them over one by one, which takes the host a good part of a short step.
        """
        step, tensors = self._fitting_step(inputs, scale)
        losses, gradients = step.run(parameters, tensors, scale)
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

    def _fitting_step(
        self, inputs: Mapping[str, Any], scale: Tensor | float
    ) -> tuple[_CapturedStep, dict[str, Tensor]]:
        """Return a captured step with room for these inputs, and their tensors; capture one where none fits well."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        sizes = sizes_of(tensors)
        large = [one for one in self._captured if one.room.holds(sizes)]
        best = min(large, key=lambda one: one.room.edges, default=None)
        full = len(self._captured) == _MOST
        if best is not None and (full or sizes.edges >= _LEAST_USED * best.room.edges):
            return best, tensors
        if full:
            # The largest gives way to one that is larger still.
            self._captured.remove(max(self._captured, key=lambda one: one.room.edges))
        device = tensors["species_N"].device
        # The losses' number is that of the tasks, which a plain number does not tell.
        tasks = scale.shape if isinstance(scale, Tensor) else ()
        room = sizes.room(_MARGIN)
        empty = empty_batch(tensors, room, source=self._source, cutoff=self._cutoff)
        self._program = self._program or _StepProgram(self._make_replica(), list(empty))
        made = _CapturedStep(self._program, empty, room, torch.zeros(tasks, dtype=torch.float64, device=device))
        if self._compiled:
            self._program.compile(made.arguments(), room)
        if device.type != "cpu":
            self._pool = made.capture(self._pool)
        self._captured.append(made)
        return made, tensors


class _StepProgram:
    """What is captured: losses and gradients as a function of parameters, a batch's tensors and the gradient's scale."""

    def __init__(self, replica: nn.Module, inputs: list[str]) -> None:
        self._replica = replica
        self._inputs = inputs
        self._names = [name for name, _ in replica.named_parameters()]
        self.parameters = [parameter.detach() for parameter in replica.parameters()]
        self._trained = [parameter.requires_grad for parameter in replica.parameters()]
        self.used = [True] * len(self.parameters)
        """Whether anything depends on a parameter."""
        self._function: Callable[..., Sequence[Tensor]] = self._losses_and_gradients

    def compile(self, example: list[Tensor], room: BatchSizes) -> None:
        """Fuse what can be, of the same numbers up to rounding; nothing new where that is done for such sizes already."""
        if isinstance(self._function, SizedProgram) and self._function.holds_for(asdict(room)):
            return
        # Constants are on the device from then on, and need not be brought there by the program.
        self._losses_and_gradients(*example)
        varying = [None] * len(self.parameters) + [varying_size(name) for name in self._inputs] + [None]
        program = SizedProgram(self._losses_and_gradients, example, varying)
        self._function = program.compile(self.parameters[0].dtype)

    def run(self, arguments: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed losses, and the gradients one behind the other."""
        losses, *gradients = self._function(*arguments)
        # Joined out here: in the program that would be a kernel a parameter, each compiled by itself.
        return losses, torch.cat([gradient.flatten() for gradient in gradients])

    def _losses_and_gradients(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return the summed losses, and the gradients of all parameters that have one."""
        count = len(self.parameters)
        inputs = dict(zip(self._inputs, arguments[count:-1], strict=True))
        with torch.enable_grad():
            parameters = [
                parameter.detach().requires_grad_(trained)
                for parameter, trained in zip(arguments[:count], self._trained, strict=True)
            ]
            named = dict(zip(self._names, parameters, strict=True))
            losses: Tensor = functional_call(self._replica, named, (inputs.pop("species_N"),), inputs)
            asked = [parameter for parameter in parameters if parameter.requires_grad]
            formed = iter(torch.autograd.grad((losses * arguments[-1]).sum(), asked, allow_unused=True))
            found = [next(formed) if trained else None for trained in self._trained]
        # Known once it has run: a parameter that is frozen, or that nothing depends on, has no gradient, rather than zeros.
        self.used = [gradient is not None for gradient in found]
        return losses.detach(), *(gradient for gradient in found if gradient is not None)


class _CapturedStep:
    """One program on tensors of its own, which inputs are copied into and results are copied out of."""

    def __init__(self, program: _StepProgram, tensors: dict[str, Tensor], room: BatchSizes, scale: Tensor) -> None:
        self.room = room
        self._program = program
        self._tensors = tensors
        self._behind = {name: value.clone() for name, value in tensors.items()}
        self._scale = scale
        self._replay: Callable[[], None] | None = None
        self._results: tuple[Tensor, ...] = ()

    def arguments(self) -> list[Tensor]:
        """Return what the program takes."""
        return [*self._program.parameters, *self._tensors.values(), self._scale]

    def capture(self, pool: Any) -> Any:
        """Capture the kernels; return the graph's memory pool, which graphs that run at other times may share."""
        device = torch.get_device_module(self._scale.device)
        # PyTorch asks for a warm-up on a side stream: lazy initialisation must not become part of the graph.
        aside = device.Stream()
        aside.wait_stream(device.current_stream())
        with device.stream(aside):
            for _ in range(_WARM_UP):
                self._program.run(self.arguments())
        device.current_stream().wait_stream(aside)
        graph = device.CUDAGraph()
        # Other threads may allocate meanwhile: batches are read ahead into pinned memory.
        with device.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._results = self._program.run(self.arguments())
        self._replay = graph.replay
        return graph.pool() if pool is None else pool

    @torch.no_grad()
    def run(
        self, parameters: Sequence[Tensor], tensors: Mapping[str, Tensor], scale: Tensor | float
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the losses, and the gradients of scale * losses; None of parameters that nothing depends on."""
        sizes = sizes_of(tensors)
        copies = list(zip(self._program.parameters, parameters, strict=True))
        for name, ours in self._tensors.items():
            for source, behind in ((tensors[name], False), (self._behind[name], True)):
                rows = (rows_of(name, tensor, sizes, behind=behind) for tensor in (ours, source))
                copies += zip(*rows, strict=True)
        # One kernel for all copies of one format, where one a tensor would be as slow as the step itself.
        for dtype in dict.fromkeys(to.dtype for to, _ in copies):
            to, of = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            torch._foreach_copy_(to, of)
        if isinstance(scale, Tensor):
            self._scale.copy_(scale)
        else:
            self._scale.fill_(scale)
        if self._replay is None:
            losses, gradients = self._program.run(self.arguments())
        else:
            self._replay()
            # The next replay writes to the same memory.
            losses, gradients = (result.clone() for result in self._results)
        pairs = list(zip(self._program.parameters, self._program.used, strict=True))
        parts = iter(gradients.split([parameter.numel() for parameter, used in pairs if used]))
        return losses, [next(parts).view_as(parameter) if used else None for parameter, used in pairs]


class _CapturedLosses(torch.autograd.Function):
    """Losses whose gradients were formed with them."""

    @staticmethod
    def forward(
        ctx: Any, step: _CapturedStep, tensors: dict[str, Tensor], scale: Tensor | float, *parameters: Tensor
    ) -> Tensor:
        losses, ctx.gradients = step.run(parameters, tensors, scale)
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
        """Return room for batches larger by the factor 1 + margin, and for what stands behind them."""
        # Multiples of 16: batches of nearly one size share a captured step.
        graphs, atoms, edges = (
            -int(-size * (1.0 + margin) // 16) * 16 for size in (self.graphs + 1, self.atoms, max(self.edges, 1))
        )
        return BatchSizes(graphs, atoms + _spare_atoms(edges), edges)

    def holds(self, other: BatchSizes) -> bool:
        """Return whether a batch of these sizes fits, with what must stand behind it."""
        atoms = self.atoms - _spare_atoms(self.edges)
        return other.graphs < self.graphs and other.atoms <= atoms and other.edges <= self.edges


def sizes_of(tensors: Mapping[str, Tensor]) -> BatchSizes:
    """Return the sizes of a batch from its tensors by name, as `GraphBatch` has them."""
    return BatchSizes(len(tensors["cells_G33"]), len(tensors["species_N"]), tensors["edges_2E"].shape[1])


def empty_batch(like: Mapping[str, Tensor], room: BatchSizes, *, source: int, cutoff: float) -> dict[str, Tensor]:
    """Return tensors of the names, formats and devices of `like` and the sizes `room`, in which nothing has a label.

    All atoms are hydrogen in the last structure, which belongs to the data set of number `source`. Every edge joins one of
    the last atoms to its own image beyond `cutoff` (A).
    """
    content = {"graph_N": room.graphs - 1, "source_G": source, "species_N": 1, "multiplicity_G": 1}
    content |= dict.fromkeys(_WITHOUT_LABELS, 0)
    found = {}
    for name, value in like.items():
        if name == "edges_2E":
            spare = _spare_atoms(room.edges)
            ends_E = torch.arange(room.edges, device=value.device) * spare // max(room.edges, 1) + room.atoms - spare
            found[name] = ends_E.expand(2, -1).contiguous()
        else:
            shape = (_row_count(name, room), *value.shape[1:])
            found[name] = value.new_full(shape, content.get(name, torch.nan))
    found["shifts_E3"][:, 0] = _BEYOND * cutoff
    return found


def varying_size(name: str) -> tuple[str, int]:
    """Return which of `BatchSizes` changes the shape of a batch's tensor, and the dimension that has that size."""
    if name in _PER_EDGE:
        return "edges", 1 if name == "edges_2E" else 0
    return "atoms" if name in PER_ATOM else "graphs", 0


def rows_of(name: str, tensor: Tensor, sizes: BatchSizes, *, behind: bool) -> Sequence[Tensor]:
    """Return the parts of a padded tensor that a batch of `sizes` fills, or those behind it; contiguous, none empty."""
    count = _row_count(name, sizes)
    whole = tensor.unbind() if name == "edges_2E" else (tensor,)
    parts = [part[count:] if behind else part[:count] for part in whole]
    return [part for part in parts if part.numel()]


def _row_count(name: str, sizes: BatchSizes) -> int:
    count: int = getattr(sizes, varying_size(name)[0])
    return count


def _spare_atoms(edges: int) -> int:
    """Return the number of atoms at the end of a padded batch that always stand for none."""
    return 8 + edges // _EDGES_BY_ATOM
