"""The sections of a run file for studies of trials.

search   what `phalanx search` may choose beside the layout, and how it measures a trial
tune     which fields `phalanx tune` may choose, what it minimises, and when trials stop
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from phalanx.config.section import GiB, Number, PositiveInt, Scalar, Seconds, Section, first_repeated


def _range_from_values(value: object) -> object:
    """Read a list as the values that something may be, which needs no further settings."""
    return {"values": value} if isinstance(value, list) else value


class TuneRange(Section):
    """What one field may be: one of `values`, or a number from `low` to `high`."""

    values: list[Scalar] | None = None
    """Values to choose among, without an order."""
    low: Number | None = None
    """Least value; where this and `high` are whole numbers, all values are."""
    high: Number | None = None
    """Largest value."""
    log: bool = False
    """Whether ratios matter rather than differences."""
    step: PositiveInt = 1
    """Distance of whole numbers from each other, counted from `low`."""
    when: str | None = None
    """Condition on fields above it without which it stays as the run file has it, such as "model.body == 'gatv2'"."""

    @model_validator(mode="after")
    def _is_a_range(self) -> TuneRange:
        if (self.values is None) == (self.low is None and self.high is None):
            raise ValueError("give either values, or low and high")
        if self.values is not None:
            if self.log or self.step != 1:
                raise ValueError("log and step belong to low and high, not to values")
            if len(self.values) < 2:
                raise ValueError(f"values={self.values} leaves nothing to choose; give two or more")
            if (twice := first_repeated(map(repr, self.values))) is not None:
                raise ValueError(f"values holds {twice[:60]} twice")
            return self
        if self.low is None or self.high is None or self.low >= self.high:
            raise ValueError(f"low={self.low} must be less than high={self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low={self.low} has no logarithm; give a positive one, or log: false")
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        if self.step != 1 and (self.log or not whole):
            raise ValueError(f"step={self.step} needs whole numbers low and high, and log: false")
        return self


class Asha(Section):
    """Early stopping: trials pause at rungs, and the best of each go on (asynchronous successive halving)."""

    first_steps: PositiveInt | None = None
    """Optimizer steps of the first rung; null takes the last rung's, `rungs` - 1 times divided by `eta`."""
    eta: Annotated[int, Field(ge=2, le=1000)] = 3
    """One in so many goes on from a rung, for so many times the steps."""
    rungs: Annotated[int, Field(ge=1, le=100)] = 3
    """Rungs at most; the last one is the whole run."""


class Tune(Section):
    """What may be chosen, what is minimised, and how trials run."""

    parameters: dict[str, Annotated[TuneRange, BeforeValidator(_range_from_values)]] = Field(default_factory=dict)
    """Fields of the run file, as `section.field`, with what they may be; a list stands for its values."""
    constraints: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    """Conditions that every trial meets, such as "model.d_model * model.n_layers <= 2048"."""
    metric: str = "loss"
    """What is minimised: a figure of the held-out evaluation, such as loss, perplexity or errors.forces.mae."""
    trials: Annotated[int, Field(ge=1, le=10**6)] = 50
    """Configurations that are tried."""
    engine: Literal["optuna-tpe", "deephyper", "random"] = "optuna-tpe"
    """What proposes configurations."""
    asha: Asha | None = Field(default=Asha())
    """Early stopping; null trains every trial to its end."""
    first: Literal["default", "engine"] = "default"
    """Whether the first trials include the run file as it stands, to compare with."""
    time_limit_s: Seconds = 86400.0
    """Seconds after which a trial between two rungs counts as hanging."""
    study_time_s: Seconds | None = None
    """Seconds after which nothing is begun and running trials stop, to go on later; null is no limit."""
    nproc: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Ranks of a trial, a device each; the run file's layout must be one of so many."""
    memory_gib: GiB | None = None
    """Memory of a device for all trials that share it, GiB; null takes what the device, or the host, has."""
    slots: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Trials that may share a device; auto is 2 on a CPU and 4 on an accelerator."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the random choices of `engine`."""


class Tunable(Section):
    """A choice beside the layout: a field of the run file, or a variable of the ranks' environment."""

    values: Annotated[list[Scalar], Field(min_length=1)]
    """Values to choose among; null leaves it as the run file, or the environment, has it."""
    when: str | None = None
    """Condition on the layout and on earlier knobs without which it stays as it is, such as "zero == 3 and tp > 1"."""


class Search(Section):
    """What may be chosen, and how trials are measured."""

    layout: dict[str, list[Scalar]] = Field(default_factory=dict)
    """Fields of the layout with the only values they may have; others are free, as for `phalanx plan`."""
    knobs: dict[str, Annotated[Tunable, BeforeValidator(_range_from_values)]] = Field(default_factory=dict)
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
