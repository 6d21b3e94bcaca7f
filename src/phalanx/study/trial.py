"""Trials and their outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

OK = "ok"
FAILURES = {
    "out_of_memory": "out of memory",
    "hang": "not done within the time limit",
    "crash": "a process failed",
    "cancelled": "somebody cancelled its job",
    "refused": "the run file does not allow it",
    "non_finite": "the loss is not finite",
    "wrong_loss": "another loss or gradient norm than the first good trial",
}
"""Causes for which a trial is never repeated, with the words that are shown for them."""
INTERRUPTED = "interrupted"
"""The search or a process was killed from outside: nothing was found out, and the trial may be repeated."""
ASKED = "asked"
"""Mark in `Outcome.more` of an interrupted trial that its own search asked to stop or left behind: no failed attempt."""
DEVICE = "device"
"""Key of `Outcome.more`: kind of a trial's devices, as machine descriptions call it."""
ATTEMPTS = 3
"""Interrupted attempts after which a choice is not tried again: it may be what brings the machine down."""
_LONGEST = 150
"""Characters that are shown of what a trial wrote last."""


@dataclass(frozen=True)
class Outcome:
    """Result of a trial: a value, or why there is none."""

    cause: str
    """OK, one of FAILURES, or INTERRUPTED."""
    value: float | None = None
    """Figure that is minimised: the median seconds of a step, or a held-out error; None unless the cause is OK."""
    losses: tuple[float, ...] = ()
    """Loss of each step."""
    memory_bytes: float | None = None
    """Peak bytes of live tensors on the worst rank; None where the device does not tell."""
    seconds: float = 0.0
    """Seconds of the whole trial, start of its processes included."""
    words: str = ""
    """Last words of a failed trial."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further figures, as plain values."""

    def as_failure(self, cause: str, words: str) -> Outcome:
        """Return the same outcome as a failure of that cause, which gives no value."""
        return replace(self, cause=cause, value=None, words=words)

    def describe_failure(self) -> str:
        """Return in one line why a trial has no value, and what it wrote last."""
        cause = FAILURES.get(self.cause, "interrupted, may be repeated" if self.cause == INTERRUPTED else self.cause)
        # A traceback has many lines.
        said = " ".join(self.words.split())[:_LONGEST]
        return f"{cause}: {said}" if said else cause

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self) | {"losses": list(self.losses), "more": dict(self.more)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """Return the outcome that `as_dict` gave."""
        return cls(**{**values, "losses": tuple(values.get("losses", ()))})


@dataclass(frozen=True)
class Trial:
    """One attempt at one choice."""

    number: int
    key: str
    """Name of the choice by `key_of`; of a choice that is trained in parts, with the part's rung."""
    values: Mapping[str, Any]
    sampler: str
    """Name of the sampler that proposed the choice."""
    outcome: Outcome | None = None
    """None while it runs."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Expectations of the sampler, as plain values."""

    @property
    def good(self) -> bool:
        """Whether the trial gave a value."""
        return self.outcome is not None and self.outcome.cause == OK

    @property
    def failed(self) -> bool:
        """Whether the trial ended in a way that is not to be repeated."""
        return self.outcome is not None and self.outcome.cause in FAILURES

    @property
    def interrupted(self) -> bool:
        """Whether the trial was killed from outside, so that nothing was found out."""
        return self.outcome is not None and self.outcome.cause == INTERRUPTED

    @property
    def attempt_failed(self) -> bool:
        """Whether the trial was interrupted otherwise than by its own study, which says nothing against it."""
        return self.outcome is not None and self.interrupted and not self.outcome.more.get(ASKED)

    @property
    def value(self) -> float:
        """Figure that is minimised, of a good trial."""
        assert self.outcome is not None and self.outcome.value is not None
        return self.outcome.value


def count_failures(trials: Iterable[Trial]) -> dict[str, int]:
    """Return how many trials ended in each way other than a value, by cause."""
    causes = [trial.outcome.cause for trial in trials if trial.outcome is not None and not trial.good]
    return {cause: causes.count(cause) for cause in sorted(set(causes))}


def key_of(values: Mapping[str, Any]) -> str:
    """Return the name of a choice: its values in the order of their names."""
    # Stands in journals: another order or other blanks would make known choices unknown.
    return json.dumps({name: values[name] for name in sorted(values)}, separators=(",", ":"))


def best_trial(trials: list[Trial]) -> Trial | None:
    """Return the good trial of least value; None where no trial is good."""
    return min((trial for trial in trials if trial.good), key=lambda trial: trial.value, default=None)
