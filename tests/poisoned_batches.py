"""A batch with a number that no model can learn from, in one rank of a real run; and what becomes of each rank's state."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from phalanx.data.batch_stream import Batch, SteppedStream
from phalanx.layout.layout_model import Stage
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics
from phalanx.training.safeguards.replicas import hash_bits


class Poison(Callback):
    """Has the first number of a tensor of rank `rank`'s batch of step `step` be `value`.

    field: the tensor's name in the batch; empty for the weights of the first norm, in the passes of that step, where batches
    hold no numbers. record: each rank writes there, its own number appended, whether each step changed its state.
    """

    def __init__(self, record: str, value: str, step: int, rank: int = 1, field: str = "") -> None:
        self.record, self.value, self.step, self.rank, self.field = record, float(value), step, rank, field
        self.now = 0

    def on_start(self, context: TrainingContext) -> None:
        """Find the state that steps change, and lie in wait for the batch."""
        self.file = Path(f"{self.record}-{context.rank}")
        self.parameters, self.optimizer = context.parameters, context.optimizer
        if context.rank != self.rank:
            return
        if self.field:
            patch.object(SteppedStream, "next", self.poison_batch(SteppedStream.next)).start()
        else:
            register_module_forward_pre_hook(self.poison_input)

    def poison_batch(self, read):  # type: ignore[no-untyped-def]
        """Return `SteppedStream.next` with the number put in."""

        def read_poisoned(stream: SteppedStream[Batch]) -> Batch:
            batch: Batch = read(stream)
            if self.now == self.step:
                getattr(batch, self.field).view(-1)[0] = self.value
            return batch

        return read_poisoned

    def poison_input(self, module: torch.nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...] | None:
        """Put the number into the first activation of a layer."""
        first = inputs[0] if inputs else None
        wanted = isinstance(first, torch.Tensor) and first.is_floating_point() and first.dim() == 3
        if self.now != self.step or not wanted or isinstance(module, Stage):
            return None
        assert isinstance(first, torch.Tensor)
        wrong = first.clone()
        wrong[0, 0, 0] = self.value
        return (wrong, *inputs[1:])

    def state(self) -> list[int]:
        """Return hashes of the bits of parameters and of what the optimizer keeps."""
        kept = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        tensors = [*(p.detach() for p in self.parameters.values()), *kept]
        return [int(hash_bits(x.to_local() if hasattr(x, "to_local") else x)) for x in tensors]

    def on_step_begin(self, step: int) -> None:
        """Keep the state before a step."""
        self.now, self.before = step, self.state()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Note what the step did to it."""
        row = {"step": metrics.step, "updated": metrics.updated, "same_bits": self.state() == self.before}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
