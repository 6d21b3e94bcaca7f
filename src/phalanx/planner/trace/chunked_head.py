"""What a head costs whose loss goes over chunks of tokens, for any number of chunks: counted in the real code.

All chunks but the first and the last do the same. So the head is traced with four chunks at most, the second of which stands
for all others in the middle. Samples, positions, the tokens of a chunk and those of the last chunk are multiples of prime
numbers that divide nothing else, so that what those divide is known to grow with them.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from phalanx.planner.schedule.timeline import Costs, Timeline
from phalanx.planner.trace.operations import Scale
from phalanx.planner.trace.traced_model import Setting

_SHOWN = 4
"""Chunks of a traced head at most."""
_LEAST, _MOST = 100, 8000
"""Between which prime numbers are looked for."""


@dataclass(frozen=True)
class Chunks:
    """How a head goes over a micro-batch."""

    samples: int
    positions: int
    """Positions of a sample that the rank's loss sees."""
    tokens: int
    """Tokens of a chunk."""

    @classmethod
    def of(cls, setting: Setting, samples: int) -> Chunks:
        """Return the chunks of a micro-batch of so many samples."""
        return cls(samples, setting.length // setting.cp, setting.chunk_tokens)

    @property
    def count(self) -> int:
        """How many."""
        return -(-self.samples * self.positions // self.tokens)

    @property
    def last(self) -> int:
        """Tokens of the last one."""
        return self.samples * self.positions - (self.count - 1) * self.tokens

    def shown(self, tp: int, sizes: frozenset[int]) -> Chunks:
        """Return the chunks to trace in place of these, which are several. sizes: of the model and of a sample."""
        samples = 1 if self.samples == 1 else next(n for n in _prime_numbers() if all(size % n for size in sizes))
        # Scales follow one another: what one leads to, none behind it may take for its own.
        taken = sizes | {2 * tp, samples, self.samples, self.positions, self.tokens, self.last}
        return _shown_chunks(min(self.count, _SHOWN), samples, 2 * tp, taken)


@cache
def _shown_chunks(count: int, samples: int, unit: int, taken: frozenset[int]) -> Chunks:
    """Return `count` chunks to trace.

    Their positions and tokens are multiples of `unit`, as ranks shard positions, and of primes that divide nothing else.
    """
    apart = [n for n in _prime_numbers() if all(size % n for size in taken)]
    known = frozenset(apart)
    for positions in apart:
        whole = samples * positions
        # Twice an odd number, so that what is left of an odd one is odd.
        for tokens in apart[bisect(apart, whole // (2 * count)) : bisect(apart, whole // (2 * count - 2))]:
            last = whole - 2 * (count - 1) * tokens
            if last in known and len({positions, tokens, last}) == 3:
                return Chunks(samples, unit * positions, 2 * unit * tokens)
    raise AssertionError("no numbers are left")


@cache
def _prime_numbers() -> tuple[int, ...]:
    return tuple(n for n in range(_LEAST, _MOST) if all(n % d for d in range(2, int(n**0.5) + 1)))


@dataclass(frozen=True)
class _Scales(Scale):
    """From what was traced to what is asked for: samples, positions, tokens of a chunk and of the last one."""

    each: tuple[tuple[int, int], ...] = ()
    """What was traced and what is asked for of each."""

    def __call__(self, count: int) -> int:
        """See `Scale`."""
        for traced, wanted in self.each:
            # Ranks may have a part of it: only the largest prime of what was traced must divide a count.
            if count % _prime_of(traced) == 0:
                count = count * wanted // traced
        return count


@cache
def _prime_of(traced: int) -> int:
    """Return the largest prime that divides a number that was traced; 1 of 1."""
    return max((n for n in (*_prime_numbers(), 1) if traced % n == 0), default=1)


def shown_setting(setting: Setting, shown: Chunks) -> Setting:
    """Return the setting in which a head goes over the chunks `shown`."""
    return replace(setting, length=shown.positions * setting.cp, chunk_tokens=shown.tokens)


def chunked_costs(timeline: Timeline, begun: Sequence[int], shown: Chunks, wanted: Chunks) -> Costs:
    """Return the costs of a head that goes over the chunks `wanted`.

    timeline: of the traced chunks, `shown`. begun: steps of the forward pass when the loss of each traced chunk begins.
    """
    assert len(begun) == shown.count
    names = ("samples", "positions", "tokens", "last")
    scale = _Scales(each=tuple((getattr(shown, name), getattr(wanted, name)) for name in names))
    # All chunks between the first and the last do the same: the second one stands for them and is counted that often.
    times = [1] * (len(timeline.forward) + len(timeline.backward))
    if wanted.count > _SHOWN:
        middle = slice(begun[1], begun[2])
        times[middle] = [wanted.count - _SHOWN + 1] * len(times[middle])
    return timeline.costs(scale, times)
