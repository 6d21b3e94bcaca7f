"""Which samples a split has, and batches of them: every sample is a pure function of its number.

A sample is an input frame and a target frame that both lie in the split and are whole. Targets are found by their time,
never by counting frames, so a hole in the time axis costs samples and cannot shift one.

    global sample number -> (source, place in its reading) -> (epoch, window) -> lead time -> frames -> normalised fields
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.counter_random import stable_key, stream_key, uniform_values
from phalanx.data.batch_stream import ReadAheadStream, TensorBatch
from phalanx.data.sample_order import ORDER_VERSION, EpochShuffle, Int64Array, Mixture
from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.config import FieldData, ModelGrid, Period, RolloutSteps
from phalanx.families.weather.data.coordinates import HOUR, BoolArray, Float32Array, Grid, TimeAxis, moment_bounds
from phalanx.families.weather.data.field_statistics import FieldStatistics
from phalanx.families.weather.data.field_store import FieldStore, hash_of
from phalanx.families.weather.data.field_survey import Survey
from phalanx.families.weather.data.forcings import forcing_fields
from phalanx.families.weather.data.grid_turns import GridTurns

SplitName = Literal["train", "validation", "test"]
_SHOWN = 5
"""Incomplete frames that the log names."""


@dataclass(frozen=True)
class Windows:
    """The samples of one split of one store."""

    split: SplitName
    starts: Int64Array
    """[N]: input frames, of several states the newest."""
    targets: Int64Array
    """[N, L]: target frame of each lead time, -1 where there is none; every row has at least one."""
    frames: Int64Array
    """Frames of the split, whole or not."""
    without_input: int
    """Frames of the split that cannot be an input, since values of an input variable are missing, in an older state too."""
    without_target: int
    """Pairs of an input frame and a lead time left out since values of the target are missing."""
    incomplete: int
    """Frames with missing values, each variable counted."""
    places: tuple[str, ...]
    """File, variable and time index of the first few incomplete frames."""

    def report(self) -> str:
        """Say what was left out, in one line for the log."""
        if not self.incomplete:
            return f"{self.split}: {len(self.starts)} samples"
        more = f" and {self.incomplete - len(self.places)} more" if self.incomplete > len(self.places) else ""
        return (
            f"{self.split}: {len(self.starts)} samples; {self.without_input} input frames and {self.without_target} "
            f"targets left out for missing values in {'; '.join(self.places)}{more}"
        )


def split_frames(data: FieldData, store: FieldStore, split: SplitName) -> Int64Array:
    """Return the frames of a split without those that lie within the gap behind an earlier split.

    Raises ConfigError where splits overlap or the run has no such split, DataError where no frame lies in it.
    """
    period = getattr(data.splits, split)
    if period is None:
        raise ConfigError(f"data.splits.{split} is not given; give its first and last time")
    frames = period_frames(period, store, f"data.splits.{split}")
    gap = (max(data.leads) if data.gap_hours is None else data.gap_hours) * HOUR
    for other in ("train", "validation", "test"):
        other_period = getattr(data.splits, other)
        if other == split or other_period is None:
            continue
        others = period_frames(other_period, store, f"data.splits.{other}")
        # Scores on frames that were trained on would say nothing.
        if np.intersect1d(frames, others).size:
            raise ConfigError(
                f"data.splits.{split} ({store.times.text(int(frames[0]))} to {store.times.text(int(frames[-1]))}) and "
                f"data.splits.{other} ({store.times.text(int(others[0]))} to {store.times.text(int(others[-1]))}) share "
                f"times of {store.path}; let one end before the other begins"
            )
        # Weather is remembered for days: without a gap, held-out frames would resemble the last trained on.
        if others[0] < frames[0]:
            frames = frames[store.times.seconds[frames] - store.times.seconds[others[-1]] >= gap]
            if not frames.size:
                raise DataError(
                    f"data.splits.{split} lies within data.gap_hours of data.splits.{other} in {store.path}"
                )
    return frames


def period_frames(period: Period, store: FieldStore, field: str) -> Int64Array:
    """Return the frames of a stretch of time. field: its name in the run file. Raises DataError where there are none."""
    first = _moment_seconds(period.first, store, last=False)
    last = _moment_seconds(period.last, store, last=True)
    seconds = store.times.seconds
    frames = np.flatnonzero((seconds >= first) & (seconds <= last)).astype(np.int64)
    if not frames.size:
        raise DataError(
            f"{field}: {store.path} has no frame from {period.first} to {period.last}; it goes from "
            f"{store.times.text(0)} to {store.times.text(len(seconds) - 1)}"
        )
    return frames


def _moment_seconds(moment: str, store: FieldStore, *, last: bool) -> int:
    """Return the first or last second, since 1970, of a date or of a time step of the store."""
    if not moment.startswith("step "):
        return moment_bounds(moment, store.times.calendar)[last]
    step = int(moment.removeprefix("step "))
    if step >= len(store.times):
        raise DataError(f"{moment} is not in {store.path}, which has steps 0 to {len(store.times) - 1}")
    return int(store.times.seconds[step])


def find_windows(
    data: FieldData,
    store: FieldStore,
    survey: Survey,
    split: SplitName,
    leads: Sequence[int],
    *,
    every_lead: bool = False,
) -> Windows:
    """Find the samples of a split. leads: hours. every_lead: leave out samples that lack the target of any lead time.

    Raises DataError where no sample is left or no lead time fits the time steps, and with `data.missing` = refuse for the
    first frame with missing values.
    """
    frames = split_frames(data, store, split)
    # What a source does not have at all is missing in no frame of it.
    inputs, outputs = (
        [place for name in names if (place := store.variables.index(name)) not in store.lacking]
        for names in (data.inputs, data.target_variables)
    )
    missing = survey.empty if data.missing == "mask" else survey.incomplete
    if data.missing == "refuse":
        _refuse_missing(store, survey, frames)
    found = _find_targets(data, store, split, frames, leads)
    has_states, whole_input = _find_inputs(data, store, split, frames, np.asarray(missing[:, inputs].any(axis=1)))
    # With masks a target counts where any variable has values, unless one was never written: no mask knows of that. Without
    # masks all variables must be whole.
    how_many = missing[:, outputs].sum(axis=1)
    unwritten = survey.blank[:, outputs].any(axis=1)
    bad = (how_many == len(outputs)) | unwritten if data.missing == "mask" else how_many > 0
    # Where there is no target, -1 looks up the last frame; the first condition leaves that out.
    usable = (found >= 0) & ~bad[found]
    has_targets = usable.all(axis=1) if every_lead else usable.any(axis=1)
    kept = has_states & whole_input & has_targets
    if every_lead and not has_targets.any():
        raise DataError(
            f"data.rollout_steps={len(leads)}: no frame of data.splits.{split} in {store.path} has a whole target after "
            f"each of so many steps of {leads[0]} h; take fewer steps"
        )
    if not kept.any():
        raise DataError(
            f"data.splits.{split}: no sample left in {store.path}: {int((~whole_input).sum())} of {len(frames)} input "
            f"frames and {int(((found >= 0) & bad[found]).sum())} targets have missing values"
        )
    chosen = sorted({*inputs, *outputs})
    rows, columns = np.nonzero(missing[frames][:, chosen])
    return Windows(
        split=split,
        starts=frames[kept],
        targets=np.where(usable, found, -1)[kept],
        frames=frames,
        without_input=int((~whole_input).sum()),
        without_target=int(((found >= 0) & bad[found])[whole_input].sum()),
        incomplete=len(rows),
        places=tuple(
            store.place(chosen[column], int(frames[row]))
            for row, column in zip(rows[:_SHOWN].tolist(), columns[:_SHOWN].tolist(), strict=True)
        ),
    )


def _find_inputs(
    data: FieldData, store: FieldStore, split: SplitName, frames: Int64Array, damaged: BoolArray
) -> tuple[BoolArray, BoolArray]:
    """Return for each of a split's `frames` whether it has all the states that the model reads, and whether these are whole.

    damaged: whether values of an input variable are missing, for each frame of the store. Where there are not all states,
    nothing is said to be missing of them. Raises DataError where no frame has them all.
    """
    states_NT = state_frames(data, store.times, frames)
    # As targets: what an input is made of lies in the split too.
    has_states = np.asarray((states_NT >= frames[0]).all(axis=1))
    if not has_states.any():
        raise DataError(
            f"data.history={data.history} states {data.state_hours} h apart fit no frames of data.splits.{split} in "
            f"{_describe_frames(store, frames)}; set data.history_hours to a multiple of that"
        )
    # Where there is no older state, -1 looks up the last frame; the first condition leaves that out.
    return has_states, ~damaged[states_NT].any(axis=1) | ~has_states


def _find_targets(
    data: FieldData, store: FieldStore, split: SplitName, frames: Int64Array, leads: Sequence[int]
) -> Int64Array:
    """Return the frames [N, L] of a split that lie each lead time after each of its `frames`, -1 where there is none.

    Raises DataError for a lead time that fits no two of them.
    """
    tolerance = round(data.time_tolerance_hours * HOUR)
    seconds = store.times.seconds[frames]
    # By time and not by counting frames: a hole then costs samples and cannot shift one.
    found = np.stack([store.times.nearest(seconds + lead * HOUR, tolerance) for lead in leads], axis=1)
    found = np.where((found >= frames[0]) & (found <= frames[-1]) & (found != frames[:, None]), found, -1)
    for column, lead in enumerate(leads):
        if not (found[:, column] >= 0).any():
            raise DataError(
                f"lead time {lead} h fits no two frames of data.splits.{split} in {_describe_frames(store, frames)}"
            )
    return found


def _describe_frames(store: FieldStore, frames: Int64Array) -> str:
    seconds = store.times.seconds[frames]
    return (
        f"{store.path}, whose frames are {store.times.step / HOUR:g} h apart over "
        f"{(seconds[-1] - seconds[0]) / HOUR:g} h"
    )


def state_frames(data: FieldData, times: TimeAxis, frames: Int64Array) -> Int64Array:
    """Return the frames [N, T] of the states that the model reads at each of `frames` [N], the newest first; -1 where
    there is none."""
    ages = np.arange(data.history) * data.state_hours * HOUR
    # By time and not by counting frames, as targets are found.
    return times.nearest(times.seconds[frames][:, None] - ages, round(data.time_tolerance_hours * HOUR))


def _refuse_missing(store: FieldStore, survey: Survey, frames: Int64Array) -> None:
    """Raise DataError for the first of `frames` that has missing values."""
    incomplete = survey.incomplete[frames]
    if incomplete.any():
        row, variable = (int(item[0]) for item in np.nonzero(incomplete))
        frame = int(frames[row])
        points = int(survey.usual[variable] - survey.valid[frame, variable])
        what = f"{points} more missing points than usual" if points else "one number throughout"
        raise DataError(
            f"{store.place(variable, frame)}: {what}; {int(incomplete.any(axis=1).sum())} of {len(frames)} frames are like "
            f"that; set data.missing to skip or mask to train without them"
        )


@dataclass(frozen=True)
class SplitSource:
    """One split of one source."""

    store: FieldStore
    windows: Windows
    weight: float
    fingerprint: str
    """Checksum of the content of the store."""
    number: int = 0
    """Place among the sources of the run."""


@dataclass(frozen=True)
class Cases:
    """Forecasts to make, one for each entry of the int64 arrays [n]."""

    source: Int64Array
    start: Int64Array
    """Frames of the inputs in their source, of several states the newest."""
    target: Int64Array
    """Frames of the truth."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: slice | Int64Array) -> Cases:
        """Return the chosen cases."""
        return Cases(self.source[chosen], self.start[chosen], self.target[chosen])


