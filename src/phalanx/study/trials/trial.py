"""What trials are and what came of them. Shared by the search of layouts and the tuning of hyperparameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK = "ok"
FAILURES = {
    "out_of_memory": "out of memory",
    "hang": "not done within the time limit",
    "crash": "a process failed",
    "refused": "the run file does not allow it",
    "non_finite": "the loss is not finite",
    "wrong_loss": "another loss or gradient norm than the first good trial",
}
"""Causes for which a trial is never repeated, in words."""
INTERRUPTED = "interrupted"
"""The search or a process was killed from outside: nothing was found out, and the trial may be repeated."""
ASKED = "asked"
"""Mark in `Outcome.more` of an interrupted trial that its own search asked to stop or left behind: no failed attempt."""
ATTEMPTS = 3
"""Interrupted attempts after which a choice is left alone: it may be what brings the machine down."""


@dataclass(frozen=True)
class Outcome:
    """What came of a trial."""

    cause: str
    """OK, one of FAILURES, or INTERRUPTED."""
    value: float | None = None
    """What is minimised: for layouts the median seconds of a step, for hyperparameters a held-out error; None unless it
    is OK."""
    losses: tuple[float, ...] = ()
    """Loss of each step."""
    memory_bytes: float | None = None
    """Most bytes of live tensors on the rank that had most; None where the device does not tell."""
    seconds: float = 0.0
    """The whole trial, start of its processes included."""
    words: str = ""
    """Of a failure: what was said last."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is worth keeping, as plain values."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"losses": list(self.losses), "more": dict(self.more)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """What `as_dict` gave."""
        return cls(**{**values, "losses": tuple(values.get("losses", ()))})


@dataclass(frozen=True)
class Trial:
    """One attempt at one choice."""

    number: int
    key: str
    """The choice, as `key_of` names it; of one that is tried in several parts also which part."""
    values: Mapping[str, Any]
    engine: str
    outcome: Outcome | None = None
    """None while it runs."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """What the engine expected, as plain values."""

    @property
    def good(self) -> bool:
        """Whether it gave a value."""
        return self.outcome is not None and self.outcome.cause == OK

    @property
    def failed(self) -> bool:
        """Whether it ended in a way that is not to be repeated."""
        return self.outcome is not None and self.outcome.cause in FAILURES

    @property
    def value(self) -> float:
        """Of a good trial."""
        assert self.outcome is not None and self.outcome.value is not None
        return self.outcome.value


def key_of(values: Mapping[str, Any]) -> str:
    """The name of a choice: its values in the order of their names."""
    return json.dumps({name: values[name] for name in sorted(values)}, separators=(",", ":"))


def best_of(trials: list[Trial]) -> Trial | None:
    """The good trial of least value, if there is one."""
    return min((trial for trial in trials if trial.good), key=lambda trial: trial.value, default=None)
