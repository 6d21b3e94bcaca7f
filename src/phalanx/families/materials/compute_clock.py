"""How long this rank computes on each micro-batch, without what it waits for other ranks. Never waits itself.

A micro-batch counts from where its parameters are there (after the gather that precedes the forward pass) to where the last
gradient is formed (before the exchange of gradients is waited for). Devices are timed by events in their stream, the CPU,
which computes while it is called, by the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx.hardware.device import Moment
from phalanx.layout.stage import Stage, TrainingPass

Sizes = tuple[float, ...]


@dataclass(frozen=True)
class Timed:
    """One micro-batch."""

    sizes: Sizes
    """What it consisted of."""
    seconds: float
    """Forward and backward pass; 0 where nothing was to be computed."""


@dataclass
class _Span:
    step: int
    sizes: Sizes
    start: Moment
    end: Moment | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.end is None else self.end.seconds_since(self.start)


class ComputeClock:
    """Times every micro-batch that `stage` is trained on, from now on.

    Of a stage that gathers parameters block by block, the waits for these gathers count as computing.
    """

    def __init__(self, stage: Stage, device: torch.device, sizes: Callable[[Any, dict[str, Any]], Sizes]) -> None:
        """sizes: what to note of a micro-batch, from the stage's first input and those by name."""
        self._device = device
        self._sizes = sizes
        self._spans: list[_Span] = []
        self._watched: set[nn.Parameter] = set()
        # Behind the hooks of data parallelism, which come first: the parameters are there.
        stage.register_forward_pre_hook(self._begin, with_kwargs=True)
        for module in stage.modules():
            if module is stage or isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._watch)

    def take(self, step: int) -> list[Timed]:
        """The micro-batches of `step`, in order; the device must have computed them. Earlier ones are forgotten."""
        spans = [span for span in self._spans if span.step == step]
        self._spans = [span for span in self._spans if span.step > step]
        return [Timed(span.sizes, span.seconds) for span in spans]

    def _begin(self, stage: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        training: TrainingPass | None = named.get("training")
        if training is not None:
            self._spans.append(_Span(training.step, self._sizes(args[0], named), Moment(self._device)))

    def _watch(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Whole parameters of this unit are seen here for the first time: their gradients end a micro-batch."""
        if not module.training:
            return
        fresh = [
            parameter
            for parameter in module.parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter not in self._watched
        ]
        if fresh:
            self._watched.update(fresh)
            register_multi_grad_hook(fresh, self._end)

    def _end(self, _: Any) -> None:
        # Several units end one after another: the last one counts.
        if self._spans:
            self._spans[-1].end = Moment(self._device)
