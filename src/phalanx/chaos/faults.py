"""The kinds of faults that can be injected into a run, and drawing a mixture of them from a seed. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigError, nearest_names
from phalanx.launch.faults import Cause


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault."""

    cause: Cause | None
    """What a report has to call it; None for one that is found without an end of the ranks."""
    about: str
    after_saves: int = 0
    """Checkpoints that must be there before."""
    before_saves: int = 0
    """Checkpoints that must come after the one that it strikes: no step follows the last."""
    lasts: int = 0
    """Steps that it takes part in, which have to come after its first."""
    keeps_bits: bool = True
    """Whether the run ends with the bits of an undisturbed one."""
    alone: bool = False
    """Whether it has a run of its own, since nothing could be told of others beside it."""


KINDS = {
    "kill": FaultKind("signal", "a rank is killed (SIGKILL)"),
    "segfault": FaultKind("signal", "a rank reads memory that is not its own"),
    "abort": FaultKind("signal", "a rank aborts, as a failed assertion in C does"),
    "error": FaultKind("exception", "a forward pass of a rank raises an exception"),
    "hang": FaultKind("hang", "a rank loops for ever"),
    "lock": FaultKind("hang", "a rank computes in C for ever and holds Python's lock"),
    "stop": FaultKind("stopped", "a rank is suspended (SIGSTOP)"),
    "save": FaultKind("signal", "a rank is killed while it writes a checkpoint", before_saves=1),
    "damage": FaultKind("signal", "a bit of the newest checkpoint flips, then a rank is killed", after_saves=2),
    "oom": FaultKind(
        "out of memory", "a rank runs out of memory; micro-batches are halved", keeps_bits=False, alone=True
    ),
    "bitflip": FaultKind(None, "a bit of a parameter flips in the memory of one of its replicas", after_saves=1),
    "slow": FaultKind(
        None, "a rank takes three times as long for each of forty steps", after_saves=1, lasts=40, alone=True
    ),
}
"""Every kind by its name."""

USUAL = ("kill", "segfault", "abort", "error", "hang", "lock", "stop", "save", "damage")
"""Kinds that every run can meet: `oom` needs a micro-batch to halve, `bitflip` ranks that hold the same parameters, `slow`
other ranks and many steps."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault to come."""

    number: int
    """Counts the faults of all runs, from 1."""
    kind: str
    rank: int
    step: int
    """Optimizer step before which it happens; a kill in a checkpoint comes with one after it."""
    seed: int
    """Of what is left to chance in the rank: which bit, which moment of a save."""

    def marker_file(self, folder: Path) -> Path:
        """Return the file in `folder` that says that this fault has happened, and when."""
        return folder / f"happened-{self.number}.json"


def parse_kinds(words: str | None) -> tuple[str, ...]:
    """Return the kinds that a list such as "kill,hang" names; None is `USUAL`. Raises ConfigError for an unknown one."""
    if words is None:
        return USUAL
    kinds = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for kind in kinds:
        if kind not in KINDS:
            near = nearest_names(kind, list(KINDS))
            hint = f"\nnearest: {near[0]}" if near else ""
            raise ConfigError(f"--faults {kind}: must be of {', '.join(KINDS)}{hint}")
    if not kinds:
        raise ConfigError(f"--faults is empty; name some of {', '.join(KINDS)}")
    return kinds


def draw_faults(
    kinds: Sequence[str], *, ranks: int, steps: int, every: int, count: int, first: int, seed: int
) -> list[PlannedFault]:
    """Draw at most `count` faults of one run, in the order of their steps, no two before the same step.

    Args:
        kinds: kinds to draw from.
        ranks: ranks of the run.
        steps: its optimizer steps.
        every: steps between its checkpoints.
        count: faults wanted.
        first: number of the first fault.
        seed: equal seeds draw equal faults.
    """
    chance = random.Random(f"{seed}-{first}")
    drawn: dict[int, str] = {}
    for _ in range(count):
        kind = chance.choice(list(kinds))
        needs = KINDS[kind]
        # One step more: what is to be there is on storage by then.
        first_step = needs.after_saves * every + 2
        last_step = steps - max(needs.before_saves * every, needs.lasts)
        free = [step for step in range(first_step, last_step + 1) if step not in drawn]
        if free:
            drawn[chance.choice(free)] = kind
        if needs.alone and free:
            drawn = {step: one for step, one in drawn.items() if one == kind}
            break
    return [
        PlannedFault(number, kind, chance.randrange(ranks), step, chance.randrange(2**31))
        for number, (step, kind) in enumerate(sorted(drawn.items()), first)
    ]
