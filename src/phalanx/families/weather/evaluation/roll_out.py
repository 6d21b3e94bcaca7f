"""Roll-outs: which steps of a model make up a lead time, and the forecasts that they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.field_samples import Cases, FieldReader
from phalanx.families.weather.model.forecaster import Forecaster


def lead_steps(run: WeatherRun, hours: int, step_hours: int | None) -> dict[int, tuple[int, ...]]:
    """Return the steps that make up each lead time up to `hours`; see `plan_steps` and `forecast_split`. Raises
    ConfigError."""
    trained = run.data.leads if run.data.rollout_hours is None else [run.data.rollout_hours]
    if step_hours is not None and step_hours not in trained:
        known = ", ".join(map(str, trained))
        raise ConfigError(f"--step {step_hours}: the model was trained on lead times of {known} hours")
    taken = trained if step_hours is None else [step_hours]
    steps = plan_steps(taken, hours)
    unpredicted = [name for name in run.data.inputs if name not in run.data.target_variables]
    if unpredicted:
        # What is not predicted is not known for a second step.
        steps = {reached: parts for reached, parts in steps.items() if len(parts) == 1}
    if hours not in steps:
        nearest = max((reached for reached in steps if reached < hours), default=min(trained))
        why = f" (no roll-out: {unpredicted[0]} is read but not predicted)" if unpredicted else ""
        raise ConfigError(
            f"--hours {hours}: steps of {', '.join(map(str, taken))} hours do not reach it{why}\nnearest: --hours {nearest}"
        )
    return steps


def plan_steps(trained: Sequence[int], hours: int) -> dict[int, tuple[int, ...]]:
    """Return for every lead time up to `hours` the fewest steps of the `trained` lead times that add up to it.

    Of equally few the last step is the shortest, so that longer lead times build on shorter ones.
    """
    found: dict[int, tuple[int, ...]] = {0: ()}
    for reached in range(1, hours + 1):
        # Each step adds its own error, so the fewest are taken.
        before = [(len(found[reached - lead]), lead) for lead in trained if reached - lead in found]
        if before:
            lead = min(before)[1]
            found[reached] = (*found[reached - lead], lead)
    del found[0]
    return found


@torch.no_grad()
def roll_out(
    model: Forecaster, reader: FieldReader, source: int, starts: Int64Array, steps: dict[int, tuple[int, ...]]
) -> Iterator[Tensor]:
    """Yield for each lead time the forecasts [n, V_out, H, W] from these input frames, in the units of the fields."""
    device = next(model.parameters()).device
    # No target is read: any frame that is there will do.
    inputs = reader.read_cases(Cases(np.full(len(starts), source, dtype=np.int64), starts, starts)).fields.to(device)
    # Longer lead times begin where shorter ones ended, so every step is computed once.
    states: dict[tuple[int, ...], Tensor] = {(): inputs}
    # A step can only follow where everything that is read was predicted or stays as it is.
    can_follow = set(model.config.output_names) <= set(model.config.input_names)
    for parts in steps.values():
        lead = torch.full((len(starts),), float(parts[-1]), device=device)
        predicted = model.forecast(states[parts[:-1]], lead)
        if can_follow:
            states[parts] = model.next_inputs(inputs, predicted)
        # In float32: geopotential in its own units has more digits than bfloat16.
        yield reader.denormalise(predicted.float())


def known_cases(reader: FieldReader, source: int, rows: Int64Array, column: int) -> tuple[Cases, Int64Array]:
    """Return the cases of one lead time that have a truth, and which of `rows` (of the source's windows) they are.

    column: number of the lead time among those of the windows.
    """
    windows = reader.sources[source].windows
    targets = windows.targets[rows, column]
    known = np.flatnonzero(targets >= 0)
    return Cases(np.full(len(known), source, dtype=np.int64), windows.starts[rows[known]], targets[known]), known


def forecasts_of(
    model: Forecaster, reader: FieldReader, source: int, rows: Int64Array, steps: dict[int, tuple[int, ...]]
) -> Iterator[tuple[Cases, Tensor]]:
    """Yield for each lead time the cases of these inputs that have a truth, and their forecasts in the units of the
    fields."""
    starts = reader.sources[source].windows.starts[rows]
    for column, forecast in enumerate(roll_out(model, reader, source, starts, steps)):
        cases, known = known_cases(reader, source, rows, column)
        if len(cases):
            yield cases, forecast[torch.from_numpy(known).to(forecast.device)]
