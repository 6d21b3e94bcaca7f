"""The `search` section of a run file: what `phalanx search` may choose, and how it measures."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from phalanx.config.bounds import GiB, PositiveInt, Scalar, Seconds
from phalanx.config.section import Section


def _tunable_from_values(value: object) -> object:
    return {"values": value} if isinstance(value, list) else value


class Tunable(Section):
    """A choice beside the layout: a field of the run file, or a variable of the ranks' environment."""

    values: Annotated[list[Scalar], Field(min_length=1)]
    """What it may be; null leaves it as the run file, or the environment, has it."""
    when: str | None = None
    """Condition on the layout and on earlier knobs without which it stays as it is, such as "zero == 3 and tp > 1"."""


class Search(Section):
    """What may be chosen, and how trials are measured."""

    layout: dict[str, list[Scalar]] = Field(default_factory=dict)
    """Fields of the layout with the only values they may have; others are free, as for `phalanx plan`."""
    knobs: dict[str, Annotated[Tunable, BeforeValidator(_tunable_from_values)]] = Field(default_factory=dict)
    """Further choices: `section.field` of the run file, or `env.NAME`; a list stands for its values."""
    constraints: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    """Conditions that every choice meets, such as "tp * microbatch <= 16 or recompute == 'full'"."""
    steps: Annotated[int, Field(ge=2, le=10**6)] = 8
    """Optimizer steps of a trial."""
    skip: PositiveInt = 3
    """First steps of a trial that are not timed: compilation, warm-up."""
    time_limit_s: Seconds = 600.0
    """Seconds after which a trial counts as hanging."""
    memory_gib: GiB | None = None
    """Most host memory of a rank, GiB; null sets no limit. On a CPU it plays the part of a device's memory."""
    least_p_fits: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-4
    """Probability of fitting, by the planner, below which a layout is never tried."""
    stop_gain: Annotated[float, Field(ge=0.0)] = 0.002
    """Expected improvement of the best step's time, as a share, below which the planner's engine measures no more."""

    @model_validator(mode="after")
    def _times_something(self) -> Search:
        if self.skip >= self.steps:
            raise ValueError(f"skip={self.skip} leaves nothing of steps={self.steps} to time")
        return self
