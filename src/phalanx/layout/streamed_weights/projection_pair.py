"""One streamed pair as a step of autograd: y = sum over chunks k of act(x A_k) B_k, forward and backward.

Forward keeps x alone. Backward streams the chunks again, computes the hidden features of each once more with autograd on,
and takes the gradients chunk by chunk: what is computed inside is the module's own forward, with a chunk in place of its
matrices, so whatever stands between A and B is differentiated as it is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.layout.streamed_weights.chunk_plan import ChunkPlan, Matrix
from phalanx.layout.streamed_weights.ring_transport import WeightRing

Forward = Callable[..., Tensor]
"""The forward of the module as its family wrote it: (module, x, *arguments) -> y."""


class ProjectionPair:
    """Runs the forward of one module chunk by chunk, over the ranks that share its matrices."""

    def __init__(self, forward: Forward, plan: ChunkPlan, ring: WeightRing, late: tuple[str, ...]) -> None:
        """Join a module's forward pass and its chunks.

        late: parameters of the module that are added to the sum of chunks, and therefore in none of them.
        """
        self.plan = plan
        self.ring = ring
        self._forward = forward
        self._late = late

    def __call__(self, module: nn.Module, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """Return the sum of chunks, [..., out], in the format of x, [..., in].

        arguments: what the module takes behind x, all without gradients.
        """
        assert not any(isinstance(argument, Tensor) and argument.requires_grad for argument in arguments)
        matrices = [module.get_parameter(matrix.name) for matrix in self.plan.matrices]
        promise = _Gradient.apply(self, module, arguments, x, *self._riders(module).values(), *matrices)
        result = _Value.apply(promise, self, module, arguments, x)
        assert isinstance(result, Tensor)
        return result

    @property
    def width(self) -> int:
        """Features of y."""
        return next(matrix.width for matrix in self.plan.matrices if matrix.dim == 1)

    def value(self, module: nn.Module, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """Run forward without gradients. Sums are in at least float32."""
        total: Tensor | None = None
        for _, number, chunk in self.ring.chunks(self.plan, self._piece(module, x)):
            held = self._weights(module, self._leaves(chunk, number)) | dict.fromkeys(self._late)
            with _with_parameters(module, held):
                part = self._forward(module, x, *self._arguments(arguments, number))
            total = _add_part(total, part)
            # The ring lets this chunk go before it makes room for the one after the next.
            del chunk, held, part
        assert total is not None
        return total.to(x.dtype)

    def gradients(
        self, module: nn.Module, x: Tensor, riders: list[Tensor], arguments: tuple[Any, ...], grad: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return gradients of x and of `riders`, parameters that every chunk reads; those of matrices go to their owners."""
        names = list(self._riders(module))
        totals: list[Tensor | None] = [None] * (1 + len(riders))
        for step, number, chunk in self.ring.chunks(self.plan, self._piece(module, x)):
            with torch.enable_grad():
                leaves = [leaf.requires_grad_() for leaf in self._leaves(chunk, number)]
                shared = [tensor.detach().requires_grad_() for tensor in (x, *riders)]
                held = (
                    self._weights(module, leaves)
                    | dict(zip(names, shared[1:], strict=True))
                    | dict.fromkeys(self._late)
                )
                with _with_parameters(module, held):
                    part = self._forward(module, shared[0], *self._arguments(arguments, number))
                found = list(torch.autograd.grad(part, [*shared, *leaves], grad))
            del chunk, part, leaves, held
            # Freed before the next chunk arrives: no more than two chunks of a pair are ever held.
            totals = [_add_part(total, new) for total, new in zip(totals, found[: len(shared)], strict=True)]
            del found[: len(shared)]
            # The gradients of the chunk before have had a chunk's time to arrive; now they are added, and these leave.
            self.ring.finish()
            self.ring.reduce(self.plan, step, number, self._flat(found), partial(self._add_to_parameters, module))
        first, *rest = (
            total.to(like.dtype) for total, like in zip(totals, (x, *riders), strict=True) if total is not None
        )
        return first, rest

    def _riders(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return parameters of the module that every chunk reads whole."""
        streamed = {matrix.name for matrix in self.plan.matrices} | set(self._late)
        return {name: p for name, p in module.named_parameters() if name not in streamed}

    def _arguments(self, arguments: tuple[Any, ...], chunk: int) -> list[Any]:
        return [select_units(argument, self.plan.units_of(chunk), self.plan.units) for argument in arguments]

    @torch.no_grad()
    def _piece(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return this rank's piece, flat, in the format of x."""
        piece = self.ring.weights(self.plan.piece_size(self.ring.shards.rank), x)
        for matrix, rows in zip(self.plan.matrices, self._piece_rows(piece), strict=True):
            rows.copy_(_as_rows(module.get_parameter(matrix.name), matrix))
        return piece

    def _piece_rows(self, piece: Tensor) -> list[Tensor]:
        """Return the rows of each matrix in a flat piece."""
        rank = self.ring.shards.rank
        return _cut_matrices(
            piece, [(len(self.plan.piece(matrix, rank)), matrix.width) for matrix in self.plan.matrices]
        )

    def _leaves(self, chunk: Tensor, number: int) -> list[Tensor]:
        """Return the rows of each matrix in a flat chunk."""
        sizes = [(self.plan.rows(matrix, number), matrix.width) for matrix in self.plan.matrices]
        return [rows.detach() for rows in _cut_matrices(chunk, sizes)]

    def _weights(self, module: nn.Module, leaves: list[Tensor]) -> dict[str, Tensor | None]:
        """Return rows in the shape that the module knows its parameters by."""
        pairs = zip(self.plan.matrices, leaves, strict=True)
        return {matrix.name: _like_parameter(rows, matrix, module.get_parameter(matrix.name)) for matrix, rows in pairs}

    def _flat(self, gradients: list[Tensor]) -> Tensor:
        """Return gradients of a chunk's rows, flat. Empties the list: each is let go as soon as it is copied."""
        flat = self.ring.gradients(sum(gradient.numel() for gradient in gradients), gradients[0])
        for rows in _cut_matrices(flat, [(gradient.shape[0], gradient.shape[1]) for gradient in gradients]):
            rows.copy_(gradients.pop(0))
        return flat

    @torch.no_grad()
    def _add_to_parameters(self, module: nn.Module, piece: Tensor) -> None:
        """Add gradients of this rank's piece, flat, to those of its parameters, in the parameters' format."""
        for matrix, rows in zip(self.plan.matrices, self._piece_rows(piece), strict=True):
            parameter = module.get_parameter(matrix.name)
            # By hand: autograd knows the chunks' gradients, and nothing of the pieces that parameters are.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(_like_parameter(rows, matrix, parameter))


class _Gradient(torch.autograd.Function):
    """The backward pass of a pair. Its result has the shape of the value and no elements worth reading.

    The value has a node of its own, behind this one: a block that is recomputed ends with the last tensor that is kept, and
    a pair keeps its input alone, so the last pair of a block is not streamed once more for a value that nobody reads.
    """

    @staticmethod
    def forward(
        ctx: Any, pair: ProjectionPair, module: nn.Module, arguments: tuple[Any, ...], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        riders = parameters[: len(parameters) - len(pair.plan.matrices)]
        ctx.save_for_backward(x, *riders)
        ctx.pair, ctx.module, ctx.arguments, ctx.count = pair, module, arguments, len(parameters)
        # One element of memory, whatever the shape: only the shape is read.
        return x.new_empty(1).expand(*x.shape[:-1], pair.width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *riders = ctx.saved_tensors
        grad_x, grad_riders = ctx.pair.gradients(ctx.module, x, riders, ctx.arguments, grads[0])
        return None, None, None, grad_x, *grad_riders, *([None] * (ctx.count - len(riders)))


class _Value(torch.autograd.Function):
    """The value of a pair; hands its gradient on to `_Gradient` through `promise`."""

    @staticmethod
    def forward(
        ctx: Any, promise: Tensor, pair: ProjectionPair, module: nn.Module, arguments: tuple[Any, ...], x: Tensor
    ) -> Tensor:
        return pair.value(module, x, arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None


def select_units(argument: Any, units: range, count: int) -> Any:
    """Return what these of `count` units need of an argument of the module: of attention, the biases of their heads."""
    changes = {}
    for name, dim in _HEAD_DIMS.items():
        tensor = getattr(argument, name, None)
        if tensor is not None and tensor.shape[dim] > 1:
            each = tensor.shape[dim] // count
            changes[name] = tensor.narrow(dim, units.start * each, len(units) * each)
    return argument._replace(**changes) if changes else argument


_HEAD_DIMS = {"slopes_H": 0, "bias": 1}
"""Fields of attention contexts that have a dim of query heads; a dim of 1 is the same for all."""


@contextmanager
def _with_parameters(module: nn.Module, tensors: dict[str, Tensor | None]) -> Iterator[None]:
    """Let `module` find these tensors where its parameters are, by name."""
    # Written past `nn.Module`, which takes nothing but parameters here: chunks are views into a buffer.
    places = []
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)._parameters
        places.append((owner, leaf, owner[leaf]))
        owner[leaf] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for owner, leaf, parameter in places:
            owner[leaf] = parameter


def _as_rows(parameter: Tensor, matrix: Matrix) -> Tensor:
    """Return a parameter as [rows, width]."""
    return parameter.t() if matrix.dim == 1 else parameter.view(-1, matrix.width)


def _like_parameter(rows: Tensor, matrix: Matrix, like: Tensor) -> Tensor:
    """Return [rows, width] as a parameter with the dims of `like`."""
    if matrix.dim == 1:
        return rows.t()
    return rows if like.dim() == 2 else rows.flatten()


def _cut_matrices(flat: Tensor, sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Return consecutive matrices [rows, width] at the beginning of a flat buffer."""
    lengths = [rows * width for rows, width in sizes]
    parts = flat[: sum(lengths)].split(lengths)
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _add_part(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum so far, in at least float32."""
    return part.to(torch.promote_types(part.dtype, torch.float32)) if total is None else total.add_(part)
