"""Forecasts of a trained model over a split: single steps and roll-outs of them, scored, with a few fields to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.sample_order import Int64Array
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.weather.config import ModelGrid, WeatherRun
from phalanx.families.weather.data.coordinates import Float32Array, Grid
from phalanx.families.weather.data.field_samples import Cases, FieldReader, SplitName, Windows
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.compare_forecasts import Comparison, ScoreRow, known_climatologies
from phalanx.families.weather.evaluation.forecast_file import FileLayout, ForecastFile, open_forecast_file
from phalanx.families.weather.evaluation.significance import StartScores
from phalanx.families.weather.evaluation.spectra import Spectrum
from phalanx.families.weather.inputs import STATISTICS, grid_of_data
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.families.weather.model.member_noise import member_noise, repeat_members
from phalanx.hardware.device import require_cpu_format
from phalanx.nn.precision import PRECISIONS
from phalanx.training.checkpointing import find_trained_run, load_module

_BATCH = 16
"""Forecasts computed at a time."""
_MAPPED = ("geopotential_500", "temperature_850", "2m_temperature")
"""Variables that are shown as maps where nobody says which."""
_MAPS = 3
"""Lead times, and variables where nobody says which, that are shown as maps."""


@dataclass(frozen=True)
class LoadedForecaster:
    """A forecaster on one device, in evaluation mode."""

    model: Forecaster
    run: WeatherRun
    where: Path
    """Folder of the checkpoint."""
    step: int
    """Optimizer steps that it was trained for."""


@dataclass(frozen=True)
class FieldMap:
    """One forecast of one variable, in its own units, south to north and eastward."""

    variable: str
    lead_hours: int
    start: str
    """Time of the input."""
    forecast: Float32Array
    """Predicted field [H, W]."""
    truth: Float32Array
    """True field [H, W], NaN where nothing is known."""


@dataclass(frozen=True)
class Forecasts:
    """Scores and maps of the forecasts from one split."""

    split: SplitName
    starts: int
    """Inputs that forecasts were made from."""
    members: int
    """Members of each forecast."""
    steps: dict[int, tuple[int, ...]]
    """Lead times of the model's steps that make up each lead time, in hours."""
    rows: list[ScoreRow]
    spectra: list[Spectrum]
    """Zonal energy spectra; none on a grid that does not go round the globe."""
    by_start: StartScores
    """Scores of every forecast."""
    maps: list[FieldMap]
    grid: Grid
    without_climatology: str | None
    """Reason why climatology and anomaly correlation are missing; None where they are not."""

    def as_dict(self) -> dict[str, Any]:
        """Return the scores and what they belong to, ready for JSON."""
        return {
            "split": self.split,
            "starts": self.starts,
            "members": self.members,
            "steps_hours": {str(hours): list(steps) for hours, steps in self.steps.items()},
            "without_climatology": self.without_climatology,
            "scores": [row.as_dict() for row in self.rows],
            "spectra": [spectrum.as_dict() for spectrum in self.spectra],
        }


def load_forecaster(path: Path, device: torch.device, overrides: Sequence[str] = ()) -> LoadedForecaster:
    """Load the newest whole checkpoint of a run directory, or one checkpoint, whatever layout wrote it.

    overrides: fields of its run file to change, as `section.field=value`. Fields are normalised as in training unless
    `data.statistics` says otherwise. Raises CheckpointError where there is no sound checkpoint of a weather model.
    """
    newest, run = find_trained_run(path, overrides)
    if not isinstance(run, WeatherRun):
        raise CheckpointError(
            f"{newest.path} is of model.family={run.model.family}; phalanx forecast takes weather models"
        )
    statistics = newest.path.parent.parent / STATISTICS
    # Statistics of the run itself: data that have grown since would give other ones.
    if run.data.statistics is None and statistics.exists():
        run = run.model_copy(update={"data": run.data.model_copy(update={"statistics": str(statistics)})})
    require_cpu_format(PRECISIONS[run.layout.precision].compute_dtype, device)
    with torch.device("meta"):
        model = Forecaster(run.model, dtype=PRECISIONS[run.layout.precision].compute_dtype)
    # Built without memory first: every parameter is read from the checkpoint.
    model.to_empty(device=device)
    load_module(newest.path, model, run.training.lora)
    return LoadedForecaster(model.eval(), run, newest.path, newest.step)


