"""What modules of a rank give, and the gradients of what they take, in one optimizer step.

Watched are the embedding, the blocks, the modules right within a block that have parameters (attention, norms, MLP, mixture
of experts) and the head: few enough to compare, and fine enough to say where a mistake sits. Only rows of samples at their
positions are kept, which is what tells one rank's activations from another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.layout.layout_model import Stage
from phalanx.torch_compat import common as compat


@dataclass(frozen=True)
class Rows:
    """Rows [B, S, D] of a tensor of the model, for some samples and positions."""

    samples_B: Tensor
    """Numbers of the samples in the global batch."""
    positions_S: Tensor
    """Positions in the sequence that this rank computed."""
    value_BSD: Tensor
    """Values, on the CPU."""


@dataclass
class ModuleWatch:
    """Keeps the activations and input gradients of the modules of this rank's stages."""

    samples: int
    """Samples of the global batch."""
    activations: dict[str, list[Rows]] = field(default_factory=dict)
    """What each module gave, a piece for each micro-batch; modules in the order in which they were done."""
    input_gradients: dict[str, list[Rows]] = field(default_factory=dict)
    """Gradients of what each module took, through that module alone; modules in the order in which they began."""
    _handles: list[Any] = field(default_factory=list)

    def follow(self, stage: Stage) -> None:
        """Watch the modules of `stage` from now on; nothing where its blocks do not give rows of samples."""
        if not stage.rows_are_positions:
            return
        current = _Microbatch()
        self._handles.append(stage.register_forward_pre_hook(partial(self._begin, current), with_kwargs=True))
        for name, module in _watched_modules(stage):
            self._handles += [
                module.register_forward_pre_hook(partial(self._keep_gradient, stage, current, name)),
                module.register_forward_hook(partial(self._keep_output, stage, current, name)),
            ]

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, current: _Microbatch, _stage: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        numbers_B = named["sample_indices_B"] if "sample_indices_B" in named else inputs[1]
        current.begin(numbers_B.cpu() % self.samples)

    def _keep_output(
        self, stage: Stage, current: _Microbatch, name: str, _module: nn.Module, _inputs: Any, output: Any
    ) -> None:
        rows = current.rows_of(stage, output)
        if rows is not None:
            self.activations.setdefault(name, []).append(rows)

    def _keep_gradient(
        self, stage: Stage, current: _Microbatch, name: str, _module: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Let the module take an alias of its first argument: its gradient comes back through this module alone."""
        x, *others = inputs
        if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()):
            return None
        # Also where a block is computed again: selective recompute must meet the same operations in both passes.
        alias = x.view_as(x)
        rows = current.rows_of(stage, x)
        if rows is not None:
            kept = self.input_gradients.setdefault(name, [])
            alias.register_hook(partial(_keep_once, kept, rows))
        return (alias, *others)


@dataclass
class _Microbatch:
    """The micro-batch that a stage computes at the moment."""

    samples_B: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _begun: set[tuple[int, ...]] = field(default_factory=set)
    """Samples of the micro-batches that have had a training pass."""
    _further: bool = False
    """Whether this is a further pass of a micro-batch."""

    def begin(self, samples_B: Tensor) -> None:
        """Take note of the micro-batch that a pass begins with."""
        self.samples_B = samples_B
        if torch.is_grad_enabled():
            numbers = tuple(samples_B.tolist())
            self._further = numbers in self._begun
            self._begun.add(numbers)

    def rows_of(self, stage: Stage, value: Any) -> Rows | None:
        """Return `value` with its samples and positions; None for what is no part of the training pass or no rows."""
        # A forecast that a roll-out starts from has no gradients; a block that is computed again did what it did before.
        # Of a roll-out that is trained through the first pass is kept: gradients of parameters tell of the others.
        if self._further or not torch.is_grad_enabled() or compat.in_backward_pass():
            return None
        rows_S = stage.share.positions(stage.length, torch.device("cpu")).rows_S
        shape = (len(self.samples_B) * stage.rows_per_sample, len(rows_S))
        # Between the matrices of a block a rank of `tp` has all positions, of some features.
        if not (isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == shape):
            return None
        return Rows(self.samples_B, rows_S, _by_sample(value, len(self.samples_B)))


def _keep_once(kept: list[Rows], rows: Rows, gradient: Tensor) -> None:
    """Keep the gradient of `rows`, once: schedules that form those of inputs and of weights apart may pass by twice."""
    if not any(one.samples_B is rows.samples_B for one in kept):
        kept.append(Rows(rows.samples_B, rows.positions_S, _by_sample(gradient, len(rows.samples_B))))


def _by_sample(value: Tensor, samples: int) -> Tensor:
    """Return a copy on the CPU whose features are those of all rows of a sample: [B*R, S, D] -> [B, S, R*D]."""
    kept: Tensor = value.detach().unflatten(0, (samples, -1)).transpose(1, 2).flatten(2)
    return kept.to("cpu", copy=True)


def _watched_modules(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    part = stage.part
    if part.part.first:
        yield "embedding", part.embedding
    for number in part.blocks.numbers:
        block = part.blocks[number]
        yield f"blocks.{number}", block
        for name, module in block.named_children():
            # A single matrix may be split over `tp`, and then gives or takes a part of each row; norms have vectors alone.
            matrix = not any(module.children()) and any(x.dim() > 1 for x in module.parameters())
            if not matrix and next(module.parameters(), None) is not None:
                yield f"blocks.{number}.{compat.full_name(name)}", module
    if part.part.last:
        yield "head", part.head
