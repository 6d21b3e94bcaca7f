"""The run file of the weather family: what its sections are, and what of them does not fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.config.problems import Problem
from phalanx.config.schema import Run
from phalanx.families.weather.data_config import FieldData
from phalanx.families.weather.model_config import WeatherModel


class WeatherRun(Run):
    """A run that trains a weather model."""

    model: WeatherModel
    data: FieldData

    def find_problems(self) -> Iterator[Problem]:
        """See `Run`."""
        for rule in (_check_fields, _check_rollout, _check_attention):
            yield from rule(self)

    @property
    def data_names(self) -> list[str]:
        """See `Run`."""
        return [source.path for source in self.data.sources]


def _check_fields(run: WeatherRun) -> Iterator[Problem]:
    """Data and model name the same variables in the same order."""
    model, data = run.model, run.data
    pairs = (
        ("inputs", "data.inputs and data.static", [*data.inputs, *data.static], "model.inputs", model.input_names),
        ("outputs", "data.outputs", data.target_variables, "model.outputs", model.output_names),
    )
    for field, what, given, where, wanted in pairs:
        if given == list(wanted):
            continue
        place = next(
            (place for place, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b),
            min(len(given), len(wanted)),
        )
        mine, theirs = (names[place] if place < len(names) else "nothing more" for names in (given, wanted))
        yield Problem(
            ("data", field),
            f"{what} do not name the {len(wanted)} variables of {where} in their order: number {place + 1} is {mine} in the "
            f"data and {theirs} in the model",
            f"data.{field} in the order of {where}, with files' own names under data.sources",
        )


def _check_rollout(run: WeatherRun) -> Iterator[Problem]:
    """Steps that add up, one after another."""
    data, step = run.data, run.data.rollout_hours
    if step is None:
        return
    path = ("data", "rollout_hours")
    stated = f"data.rollout_hours={step}"
    odd = [lead for lead in data.leads if lead % step]
    if odd:
        yield Problem(
            path, f"{stated} does not divide the lead time {odd[0]}", f"data.rollout_hours={math.gcd(*data.leads)}"
        )
    unpredicted = [name for name in data.inputs if name not in data.target_variables]
    if unpredicted:
        yield Problem(path, f"{stated} needs all inputs predicted, but {unpredicted[0]} is not among data.outputs")
    if run.layout.pp != 1:
        yield Problem(
            path,
            f"{stated} starts steps from forecasts, which layout.pp={run.layout.pp} has on other ranks",
            "layout.pp=1",
        )


def _check_attention(run: WeatherRun) -> Iterator[Problem]:
    if run.training.attention in ("flex", "flash4"):
        yield Problem(
            ("training", "attention"),
            f"training.attention={run.training.attention} is for causal attention, which model.family=weather has not",
            "training.attention=auto",
        )