def forecast_split(
    loaded: LoadedForecaster,
    *,
    hours: int,
    split: SplitName,
    step_hours: int | None = None,
    starts: int | None = None,
    members: int | None = None,
    mapped: Sequence[str] = (),
    out: Path | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Forecasts:
    """Forecast from every input of a split up to `hours` ahead and score all lead times that the model's steps reach.

    step_hours: roll out in steps of this lead time alone; None takes the fewest steps of the lead times trained on.
    starts: inputs to start from, spread evenly over each source; None takes all. members: of each forecast; None takes as
    many as the model was trained with. mapped: variables to show as maps, of an ensemble its mean.
    out: file to write all forecasts to, those without a truth too; see `evaluation.forecast_file`.
    rank, ranks: this rank among those of the process group, which share the starts; each of them gets all scores and maps.
    progress: called with inputs done and in all, of this rank.

    Raises ConfigError where the steps do not reach `hours` or cannot follow one another, DataError for unusable data.
    """
    run = loaded.run
    fields = FieldSet(run.data)
    grid = grid_of_data(run, fields.grid)
    steps = lead_steps(run, hours, step_hours)
    reader = fields.reader(split, seed=run.training.seed, leads=list(steps))
    climatologies, without = known_climatologies(fields, reader)
    count = member_count(run, members)
    comparison = Comparison(reader, climatologies, next(loaded.model.parameters()).device, count, details=True)
    chosen = [spread_rows(source.windows, starts, len(reader.sources)) for source in reader.sources]
    shown = _MapKeeper(reader, mapped, list(steps), chosen)
    mine = [rows[rank::ranks] for rows in chosen]
    opened = nullcontext() if out is None else _open_file(out, loaded, reader, chosen, steps, count, rank, ranks)
    with opened as file:
        for index, rows, column, forecast in _forecast_rows(loaded, reader, mine, steps, grid, count, progress):
            if file is not None:
                file.write(np.searchsorted(chosen[index], rows), column, forecast)
            cases, known = known_cases(reader, index, rows, column)
            if len(cases):
                scored = forecast.unflatten(0, (len(rows), count))[torch.from_numpy(known).to(forecast.device)]
                comparison.add(cases, scored.flatten(0, 1))
                shown.look(cases, scored.mean(1))
    if ranks > 1:
        comparison.all_reduce()
    return Forecasts(
        split=split,
        starts=sum(map(len, chosen)),
        members=count,
        steps=steps,
        rows=comparison.rows(),
        spectra=comparison.spectra(),
        by_start=comparison.by_start(),
        maps=shown.gather_maps(ranks),
        grid=reader.grid,
        without_climatology=without,
    )


def _forecast_rows(
    loaded: LoadedForecaster,
    reader: FieldReader,
    chosen: Sequence[Int64Array],
    steps: dict[int, tuple[int, ...]],
    grid: ModelGrid | None,
    members: int,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[int, Int64Array, int, Tensor]]:
    """Yield source, rows of its windows, number of the lead time and the members' forecasts, of all rows chosen."""
    done, seed = 0, loaded.run.training.seed
    for index, rows in batch_rows(chosen, max(1, _BATCH // members)):
        starts = reader.sources[index].windows.starts[rows]
        rolled = roll_out(loaded.model, reader, index, starts, steps, grid, members=members, seed=seed)
        for column, forecast in enumerate(rolled):
            yield index, rows, column, forecast
        done += len(rows)
        progress(done, sum(map(len, chosen)))


def member_count(run: WeatherRun, members: int | None) -> int:
    """Return the members of each forecast: `members`, or as many as the model was trained with.

    Raises ConfigError where a model without noise is to give several.
    """
    if members is not None and members > 1 and not run.model.noise_channels:
        raise ConfigError(
            f"--members {members}: the model has no noise, so all members would be equal; train it with model.loss=crps, or "
            "join several runs with phalanx ensemble"
        )
    return members or run.model.members


def _open_file(
    out: Path,
    loaded: LoadedForecaster,
    reader: FieldReader,
    chosen: Sequence[Int64Array],
    steps: dict[int, tuple[int, ...]],
    members: int,
    rank: int,
    ranks: int,
) -> AbstractContextManager[ForecastFile]:
    """Open the file of the forecasts from the rows chosen. Raises ConfigError where it cannot hold them."""
    if len(chosen) > 1:
        raise ConfigError(
            f"--out {out}: a file has one list of times, but the run has {len(chosen)} sources; name one of them, as in "
            f'data.sources=["{loaded.run.data.sources[0].path}"]'
        )
    source = reader.sources[0]
    # Of all ranks: the file has the starts of all, of which each rank writes its own.
    starting = source.windows.starts[chosen[0]]
    seconds = source.store.times.seconds[starting]
    layout = FileLayout.of(source.store, reader.outputs, seconds, list(steps), members)
    return open_forecast_file(out, layout, f"{loaded.where}, step {loaded.step}", rank, ranks)


def lead_steps(run: WeatherRun, hours: int, step_hours: int | None) -> dict[int, tuple[int, ...]]:
    """Return the steps that make up each lead time up to `hours`; see `plan_steps` and `forecast_split`. Raises
    ConfigError."""
    trained = run.data.leads if run.data.rollout_hours is None else [run.data.rollout_hours]
    if step_hours is not None and step_hours not in trained:
        known = ", ".join(map(str, trained))
        raise ConfigError(f"--step {step_hours}: the model was trained on lead times of {known} hours")
    taken = trained if step_hours is None else [step_hours]
    # Only what is predicted a step of this length on is the next of several states.
    followed = run.data.state_hours if run.data.history > 1 else None
    steps = plan_steps(taken, hours, followed)
    unpredicted = [name for name in run.data.inputs if name not in run.data.target_variables]
    if unpredicted:
        # What is not predicted is not known for a second step.
        steps = {reached: parts for reached, parts in steps.items() if len(parts) == 1}
    if hours not in steps:
        nearest = max((reached for reached in steps if reached < hours), default=min(trained))
        why = f" (no roll-out: {unpredicted[0]} is read but not predicted)" if unpredicted else ""
        if followed is not None and followed not in taken:
            why = f" (no roll-out: steps of data.history_hours={followed} alone lead from states to states)"
        raise ConfigError(
            f"--hours {hours}: steps of {', '.join(map(str, taken))} hours do not reach it{why}\nnearest: --hours {nearest}"
        )
    return steps


def plan_steps(trained: Sequence[int], hours: int, followed: int | None = None) -> dict[int, tuple[int, ...]]:
    """Return for every lead time up to `hours` the fewest steps of the `trained` lead times that add up to it.

    followed: the only lead time that another step may follow; None lets every. Of equally few the last step is the
    shortest, so that longer lead times build on shorter ones.
    """
    found: dict[int, tuple[int, ...]] = {0: ()}
    # What a step may begin from.
    reachable = found
    if followed is not None:
        most = hours // followed if followed in trained else 0
        reachable = {followed * count: (followed,) * count for count in range(most + 1)}
    for reached in range(1, hours + 1):
        # Each step adds its own error, so the fewest are taken.
        before = [(len(reachable[reached - lead]), lead) for lead in trained if reached - lead in reachable]
        if before:
            lead = min(before)[1]
            found[reached] = (*reachable[reached - lead], lead)
    del found[0]
    return found


@torch.no_grad()
def roll_out(
    model: Forecaster,
    reader: FieldReader,
    source: int,
    starts: Int64Array,
    steps: dict[int, tuple[int, ...]],
    grid: ModelGrid | None = None,
    *,
    members: int = 1,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield for each lead time the forecasts [n, V_out, H, W] from these input frames, in the units of the fields.

    grid: that of the data, as `inputs.grid_of_data` finds it. members: of each forecast, which are n * members rows then,
    one after the other; seed: of their noise. A member is a function of seed, time of the input and its number, whatever is
    forecast beside it.
    """
    device = next(model.parameters()).device
    seconds = torch.from_numpy(reader.sources[source].store.times.seconds[starts]).to(device)
    # Longer lead times begin where shorter ones ended, so every step is computed once.
    begin = repeat_members(reader.read_states(source, starts).to(device), len(starts) * members)
    states: dict[tuple[int, ...], Tensor] = {(): begin}
    # A step can only follow where everything that is read was predicted or stays as it is.
    can_follow = set(model.config.output_names) <= set(model.config.input_names)

    def predict(parts: tuple[int, ...]) -> Tensor:
        """Forecast the last of these steps, and those before it that no other lead time has asked for."""
        if parts[:-1] not in states:
            predict(parts[:-1])
        before = states[parts[:-1]]
        forcings = repeat_members(reader.read_forcings(source, starts, sum(parts)).to(device), len(before))
        lead = torch.full((len(before),), float(parts[-1]), device=device)
        rows_S = model.all_positions(device, grid).rows_S
        noise = member_noise(model.config, seed, seconds, members, rows_S, step=len(parts) - 1)
        predicted = model.forecast(model.with_forcings(before, forcings), lead, grid, noise)
        if can_follow:
            states[parts] = model.next_inputs(before, predicted)
        return predicted

    for parts in steps.values():
        predicted = predict(parts)
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
    model: Forecaster,
    reader: FieldReader,
    source: int,
    rows: Int64Array,
    steps: dict[int, tuple[int, ...]],
    grid: ModelGrid | None = None,
) -> Iterator[tuple[Cases, Tensor]]:
    """Yield for each lead time the cases of these inputs that have a truth, and their forecasts in the units of the
    fields."""
    starts = reader.sources[source].windows.starts[rows]
    for column, forecast in enumerate(roll_out(model, reader, source, starts, steps, grid)):
        cases, known = known_cases(reader, source, rows, column)
        if len(cases):
            yield cases, forecast[torch.from_numpy(known).to(forecast.device)]


def spread_rows(windows: Windows, count: int | None, sources: int) -> Int64Array:
    """Return rows of `windows`, evenly spread: the share of one of `sources` sources in `count`; all where that is None."""
    rows = len(windows.starts)
    wanted = rows if count is None else max(1, min(rows, count // sources))
    # Over all of the split: its first inputs are of one season.
    return np.linspace(0, rows - 1, wanted).round().astype(np.int64)


def batch_rows(chosen: Sequence[Int64Array], size: int) -> list[tuple[int, Int64Array]]:
    """Return number of the source and rows, `size` at a time, of the rows chosen of each source."""
    return [(n, rows[first : first + size]) for n, rows in enumerate(chosen) for first in range(0, len(rows), size)]


class _MapKeeper:
    """Keeps the fields that maps show, of one start: the first that has a truth at most of the lead times shown."""

    def __init__(
        self, reader: FieldReader, variables: Sequence[str], leads: Sequence[int], chosen: Sequence[Int64Array]
    ) -> None:
        """Choose what is shown.

        variables: none takes the usual ones. leads: hours, as in the columns of the windows. chosen: rows of each source's
        windows, in the order of `look`. Raises ConfigError for a variable that is not predicted.
        """
        usual = [name for name in _MAPPED if name in reader.outputs]
        variables = variables or usual or reader.outputs[:_MAPS]
        for name in variables:
            if name not in reader.outputs:
                raise ConfigError(f"--map {name}: not predicted; the model predicts {', '.join(reader.outputs)}")
        self.maps: list[FieldMap] = []
        self._reader = reader
        self._variables = [reader.outputs.index(name) for name in variables]
        # The longest lead time, and others at equal distances before it.
        columns = sorted({math.ceil(len(leads) * part / _MAPS) - 1 for part in range(1, _MAPS + 1)})
        self._leads = [leads[column] for column in columns]
        windows = [source.windows for source in reader.sources]
        sources = np.repeat(np.arange(len(windows)), [len(rows) for rows in chosen])
        starts = np.concatenate([one.starts[rows] for one, rows in zip(windows, chosen, strict=True)])
        targets = np.concatenate([one.targets[rows] for one, rows in zip(windows, chosen, strict=True)])
        # One start for all lead times shown, so that maps show one forecast growing older.
        best = int(np.argmax((targets[:, columns] >= 0).sum(axis=1)))
        self._source, self._start = int(sources[best]), int(starts[best])

    def look(self, cases: Cases, forecast: Tensor) -> None:
        """Keep what is to be shown of these cases, all of one lead time."""
        # All cases have one lead time: that of the first is asked for.
        lead = int(self._reader.lead_hours(cases.take(slice(1)))[0])
        found = np.flatnonzero((cases.source == self._source) & (cases.start == self._start))
        if lead not in self._leads or not found.size:
            return
        truth = self._reader.read_outputs(cases.take(found[:1]))[0].numpy()
        start = self._reader.sources[self._source].store.times.text(self._start)
        for index in self._variables:
            values = forecast[int(found[0]), index].cpu().numpy()
            self.maps.append(FieldMap(self._reader.outputs[index], lead, start, values, truth[index]))

    def gather_maps(self, ranks: int) -> list[FieldMap]:
        """Return the maps on every one of `ranks` ranks; all of them call it together."""
        found = [self.maps] * ranks
        if ranks > 1:
            dist.all_gather_object(found, self.maps)
        # One rank has the start that is shown; the others kept nothing.
        return max(found, key=len)
