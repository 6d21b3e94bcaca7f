"""What a run does about wrong numbers: judges each step and each comparison of replicas, and says when to rewind.

Every decision follows from figures that all ranks have alike, so that all ranks decide alike without asking each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from phalanx.checkpoint import RankGroup
from phalanx.config.schema import Run
from phalanx.errors import DataError, PhalanxError
from phalanx.files import write_atomically
from phalanx.layout.apply import ParallelModel
from phalanx.training.logs import RunLog
from phalanx.training.metrics import StepMetrics
from phalanx.training.safeguards.divergence import DivergenceGuard
from phalanx.training.safeguards.replicas import Disagreement, ReplicaComparison
from phalanx.training.safeguards.spikes import RecentFigures, SpikeWatch
from phalanx.training.safeguards.step_replay import FAULT_CLASS
from phalanx.training.step import NO_LIMITS, StepLimits

REPLICAS_DIFFER = "replicas_differ"
"""Kind of the event that says which parameters differ, and on which ranks."""
UNREAD = "unread_batch"
"""Kind of the event that says why a batch could not be read and was passed over."""
REWIND = "rewind"
"""Kind of the event that says why and how far a run was rewound."""
BAD_BATCHES = "bad_batches"
"""Folder of the run directory with the batches of steps that went wrong, by the numbers of their samples."""


class SafeguardState(BaseModel):
    """What decides about wrong numbers in later steps, as a checkpoint keeps it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    skipped_batches: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Global batches that were passed over: step k reads those of step k + skipped_batches."""
    recent: RecentFigures = RecentFigures()


@dataclass(frozen=True)
class Rewind:
    """A wish to go back to the newest checkpoint."""

    step: int
    """The step that was wrong."""
    reason: str
    passes_samples: bool
    """Whether the samples since the checkpoint are passed over; else the same steps are done again."""
    vital: bool
    """Whether the run cannot go on without; else the update was left out, which is second best."""


class WrongNumbers:
    """Judges what steps and comparisons give, on every rank alike."""

    def __init__(
        self,
        run: Run,
        applied: ParallelModel,
        guard: DivergenceGuard,
        log: RunLog,
        run_dir: Path,
        state: SafeguardState,
    ) -> None:
        self._config = run.safeguards
        self._rewinds_nonfinite = run.training.on_nonfinite == "rewind"
        self._guard, self._log, self._run_dir = guard, log, run_dir
        self._watch = SpikeWatch(run.safeguards.spike_deviations, state.recent)
        self._replicas = ReplicaComparison(applied)
        self.skipped_batches = state.skipped_batches
        """Global batches passed over; see `SafeguardState`."""
        self.wanted: Rewind | None = None
        """A rewind that the last step or comparison asks for."""
        self._spiking = False
        self._disagreement: Disagreement | None = None
        """The last one whose steps are being done again."""
        self._most_unread = run.training.max_skipped_steps
        self._unread: Counter[int] = Counter()
        """Batches passed over so far because a rank could not read them, by the step that was to read them."""
        self._rewinds: Counter[int] = Counter()
        """Rewinds so far by the step of the checkpoint."""

    @property
    def compares(self) -> bool:
        """Whether the run compares replicas at all; the same on all ranks."""
        return self._config.compare_replicas is not None

    def state(self) -> SafeguardState:
        """Return what a checkpoint keeps."""
        return SafeguardState(skipped_batches=self.skipped_batches, recent=self._watch.recent())

    def limits(self) -> StepLimits:
        """Return what the figures of the next step are compared with."""
        return self._watch.limits()

    def enforced(self, limits: StepLimits) -> StepLimits:
        """Return the limits above which a step is to leave the parameters alone."""
        return NO_LIMITS if self._config.on_spike == "warn" else limits

    def judge_step(self, metrics: StepMetrics, limits: StepLimits, samples: Tensor) -> None:
        """Report a step that is not finite or stands out, keep its sample numbers, and ask for a rewind by policy.

        limits: those the step was launched with. samples: global sample numbers of this rank's batch, int64 [B].
        """
        spike = self._watch.judge(metrics, limits)
        nonfinite = self._guard.is_wrong(metrics)
        before, self._spiking = self._spiking, spike is not None
        if spike is None and not nonfinite:
            return
        reason = f"loss {metrics.loss}, gradient norm {metrics.grad_norm}: not finite" if spike is None else str(spike)
        # As text: JSON has no NaN.
        figures = {"loss": str(metrics.loss), "grad_norm": str(metrics.grad_norm), "lr": metrics.lr}
        self._keep_batch(f"step-{metrics.step:08d}", metrics.step, reason, samples, figures)
        # One line for a spike of several steps.
        if spike is not None and not before:
            fields = {"figure": spike.figure, "value": spike.value, "median": spike.median, "limit": spike.limit}
            self._log.event("spike", metrics.step, **fields, left_out=not metrics.updated)
            self._log.note(f"warning: step {metrics.step}: {reason}")
        rewinds = self._rewinds_nonfinite if spike is None else self._config.on_spike == "rewind"
        if rewinds:
            self.wanted = Rewind(metrics.step, reason, passes_samples=True, vital=nonfinite)

    def pass_over(self, step: int, error: DataError | None, samples: Tensor) -> None:
        """Leave out the batch that `step` was to read, and keep what is known of it. Every rank calls it.

        error: why this rank cannot read its samples; None where another one cannot. samples: what this rank has read of
        the batch, global sample numbers, int64 [B]. Raises DataError after `training.max_skipped_steps` batches in a row.
        """
        said = RankGroup.default().all_gather(None if error is None else str(error))
        reason = next(one for one in said if one is not None)
        self.skipped_batches += 1
        self._unread[step] += 1
        self._keep_batch(f"step-{step:08d}-unread-{self._unread[step]}", step, reason, samples, {})
        self._log.event(UNREAD, step, reason=reason)
        if self._unread[step] >= self._most_unread:
            raise DataError(
                f"step {step}: {self._unread[step]} batches in a row cannot be read "
                f"(training.max_skipped_steps={self._most_unread}): {reason}"
            )
        self._log.note(f"warning: step {step} passes over a batch that cannot be read: {reason}")

    def _keep_batch(self, name: str, step: int, reason: str, samples: Tensor, figures: Mapping[str, object]) -> None:
        warning = keep_bad_batch(self._run_dir, name, step, reason, samples, figures)
        if warning is not None:
            self._log.note(f"warning: {warning}")

    def compare_replicas(self, step: int) -> None:
        """Compare what ranks hold alike after `step`; where it differs, ask for the steps to be done again.

        Raises PhalanxError where they were done again already, and says what that tells of the cause.
        """
        found, before = self._replicas.compare(step), self._disagreement
        if found is None:
            if before is not None and step >= before.step:
                self._tell_transient(before, step)
            return
        words = (
            f"step {step}: {len(found.names)} parameters that ranks hold alike differ, first {found.names[0]}: "
            f"{found.name_ranks(found.suspects())}"
        )
        self._log.event(REPLICAS_DIFFER, step, names=found.names[:20], ranks=list(found.suspects()))
        self._log.note(f"warning: {words}")
        if before is not None:
            raise PhalanxError(f"{words}. {classify_repeated(before, found)}")
        self._disagreement = found
        self.wanted = Rewind(step, words, passes_samples=False, vital=True)

    def take_rewind(self, wanted: Rewind, checkpoint: int) -> None:
        """Count a rewind to the checkpoint of step `checkpoint`. Raises PhalanxError where that is one too many."""
        self.wanted = None
        self._rewinds[checkpoint] += 1
        allowed = self._config.max_rewinds
        if self._rewinds[checkpoint] > allowed:
            raise PhalanxError(
                f"step {wanted.step}: {wanted.reason}. The run was rewound to step {checkpoint} {allowed} times already "
                f"(safeguards.max_rewinds={allowed}). Resume with a lower optimizer.lr, or look at the samples in "
                f"{self._run_dir / BAD_BATCHES}"
            )
        if wanted.passes_samples:
            # By what was read up to now: an earlier rewind to the same checkpoint passed samples over as well.
            self.skipped_batches += wanted.step - checkpoint

    def rewound(self, wanted: Rewind, checkpoint: int, recent: RecentFigures, redone_seconds: float) -> None:
        """Continue from what the checkpoint of step `checkpoint` kept, and report the rewind with what it costs."""
        self._watch.restore(recent)
        self._guard.rewound(checkpoint)
        self._spiking = False
        passed = wanted.step - checkpoint if wanted.passes_samples else 0
        fields = {"wrong_step": wanted.step, "reason": wanted.reason, "passed_batches": passed}
        self._log.event(REWIND, checkpoint, **fields, redone_seconds=round(redone_seconds, 3))
        samples = f"passing over {passed} batches" if passed else "the same steps again"
        self._log.note(f"rewound from step {wanted.step} to the checkpoint of step {checkpoint}, {samples}")

    def _tell_transient(self, before: Disagreement, step: int) -> None:
        right = self._replicas.gather_hashes()
        wrong = before.wrong_against(right) if step == before.step else ()
        self._disagreement = None
        # A step that computes with a flipped bit changes the gradients of all ranks: then only a majority can tell.
        if not 0 < len(wrong) < len(before.ranks):
            wrong = before.suspects()
        told = len(wrong) < len(before.ranks)
        who = before.name_ranks(wrong)
        cause = f"a transient fault of {who}" if told else f"a transient fault of one of {who}"
        self._log.event(FAULT_CLASS, step, cause="transient", ranks=list(wrong))
        self._log.note(f"the steps up to {step} were done again and all replicas agree: {cause}")


def classify_repeated(before: Disagreement, found: Disagreement) -> str:
    """Return what two disagreements of the same steps tell of the cause, and what to do."""
    steady = {rank for rank in found.ranks if before.hashes[rank] == found.hashes[rank]}
    unsteady = found.ranks - steady
    if not unsteady:
        return _software("to the last bit the same as when they were done before")
    common = set(before.suspects()) & set(found.suspects())
    # Ranks that give the same bits twice are well; one that does not, while others do, is not.
    culprits = unsteady if steady else common
    if 0 < len(culprits) < len(found.ranks):
        return (
            f"They differ again after the steps were done again: a persistent fault of "
            f"{found.name_ranks(sorted(culprits))}; resume without this device or host"
        )
    return _software("but on other ranks or in other bits")


def _software(how: str) -> str:
    return (
        f"They differ again after the steps were done again, {how}: more likely software than a device. "
        f"Compare the layout with phalanx verify, or set training.deterministic=true"
    )


def keep_bad_batch(
    run_dir: Path, name: str, step: int, reason: str, samples: Tensor, figures: Mapping[str, object]
) -> str | None:
    """Write which samples a step read, of all ranks together; return a warning where that fails. Every rank calls it.

    name: of the file. samples: global sample numbers of this rank's batch, int64 [B]; what a sample holds is a function of
    its number. figures: what the step came to, as JSON has it.
    """
    ranks = RankGroup.default()
    shares = ranks.gather(samples.tolist())

    def write() -> str | None:
        # Ranks over which positions or layers are split read the same samples.
        numbers = sorted({number for share in shares for number in share})
        record = {"step": step, "reason": reason, **figures, "samples": numbers}
        folder = run_dir / BAD_BATCHES
        try:
            folder.mkdir(exist_ok=True)
            write_atomically(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
        except OSError as error:
            return f"{folder} cannot be written ({error.strerror}): the samples of step {step} are not kept"
        return None

    return ranks.on_first(write)
