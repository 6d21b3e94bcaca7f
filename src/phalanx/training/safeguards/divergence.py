"""Training that diverges: steps and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from phalanx.checkpoint import CheckpointStore
from phalanx.config.schema import Run
from phalanx.errors import PhalanxError
from phalanx.layout.place import Place
from phalanx.training.logs import RunLog
from phalanx.training.metrics import StepMetrics


def all_finite(places: Iterable[Place], device: torch.device) -> bool:
    """Return whether every floating-point tensor on every rank holds finite numbers only.

    Reads each tensor once, on its device. Every rank calls this and gets the same answer.
    """
    tensors = [place.local.detach() for place in places]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # The largest magnitude is finite only where all are: a maximum hands NaN on.
    finite = [torch.isfinite(torch.linalg.vector_norm(tensor, math.inf)).to(device) for tensor in floats]
    bad = (~torch.stack(finite).all()).float() if finite else torch.zeros((), device=device)
    # One rank's shard that is not finite is reason enough for all ranks not to save.
    if dist.is_initialized():
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return not bool(bad)


@dataclass(frozen=True)
class Divergence:
    """Why a run cannot continue."""

    found: str
    """What is not finite, and since when."""
    remedy: str
    """What may be changed beside the learning rate, as it follows "Resume with a lower optimizer.lr, "."""


class DivergenceGuard:
    """Ends a run whose weights give no finite step, and sees to it that it resumes from weights that did."""

    def __init__(self, run: Run, store: CheckpointStore, log: RunLog, *, scales_loss: bool, first_step: int) -> None:
        """Watch a run that has done `first_step` steps. scales_loss: whether a loss scale is still to be found."""
        self._run = run
        self._store = store
        self._log = log
        self._scales_loss = scales_loss
        self._updated_step = first_step
        """The last step that changed the weights."""
        self.skipped = 0
        """Steps in a row, up to the last one, that left the weights alone."""

    def judge_step(self, metrics: StepMetrics) -> Divergence | None:
        """Count steps without an update; return why the run ends where they are too many or may not be at all."""
        if metrics.updated:
            self._updated_step, self.skipped = metrics.step, 0
            return None
        self.skipped += 1
        training = self._run.training
        finite = math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)
        what = "stands out" if finite else "is not finite"
        found = f"step {metrics.step}: loss={metrics.loss} gradient norm={metrics.grad_norm} {what}; "
        if training.on_nonfinite == "stop" and self.is_wrong(metrics):
            return Divergence(f"{found}stopped before the update", "or with training.on_nonfinite=skip")
        if self.skipped >= training.max_skipped_steps:
            return Divergence(
                f"{found}{self.skipped} steps in a row left the weights alone",
                f"training.max_skipped_steps={training.max_skipped_steps}",
            )
        return None

    def rewound(self, step: int) -> None:
        """Take note that the weights are those of `step` again."""
        self._updated_step, self.skipped = step, 0

    def is_wrong(self, metrics: StepMetrics) -> bool:
        """Return whether a step is not finite, beyond overflows by which a loss scale is found."""
        # Gradients that overflow now and then are how a dynamic loss scale is found; no scale mends a loss.
        return not math.isfinite(metrics.loss) or (not math.isfinite(metrics.grad_norm) and not self._scales_loss)

    def give_up(self, divergence: Divergence, step: int) -> NoReturn:
        """Set checkpoints of the present weights aside, and raise the PhalanxError that ends the run after `step`."""
        text = (
            f"{divergence.found}. {self._set_suspects_aside()}. Resume with a lower optimizer.lr, {divergence.remedy}"
        )
        self._log.event("warning", step, text=text)
        raise PhalanxError(text)

    def _set_suspects_aside(self) -> str:
        """Take checkpoints of the present weights out of the listing; return in words where the run resumes."""
        # Whatever the learning rate, they would give the same step again. They stay where none before them is left.
        kept = self._store.list()
        suspects = [one for one in kept if one.step >= self._updated_step]
        before = next((one for one in kept if one.step < self._updated_step), None)
        checkpoint = self._run.checkpoint
        # Of a run that chooses its interval nobody knows whether there was a checkpoint before those that it keeps.
        full = len(kept) >= checkpoint.keep_last
        lost = full if checkpoint.every == "auto" else suspects and suspects[-1].step > (checkpoint.every or math.inf)
        if suspects and before is None and lost:
            return (
                f"Only the checkpoint of step {suspects[-1].step} is left, with these very weights "
                f"(checkpoint.keep_last={checkpoint.keep_last}): begin anew with another --run-dir"
            )
        names = self._store.set_aside(suspects)
        aside = f"{', '.join(names)} holds these very weights and was set aside. " if names else ""
        return f"{aside}The run resumes from step {before.step if before else 0}"
