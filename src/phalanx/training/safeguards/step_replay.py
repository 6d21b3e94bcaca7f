"""Does a step again that is a spike or not finite, before anything follows from it, and tells what kind of fault it was.

The update of such a step is left out, so weights and optimizer state are those that it began with, on every rank: the same
samples must give the same figures again. All ranks decide by figures that they have alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from phalanx.checkpoint import RankGroup
from phalanx.data.batch_stream import Batch
from phalanx.training.logs import RunLog
from phalanx.training.safeguards.replicas import same_bits
from phalanx.training.step import NO_LIMITS, StepLimits, StepResult, TrainStep

FAULT_CLASS = "fault_class"
"""Kind of the event that says what kind of fault something was, and of which ranks, as far as that can be told."""

Cause = Literal["transient", "persistent", "samples or software"]


@dataclass(frozen=True)
class Replay:
    """What a step and its repetition tell."""

    cause: Cause
    ranks: tuple[int, ...]
    """Those one of which it must be: they compute the same samples, and came to other losses of them. Empty where that does
    not tell them from the rest."""

    def in_words(self) -> str:
        """Return the finding as a message has it."""
        one = "one of ranks" if len(self.ranks) > 1 else "rank"
        who = f" of {one} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        match self.cause:
            case "transient":
                return f"done again it is as it should be: a transient fault{who or ' of a rank that cannot be told'}"
            case "persistent":
                return (
                    f"done again it is wrong in another way: a persistent fault{who}"
                    if who
                    else "done again it is wrong in another way: a persistent fault, or kernels that do not repeat their "
                    "results (training.deterministic=true tells)"
                )
            case "samples or software":
                return "done again it comes to the same bits: of the samples or the software, not of a device"


def classify_replay(before: StepResult, after: StepResult, shares: Sequence[tuple[bool, object]]) -> Replay:
    """Return what kind of fault a wrong step had. before, after: the step and its repetition, with the same limits.

    shares: for each rank, whether its own losses were others in the repetition, and what tells its samples from others'.
    """
    # Ranks that split layers, positions or stages among them come to a loss together: each of them may be at fault.
    wrong = {samples for changed, samples in shares if changed}
    ranks = tuple(rank for rank, (_, samples) in enumerate(shares) if samples in wrong)
    told = ranks if len(ranks) < len(shares) or len(shares) == 1 else ()
    if after.updated:
        return Replay("transient", told)
    # By their bits: NaN equals itself here.
    figures = [torch.tensor([one.loss, one.grad_norm], dtype=torch.float64) for one in (before, after)]
    same = torch.equal(*(each.view(torch.int64) for each in figures)) and not ranks
    return Replay("samples or software", ()) if same else Replay("persistent", told)


class StepReplay:
    """Repeats wrong steps. Every rank calls it at the same steps."""

    def __init__(self, step: TrainStep, log: RunLog, *, keeps_spikes: bool) -> None:
        """Repeat steps of `step`. keeps_spikes: whether the update of a spike that comes again is made after all."""
        self._step = step
        self._log = log
        self._keeps_spikes = keeps_spikes

    def resolve(self, number: int, batch: Batch, limits: StepLimits, figures: list[float]) -> list[float]:
        """Return the figures of step `number`, done again where it has to be.

        batch: this rank's samples of it. limits: those it was launched with, which it must not be above. figures: what it
        came to, as `TrainStep.enqueue` returns them.
        """
        before = StepResult.from_figures(figures, limits)
        if before.updated:
            return figures
        # The repetition may write to the same memory, as a captured step does.
        own = self._step.own_loss.clone()
        self._step.limits = limits
        found = self._step.enqueue(number, batch).tolist()
        after = StepResult.from_figures(found, limits)
        changed = not same_bits(own, self._step.own_loss)
        # Tokens of all ranks meet in experts that are shared out: no rank's loss is its own doing there.
        samples = None if self._step.applied.mesh.ep.size > 1 else tuple(batch.sample_indices.tolist())
        replay = classify_replay(before, after, RankGroup.default().all_gather((changed, samples)))
        was = f"loss {before.loss:.6g}, gradient norm {before.grad_norm:.6g}"
        self._log.note(f"warning: step {number}: {was}; {replay.in_words()}")
        said = {"loss": str(before.loss), "grad_norm": str(before.grad_norm)}
        self._log.event(FAULT_CLASS, number, cause=replay.cause, ranks=list(replay.ranks), **said)
        finite = math.isfinite(after.loss) and math.isfinite(after.grad_norm)
        if after.updated or not (finite and self._keeps_spikes):
            return found
        # A spike that comes again, of a run that only warns of spikes.
        self._step.limits = NO_LIMITS
        return self._step.enqueue(number, batch).tolist()