class FieldReader:
    """Reads samples of one split by global sample number from a weighted mixture of sources."""

    def __init__(
        self,
        sources: Sequence[SplitSource],
        data: FieldData,
        *,
        statistics: FieldStatistics,
        statistics_key: str,
        leads: Sequence[int],
        seed: int,
        through: RolloutSteps | None = None,
    ) -> None:
        """Take sources that hold all variables of `data` on one grid.

        statistics_key: checksum of what the statistics come from, for the fingerprint; their own last bits may differ
        between machines. leads: hours, ascending, as in the columns of the windows. through: samples are roll-outs that are
        trained through, of so many steps; `leads` are then those of their steps, and every window has them all.
        """
        self.sources = tuple(sources)
        self.data = data
        self.through = through
        self.inputs = tuple(data.inputs)
        self.statics = self.sources[0].store.statics
        self.outputs = tuple(data.target_variables)
        self.leads = tuple(leads)
        self.grid: Grid = self.sources[0].store.grid
        self.statistics = statistics
        self._input_scale = _Scale(statistics, self.inputs)
        self._output_scale = _Scale(statistics, self.outputs)
        # Normalised once: static fields are the same in every sample.
        static_scale = _Scale(statistics, self.statics)
        self._static = [static_scale.normalise(source.store.read_static().copy()) for source in self.sources]
        # Sources take turns by weight, each shuffled by itself: see `data.sample_order`.
        self._mixture = Mixture([source.weight for source in self.sources])
        split = self.sources[0].windows.split
        self._orders = [
            EpochShuffle(len(source.windows.starts), stable_key("fields", split, seed, source.number))
            for source in self.sources
        ]
        # A stream of its own, so that another lead time changes nothing else of the order.
        first = self.sources[0].number
        self._lead_key = stream_key("lead time", split, seed, *([first] if first else []))
        contents = [
            (source.fingerprint, hash_of(source.windows.starts.tobytes(), source.windows.targets.tobytes()))
            for source in self.sources
        ]
        names: tuple[object, ...] = (self.inputs, self.statics, self.outputs)
        # Only where they are in use: runs that began before there were any go on.
        if data.forcings or data.history > 1:
            names = (*names, data.forcings, data.history, data.state_hours)
        if through is not None:
            names = (*names, through.model_dump())
        self.fingerprint = hash_of(
            ORDER_VERSION, seed, self._mixture.weights, contents, names, self.leads, statistics_key
        )

    def locate(self, numbers: Int64Array) -> Cases:
        """Return source, input frame and target frame of each global sample number."""
        source, place = self._mixture(numbers)
        start, target = np.empty_like(place), np.empty_like(place)
        draw = uniform_values(self._lead_key, torch.from_numpy(np.asarray(numbers, dtype=np.int64))).numpy()
        for index, order in enumerate(self._orders):
            mine = np.flatnonzero(source == index)
            if not mine.size:
                continue
            windows = self.sources[index].windows
            chosen = order(place[mine])
            targets = windows.targets[chosen]
            # The draw-th of the lead times that this input has a target for: each, the longest too, equally often.
            wanted = np.floor(draw[mine] * (targets >= 0).sum(axis=1))
            lead = np.argmax(np.cumsum(targets >= 0, axis=1) > wanted[:, None], axis=1)
            start[mine] = windows.starts[chosen]
            target[mine] = np.take_along_axis(targets, lead[:, None], axis=1)[:, 0]
        return Cases(source, start, target)

    def read(self, numbers: Int64Array, step: int = 1) -> FieldBatch:
        """Read the samples with these global numbers, int64 [B], as optimizer step `step` takes them."""
        steps = None if self.through is None else self.through.of_step(step)
        return self.read_cases(self.locate(numbers), numbers, steps)

    def read_cases(self, cases: Cases, numbers: Int64Array | None = None, steps: int | None = None) -> FieldBatch:
        """Return the inputs and targets of given forecasts.

        numbers: their global sample numbers, 0 where None. steps: read the targets of that many steps of a roll-out, in
        place of those of the cases.
        """
        count, grid = len(cases), self.grid.shape
        fields = np.empty((count, *self._states_shape()), dtype=np.float32)
        further = (steps or self.data.steps_to_leads) - 1
        forcings = np.empty((count, further, self.data.history, len(self.data.forcings), *grid), dtype=np.float32)
        targets = np.empty((count, steps or 1, len(self.outputs), *grid), dtype=np.float32)
        hours, cycles = np.empty(len(cases), dtype=np.float32), np.empty((len(cases), 2), dtype=np.float32)
        for index, mine in self._by_source(cases):
            store = self.sources[index].store
            starting = store.times.seconds[cases.start[mine]]
            step = self.data.rollout_hours
            # Forcings are of the time that is predicted: the end of a roll-out's first step, then of the others.
            valid = store.times.seconds[cases.target[mine]] if step is None else starting + step * HOUR
            with _writable_rows(fields, mine) as part:
                self._fill_states(part, index, cases.start[mine])
                part[:, :, len(self.inputs) + len(self.statics) :] = self._forcings(index, valid)
            if step is not None and self.data.forcings:
                for number in range(further):
                    forcings[mine, number] = self._forcings(index, valid + (number + 1) * step * HOUR)
            frames_NK = cases.target[mine][:, None]
            if steps is not None:
                assert step is not None
                wanted = starting[:, None] + np.arange(1, steps + 1) * step * HOUR
                frames_NK = store.times.nearest(wanted, round(self.data.time_tolerance_hours * HOUR))
            with _writable_rows(targets, mine) as part:
                for number in range(part.shape[1]):
                    store.fill(part[:, number], frames_NK[:, number], self._columns(index, self.outputs))
                self._output_scale.normalise(part)
            # What lies between the frames, not what was asked for: months are of different lengths.
            hours[mine] = (store.times.seconds[frames_NK[:, -1]] - starting) / HOUR
            cycles[mine] = store.times.parts_of_cycles[cases.start[mine]]
        given = np.zeros(len(cases), dtype=np.int64) if numbers is None else numbers
        # Contiguous: batches are pinned and copied to the device, and columns of an array are strided.
        year, day = torch.from_numpy(cycles).T.contiguous()
        return FieldBatch(
            torch.from_numpy(fields.reshape(count, -1, *grid)),
            torch.from_numpy(forcings),
            torch.from_numpy(targets[:, 0] if steps is None else targets),
            torch.from_numpy(hours),
            year,
            day,
            # A copy: torch would share the memory of the caller's numbers.
            torch.from_numpy(np.array(given, dtype=np.int64)),
        )

    def read_states(self, source: int, starts: Int64Array) -> Tensor:
        """Return the inputs [n, V, H, W] of forecasts from these frames, all but the forcings, which are 0."""
        fields = np.zeros((len(starts), *self._states_shape()), dtype=np.float32)
        self._fill_states(fields, source, starts)
        return torch.from_numpy(fields.reshape(len(starts), -1, *self.grid.shape))

    def read_forcings(self, source: int, starts: Int64Array, hours: int) -> Tensor:
        """Return the forcings [n, T, F, H, W] of a step that begins at these frames or later and ends `hours` after them."""
        return torch.from_numpy(self._forcings(source, self.sources[source].store.times.seconds[starts] + hours * HOUR))

    def _states_shape(self) -> tuple[int, ...]:
        """Return the shape of the inputs of one sample: states, variables and forcings, rows, columns."""
        width = len(self.inputs) + len(self.statics) + len(self.data.forcings)
        return self.data.history, width, *self.grid.shape

    def _fill_states(self, out: Float32Array, source: int, starts: Int64Array) -> None:
        """Write normalised inputs and static fields to `out` [n, T, V, H, W], each state with both."""
        store, count = self.sources[source].store, len(self.inputs)
        frames_NT = state_frames(self.data, store.times, starts)
        # A state that is not there would be read as the last frame.
        assert (frames_NT >= 0).all(), "an input has no older state"
        for age in range(self.data.history):
            inputs = out[:, age, :count]
            store.fill(inputs, frames_NT[:, age], self._columns(source, self.inputs))
            self._input_scale.normalise(inputs)
            # The mean of a normalised field: the model has no input for missing values.
            inputs[np.isnan(inputs)] = 0.0
        out[:, :, count : count + len(self.statics)] = self._static[source]

    def _forcings(self, source: int, valid_N: Int64Array) -> Float32Array:
        """Return the forcings [N, T, F, H, W] of steps that end at times `valid_N`; those of older states are as much
        earlier as these."""
        ages_T = np.arange(self.data.history) * self.data.state_hours * HOUR
        times_NT = valid_N[:, None] - ages_T
        calendar = self.sources[source].store.times.calendar
        found = forcing_fields(self.data.forcings, self.grid, calendar, times_NT.flatten())
        return found.reshape(*times_NT.shape, *found.shape[1:])

    def read_outputs(self, cases: Cases, *, at_start: bool = False) -> Tensor:
        """Return the output variables [n, V_out, H, W], float32 in their own units, at the targets or at the inputs."""
        out = np.empty((len(cases), len(self.outputs), *self.grid.shape), dtype=np.float32)
        for index, mine in self._by_source(cases):
            frames = (cases.start if at_start else cases.target)[mine]
            out[mine] = self.sources[index].store.read(frames, self._columns(index, self.outputs))
        return torch.from_numpy(out)

    def cases(self, source: int = 0) -> Cases:
        """Return every forecast of a source's split: all inputs in order of time, each with all its lead times."""
        windows = self.sources[source].windows
        row, lead = np.nonzero(windows.targets >= 0)
        return Cases(np.full(len(row), source, dtype=np.int64), windows.starts[row], windows.targets[row, lead])

    def lead_hours(self, cases: Cases) -> Tensor:
        """Return the lead time asked for of each case in hours, int64 [n], also where frames lie a little off it."""
        hours = np.empty(len(cases))
        for index, mine in self._by_source(cases):
            seconds = self.sources[index].store.times.seconds
            hours[mine] = (seconds[cases.target[mine]] - seconds[cases.start[mine]]) / HOUR
        # Frames of months lie a day off the hours asked for; scores are kept by what was asked.
        leads = np.array(self.leads)
        return torch.from_numpy(leads[np.abs(hours[:, None] - leads).argmin(axis=1)])

    def start_seconds(self, cases: Cases) -> Int64Array:
        """Return the time of each case's input in seconds since 1970, [n]: held-out forecasts draw noise by it."""
        seconds = np.empty(len(cases), dtype=np.int64)
        for index, mine in self._by_source(cases):
            seconds[mine] = self.sources[index].store.times.seconds[cases.start[mine]]
        return seconds

    def denormalise(self, outputs: Tensor) -> Tensor:
        """Return normalised output variables [..., V_out, H, W] in their own units."""
        mean, std = self._output_scale.tensors(outputs)
        return outputs * std + mean

    def _columns(self, source: int, names: Sequence[str]) -> list[int]:
        return [self.sources[source].store.variables.index(name) for name in names]

    def _by_source(self, cases: Cases) -> Iterator[tuple[int, Int64Array]]:
        for index in range(len(self.sources)):
            mine = np.flatnonzero(cases.source == index)
            if mine.size:
                yield index, mine


