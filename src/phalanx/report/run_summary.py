"""The headline figures of a run, each with what it counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phalanx.report.run_log import Event, FloatArray, RunLog


@dataclass(frozen=True)
class Summary:
    """Figures of one run; NaN where the log does not tell."""

    steps: int
    """The last optimizer step recorded."""
    records: int
    """Steps with a record in `metrics.jsonl`."""
    finished: bool
    """Whether the last event, samples and warnings aside, is the end of the run."""
    family: str
    """The model's family."""
    unit: str
    """What `tokens` counts, in the plural."""
    tokens: int
    """Tokens or structures trained on: the largest count recorded."""
    final_loss: float
    """Training loss of the last step: a mean over targets, of tokens in nats."""
    lowest_loss: float
    """The lowest finite training loss of any step."""
    nonfinite_losses: int
    """Steps whose loss is NaN, infinite or null."""
    skipped_updates: int
    """Steps that left the parameters alone because the gradient was not finite."""
    validation_step: int | None
    """The step of the last evaluation."""
    validation_loss: float
    """Held-out loss of the last evaluation."""
    perplexity: float
    """Perplexity a token of the last evaluation."""
    bits_per_byte: float
    """Bits a byte of held-out text of the last evaluation."""
    median_step_seconds: float
    median_tokens_per_second: float
    """Median over the steps, all devices together."""
    median_mfu: float
    """Model FLOPs utilisation against the nominal peak, a share of one, median over the steps."""
    median_mfu_measured: float
    """The same against the measured matmul peak."""
    flops_convention: str | None
    """How model FLOPs were counted, as `machine.json` names it."""
    wall_seconds: float
    """From the first event to the last step or event, pauses between a kill and a resume included; at least
    `step_seconds`."""
    step_seconds: float
    """Sum of the seconds of all steps."""
    data_wait_share: float
    """Share of `step_seconds` spent waiting for data."""
    checkpoint_stall_share: float
    """Share of `step_seconds` that training stood still for checkpoints."""
    rank_wait_share: float
    """Share of `step_seconds` that ranks waited for the slowest, mean over ranks, where their shares are uneven."""
    resumes: int


def summarise_run(log: RunLog) -> Summary:
    """Return the headline figures of a run."""
    loss, seconds = log.columns["loss"], log.columns["step_seconds"]
    finite = loss[np.isfinite(loss)]
    evaluations = log.of_kind("evaluation")
    last = max(evaluations, key=lambda event: event.step, default=None)
    # evaluations, samples and warnings do not say whether the run came to its end
    states = [event.kind for event in log.events if event.kind in ("start", "resume", "checkpoint", "end")]
    convention = (log.machine or {}).get("flops_convention")
    return Summary(
        steps=int(log.steps[-1]),
        records=len(log.steps),
        finished=states[-1:] == ["end"],
        family=log.family,
        unit=log.unit,
        tokens=int(np.max(log.columns["tokens"], where=np.isfinite(log.columns["tokens"]), initial=0.0)),
        final_loss=float(loss[-1]),
        lowest_loss=float(finite.min()) if finite.size else math.nan,
        nonfinite_losses=int(loss.size - finite.size),
        skipped_updates=int(np.count_nonzero(log.column("updated") == 0)),
        validation_step=last.step if last else None,
        validation_loss=last.number("loss") if last else math.nan,
        perplexity=last.number("perplexity") if last else math.nan,
        bits_per_byte=last.number("bits_per_byte") if last else math.nan,
        median_step_seconds=_median_of_finite(seconds),
        median_tokens_per_second=_median_of_finite(log.tokens_per_second),
        median_mfu=_median_of_finite(log.column("mfu")),
        median_mfu_measured=_median_of_finite(log.column("mfu_measured")),
        flops_convention=str(convention) if convention is not None else None,
        wall_seconds=_measure_wall_time(log),
        step_seconds=_sum_finite(seconds),
        data_wait_share=_share_of(log.column("data_wait_seconds"), seconds),
        checkpoint_stall_share=_share_of(log.column("checkpoint_stall_seconds"), seconds),
        rank_wait_share=_share_of(log.column("rank_wait_seconds"), seconds),
        resumes=len(log.of_kind("resume")),
    )


def _measure_wall_time(log: RunLog) -> float:
    seconds = log.columns["step_seconds"]
    in_steps = _sum_finite(seconds)
    if not log.events:
        return in_steps
    first: Event = min(log.events, key=lambda event: event.time)
    last: Event = max(log.events, key=lambda event: event.time)
    # a killed run trains on after its last event; those steps are only known by their length
    after = _sum_finite(seconds[log.steps > last.step])
    return max(in_steps, (last.time - first.time).total_seconds() + after)


def _sum_finite(values: FloatArray) -> float:
    return float(values[np.isfinite(values)].sum())


def _median_of_finite(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _share_of(part: FloatArray, whole: FloatArray) -> float:
    """Sum of `part` over the sum of `whole`, over the records that have both."""
    both = np.isfinite(part) & np.isfinite(whole)
    total = float(whole[both].sum())
    return float(part[both].sum()) / total if total > 0 else math.nan
