"""Forecasts from given times, whose truth need not be known: what a trained model is for once it has been scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.coordinates import moment_bounds
from phalanx.families.weather.data.field_samples import FieldReader, SplitSource, Windows, state_frames
from phalanx.families.weather.data.field_statistics import read_statistics
from phalanx.families.weather.data.field_store import BlockCache, FieldStore
from phalanx.families.weather.data.open_fields import open_store
from phalanx.families.weather.evaluation.forecast_file import FileLayout, open_forecast_file, require_forecast_path
from phalanx.families.weather.evaluation.forecast_split import (
    LoadedForecaster,
    lead_steps,
    member_count,
    roll_out,
)
from phalanx.families.weather.inputs import grid_of_data


def forecast_from(
    loaded: LoadedForecaster,
    times: Sequence[str],
    out: Path,
    *,
    hours: int,
    step_hours: int | None = None,
    members: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, tuple[int, ...]]:
    """Forecast from the fields at `times` up to `hours` ahead and write all lead times to `out`; return their steps.

    times: dates as in "2015-12-31 18:00", each the time of one frame of the first source. It needs to have what the model
    reads only. rank, ranks: this rank among those of the process group, which share the times. The rest as in
    `forecast_split`. Raises DataError where there is no such frame, or an input has no value.
    """
    run = loaded.run
    # Before fields are opened, which may take long.
    require_forecast_path(out, ranks)
    steps = lead_steps(run, hours, step_hours)
    store = _open_inputs(run)
    grid = grid_of_data(run, store.grid)
    starts = np.array(sorted({find_frame(store, time) for time in times}), dtype=np.int64)
    states_NT = state_frames(run.data, store.times, starts)
    if (states_NT < 0).any():
        row, age = (int(item[0]) for item in np.nonzero(states_NT < 0))
        raise ConfigError(
            f"--from '{store.times.text(int(starts[row]))}': {store.path} has no frame {age * run.data.state_hours} h "
            f"before it, and the model reads data.history={run.data.history} states; name a later time or add that frame"
        )
    # An input without any value would look to the model like the mean everywhere.
    for place in (store.variables.index(name) for name in run.data.inputs):
        for frame in np.unique(states_NT):
            if np.isnan(store.read(np.array([frame]), [place])).all():
                raise DataError(
                    f"{store.place(place, int(frame))}: no value at any point; nothing can be forecast from it"
                )
    reader = _read_starts(run, store, starts, list(steps))
    count = member_count(run, members)
    layout = FileLayout.of(store, reader.outputs, store.times.seconds[starts], list(steps), count)
    with open_forecast_file(out, layout, f"{loaded.where}, step {loaded.step}", rank, ranks) as file:
        mine = range(rank, len(starts), ranks)
        # One at a time: there are few.
        for done, number in enumerate(mine, 1):
            one = starts[number : number + 1]
            rolled = roll_out(loaded.model, reader, 0, one, steps, grid, members=count, seed=run.training.seed)
            for column, forecast in enumerate(rolled):
                file.write(np.array([number]), column, forecast)
            progress(done, len(mine))
    return steps


def find_frame(store: FieldStore, time: str) -> int:
    """Return the number of the only frame of `store` within the moment `time` names. Raises ConfigError otherwise."""
    first, last = moment_bounds(time, store.times.calendar)
    found = np.flatnonzero((store.times.seconds >= first) & (store.times.seconds <= last))
    if len(found) > 1:
        raise ConfigError(f"--from {time}: {store.path} has {len(found)} frames in it; name one, to the minute")
    if not len(found):
        nearest = store.times.text(int(np.abs(store.times.seconds - first).argmin()))
        raise ConfigError(f"--from {time}: {store.path} has no frame of that time\nnearest: --from '{nearest}'")
    return int(found[0])


def _open_inputs(run: WeatherRun) -> FieldStore:
    """Open the first source with the variables that are read; what is predicted only is without a value in it."""
    data = run.data
    if len(data.sources) > 1:
        raise ConfigError(
            f"--from takes fields of one source, but the run has {len(data.sources)}; name one of them, as in "
            f'data.sources=["{data.sources[0].path}"]'
        )
    source = data.sources[0]
    known = source.variables or data.inputs
    absent = [name for name in data.inputs if name not in known]
    if absent:
        raise ConfigError(f"--from: {source.path} has no {absent[0]}, which the model reads; name a source that has it")
    variables = list(dict.fromkeys([*data.inputs, *data.target_variables]))
    narrowed = source.model_copy(update={"variables": data.inputs})
    return open_store(narrowed, variables, data.static, BlockCache(data.cache_mb * 2**20))


def _read_starts(run: WeatherRun, store: FieldStore, starts: Int64Array, leads: Sequence[int]) -> FieldReader:
    """Return a reader of these frames, normalised as in training."""
    if run.data.statistics is None:
        raise ConfigError(
            "--from needs the statistics of the training; set data.statistics to the run's statistics.json"
        )
    names = list(dict.fromkeys([*run.data.inputs, *run.data.target_variables, *run.data.static]))
    windows = Windows(
        split="test",
        starts=starts,
        # No truth is looked up: it may not have happened yet.
        targets=np.full((len(starts), len(leads)), -1, dtype=np.int64),
        frames=starts,
        without_input=0,
        without_target=0,
        incomplete=0,
        places=(),
    )
    return FieldReader(
        [SplitSource(store, windows, 1.0, store.fingerprint)],
        run.data,
        statistics=read_statistics(Path(run.data.statistics), names),
        statistics_key="",
        leads=leads,
        seed=0,
    )