@contextmanager
def _writable_rows(array: Float32Array, rows: Int64Array) -> Iterator[Float32Array]:
    """Yield the given rows of an array, to be written to: the array itself where they are all of it, which saves a copy."""
    if len(rows) == len(array):
        yield array
        return
    part = np.empty((len(rows), *array.shape[1:]), dtype=np.float32)
    yield part
    array[rows] = part


class _Scale:
    """Means and standard deviations of some variables, as float32."""

    def __init__(self, statistics: FieldStatistics, names: Sequence[str]) -> None:
        self._mean = statistics.mean_of(names).astype(np.float32).reshape(-1, 1, 1)
        self._std = statistics.std_of(names).astype(np.float32).reshape(-1, 1, 1)

    def normalise(self, fields: Float32Array) -> Float32Array:
        """Normalise fields [..., V, H, W] in place and return them."""
        fields -= self._mean
        fields /= self._std
        return fields

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = torch.from_numpy(self._mean), torch.from_numpy(self._std)
        return mean.to(like.device, like.dtype), std.to(like.device, like.dtype)


@dataclass(frozen=True)
class FieldBatch(TensorBatch):
    """Samples of one rank. Fields run from south to north and eastward."""

    fields: Tensor
    """float32 [B, V_in, H, W]: inputs, then static fields, then forcings, of the newest state and then of those before it;
    normalised, 0 (the mean) where a value is missing."""
    forcings: Tensor
    """float32 [B, K, T, F, H, W]: forcings of the T states in the K steps of a roll-out after the first; K = 0 without."""
    targets: Tensor
    """float32 [B, V_out, H, W]: normalised, NaN where a value is missing. Of a roll-out that is trained through
    [B, K + 1, V_out, H, W], of all its steps."""
    lead_hours: Tensor
    """float32 [B]: hours from input to the last target."""
    time_of_year: Tensor
    """float32 [B]: part of the year that has passed at the input, from 0 to 1."""
    time_of_day: Tensor
    """float32 [B]: part of the day, in UTC, that has passed at the input, from 0 to 1."""
    sample_indices: Tensor
    """int64 [B]: global sample numbers."""
    grid: ModelGrid | None = None
    """Grid of all its samples; None is the model's own."""

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in super()._tensors().items() if name != "grid"}

    def target_counts(self) -> Tensor:
        """Return the number of target values that are there, int64 [1]."""
        return (~self.targets.isnan()).sum().reshape(1)

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the fields for the first stage; for every stage targets, lead times, the fields that changes add to, the
        forcings of a roll-out where there are any, and the grid where it is not the model's own."""
        others: dict[str, Any] = {
            "fields_BVHW": self.fields,
            "targets_BVHW": self.targets,
            "lead_hours_B": self.lead_hours,
        }
        if self.forcings.numel():
            others["forcings_BKTFHW"] = self.forcings
        if self.grid is not None:
            others["grid"] = self.grid
        return self.fields, others


