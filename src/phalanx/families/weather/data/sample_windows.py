"""Which samples a split has: pairs of an input frame and target frames that all lie in the split and are whole.

Targets are found by their time, never by counting frames, so a hole in the time axis costs samples and cannot shift one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.data.coordinates import HOUR, moment_bounds
from phalanx.families.weather.data.field_store import FieldStore
from phalanx.families.weather.data.field_survey import Survey
from phalanx.families.weather.data_config import FieldData, Period

SplitName = Literal["train", "validation", "test"]
_SHOWN = 5


@dataclass(frozen=True)
class Windows:
    """The samples of one split of one store."""

    split: SplitName
    starts: Int64Array
    """[N]: input frames."""
    targets: Int64Array
    """[N, L]: target frame of each lead time, -1 where there is none; every row has at least one."""
    frames: Int64Array
    """Frames of the split, whole or not."""
    without_input: int
    """Frames of the split that cannot be an input, since values of an input variable are missing."""
    without_target: int
    """Pairs of an input frame and a lead time left out since values of the target are missing."""
    incomplete: int
    """Frames with missing values, each variable counted."""
    places: tuple[str, ...]
    """The first few of those: file, variable, time index."""

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
    """Return the frames of a split, those left out for the gap to an earlier split excepted.

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
    if not moment.startswith("step "):
        return moment_bounds(moment, store.times.calendar)[last]
    step = int(moment.removeprefix("step "))
    if step >= len(store.times):
        raise DataError(f"{moment} is not in {store.path}, which has steps 0 to {len(store.times) - 1}")
    return int(store.times.seconds[step])


def find_windows(data: FieldData, store: FieldStore, survey: Survey, split: SplitName, leads: Sequence[int]) -> Windows:
    """Find the samples of a split. leads: hours.

    Raises DataError where no sample is left or no lead time fits the time steps, and with `data.missing` = refuse for the
    first frame with missing values.
    """
    frames = split_frames(data, store, split)
    inputs = [store.variables.index(name) for name in data.inputs]
    outputs = [store.variables.index(name) for name in data.target_variables]
    missing = survey.empty if data.missing == "mask" else survey.incomplete
    if data.missing == "refuse":
        _refuse_missing(store, survey, frames)
    tolerance = round(data.time_tolerance_hours * HOUR)
    seconds = store.times.seconds[frames]
    # By time and not by counting frames: a hole then costs samples and cannot shift one.
    found = np.stack([store.times.nearest(seconds + lead * HOUR, tolerance) for lead in leads], axis=1)
    found = np.where((found >= frames[0]) & (found <= frames[-1]) & (found != frames[:, None]), found, -1)
    for column, lead in enumerate(leads):
        if not (found[:, column] >= 0).any():
            raise DataError(
                f"lead time {lead} h fits no two frames of data.splits.{split} in {store.path}, whose frames are "
                f"{store.times.step / HOUR:g} h apart over {(seconds[-1] - seconds[0]) / HOUR:g} h"
            )
    whole_input = ~missing[frames][:, inputs].any(axis=1)
    # With masks a target counts where any variable has values, unless one was never written: no mask knows of that. Else all
    # must be whole.
    how_many = missing[:, outputs].sum(axis=1)
    unwritten = survey.blank[:, outputs].any(axis=1)
    bad = (how_many == len(outputs)) | unwritten if data.missing == "mask" else how_many > 0
    usable = (found >= 0) & ~bad[found]
    kept = whole_input & usable.any(axis=1)
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


def _refuse_missing(store: FieldStore, survey: Survey, frames: Int64Array) -> None:
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