class GridReader:
    """Reads samples of sources on several grids: those of an optimizer step are of one."""

    def __init__(self, readers: Mapping[ModelGrid | None, FieldReader], turns: GridTurns) -> None:
        """readers: of the sources on each grid of `turns`."""
        self.readers = readers
        self.turns = turns
        grids = [(repr(grid), reader.fingerprint) for grid, reader in readers.items()]
        self.fingerprint = hash_of(ORDER_VERSION, grids, turns.mixture.weights)

    def read(self, numbers: Int64Array, step: int = 1) -> FieldBatch:
        """Read the samples with these global numbers, int64 [B], all of them of optimizer step `step`."""
        turns, grid = self.turns, self.turns.grid_of(step)
        # A grid's samples are numbered by themselves: its sources keep their shares whatever other grids there are.
        before = turns.samples_through(step - 1)[turns.grids.index(grid)] - turns.sizes.samples_through(step - 1)
        batch = self.readers[grid].read(numbers + before, step)
        return replace(batch, sample_indices=torch.from_numpy(numbers.copy()), grid=grid)


class FieldBatchStream(ReadAheadStream[FieldBatch]):
    """This rank's share of each global batch of fields, step after step, read ahead in the background."""

    _reader: FieldReader | GridReader

    def read(self, numbers: Int64Array, step: int) -> FieldBatch:
        """See `ReadAheadStream`: roll-outs that are trained through grow."""
        return self._reader.read(numbers, step)
