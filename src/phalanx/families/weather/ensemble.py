"""Forecasts of several weather models as one ensemble: its mean, its spread against its error, and its CRPS.

Members' deviations from their mean are stretched by one factor a variable and lead time, which makes spread and error alike
on the validation split; scores are of the test split. Members as they are and stretched ones are compared by the CRPS of
their empirical distribution: the fair one takes members for independent draws, and rewards stretching them beyond the truth.
Forecasts are scored as they are made and none is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.ensemble.family import Progress
from phalanx.ensemble.members import ALONE, EnsembleFile, Member, Share, member_entries, require_one_family
from phalanx.errors import ConfigError
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.coordinates import HOUR
from phalanx.families.weather.data.field_samples import Cases, FieldReader, SplitName
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScore, EnsembleScores, ForecastScores
from phalanx.families.weather.evaluation.forecast_split import (
    LoadedForecaster,
    batch_rows,
    forecasts_of,
    lead_steps,
    load_forecaster,
    spread_rows,
)
from phalanx.families.weather.inputs import grid_of_data

_BATCH = 8
"""Inputs that are forecast from at a time."""
_OWN = {"statistics", "cache_mb", "prefetch", "lead_hours", "rollout_hours", "rollout_steps"}
"""Fields of the data section in which members may differ; what is normalised by is compared by itself."""
_SPLITS: tuple[SplitName, ...] = ("validation", "test")
"""The split that calibrates and the one that is scored; `split_frames` refuses splits that share times."""


@dataclass(frozen=True)
class ForecastRow:
    """One variable at one lead time on the test split, in the variable's own unit."""

    variable: str
    lead_hours: int
    forecasts: int
    members: list[float]
    """RMSE of each member alone."""
    stretch: float
    """Factor of the members' deviations from their mean."""
    raw: EnsembleScore
    """Scores of the members as they are."""
    scores: EnsembleScore
    """Scores of the stretched members, without a fair CRPS."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"best_member_rmse": min(self.members)}


@dataclass(frozen=True)
class ForecastEnsemble:
    """An ensemble of weather models, ready to be written and shown."""

    members: list[Member]
    rows: list[ForecastRow]
    hours_between: float
    """Hours between the times that calibrated and those that are scored, where they come closest."""

    def summary(self) -> dict[str, Any]:
        """See `Ensemble`."""
        return {
            "family": "weather",
            "members": [
                {"name": one.name, "checkpoint": str(one.checkpoint), "step": one.step, "weight": 1 / len(self.members)}
                for one in self.members
            ],
            "calibrated_on": "validation",
            "scored_on": "test",
            "hours_between": self.hours_between,
            "forecasts": [row.as_dict() for row in self.rows],
        }

    def document(self, folder: Path) -> EnsembleFile:
        """See `Ensemble`."""
        members = member_entries(self.members, [1.0 / len(self.members)] * len(self.members), folder)
        return EnsembleFile(family="weather", members=members, facts=self.summary())


def build_forecasts(
    members: Sequence[Member],
    device: torch.device,
    *,
    hours: int | None = None,
    starts: int | None = None,
    share: Share = ALONE,
    progress: Progress = lambda what, done, total: None,
) -> ForecastEnsemble:
    """Forecast the validation and the test split with all members and score their ensemble. Every rank calls it.

    hours: longest lead time; None takes the longest that all were trained on. starts: inputs of each split, spread evenly;
    None takes all. share: this rank among those that share the inputs. Raises ConfigError for members that do not go
    together, and as `families.weather.evaluation.forecast_split.forecast_split` does.
    """
    if len(members) < 2:
        raise ConfigError("an ensemble has at least two members; name more runs")
    _require_single_forecasts(members)
    require_one_family(members)
    loaded = [load_forecaster(member.checkpoint, device) for member in members]
    _require_same_fields(members, loaded)
    longest = hours or min(max(one.run.data.leads) for one in loaded)
    steps = [lead_steps(one.run, longest, None) for one in loaded]
    for member, other in zip(members, steps, strict=True):
        if list(other) != list(steps[0]):
            reached, wanted = (", ".join(map(str, leads)) for leads in (other, steps[0]))
            raise ConfigError(
                f"{member.path} reaches lead times of {reached} hours, {members[0].path} of {wanted}; members need the same"
            )
    fields = FieldSet(loaded[0].run.data)
    grid = grid_of_data(loaded[0].run, fields.grid)

    # The seed orders samples of training alone; splits are scored in the order of time.
    readers = {split: fields.reader(split, seed=0, leads=list(steps[0])) for split in _SPLITS}

    def score_split(split: SplitName, stretches: Tensor | None) -> _SplitScores:
        reader = readers[split]
        scores = _SplitScores(reader, len(members), device, stretches)
        chosen = [spread_rows(source.windows, starts, len(reader.sources)) for source in reader.sources]
        # Every so many-th batch: ranks then have forecasts of all seasons, and as many batches give or take one.
        mine = batch_rows(chosen, _BATCH)[share.rank :: share.ranks]
        for done, (index, rows) in enumerate(mine, 1):
            each = [
                forecasts_of(one.model, reader, index, rows, own, grid) for one, own in zip(loaded, steps, strict=True)
            ]
            # Members advance together, a lead time at a time, so that forecasts of all lead times need not be kept.
            for together in zip(*each, strict=True):
                scores.add(reader, together[0][0], torch.stack([forecast for _, forecast in together], dim=1))
            progress(split, done, len(mine))
        scores.all_reduce()
        return scores

    # Factors are found on other times than those scored: they would otherwise fit the errors that they are judged by.
    stretches = score_split("validation", None).stretches()
    rows = score_split("test", stretches).rows(stretches)
    return ForecastEnsemble(list(members), rows, _hours_between(readers["validation"], readers["test"]))


class _SplitScores:
    """Scores of one split: of each member, of the ensemble as it is, and of the stretched one."""

    def __init__(self, reader: FieldReader, members: int, device: torch.device, stretches_LV: Tensor | None) -> None:
        area = torch.from_numpy(reader.grid.area_weights()).to(device)
        self._leads = torch.tensor(reader.leads)
        self._device = device
        self._alone = [ForecastScores(reader.outputs, reader.leads, area) for _ in range(members)]
        self._raw, self._stretched = (
            EnsembleScores(reader.outputs, reader.leads, area, members, independent=independent)
            for independent in (True, False)
        )
        self._stretches_LV = stretches_LV

    def add(self, reader: FieldReader, cases: Cases, forecasts: Tensor) -> None:
        """Score forecasts [n, M, V, H, W] of cases of one lead time."""
        hours = reader.lead_hours(cases)
        truth = reader.read_outputs(cases).to(self._device)
        self._raw.add(forecasts, truth, hours)
        if self._stretches_LV is None:
            return
        for number, scores in enumerate(self._alone):
            scores.add(forecasts[:, number], truth, hours)
        lead = int((self._leads == int(hours[0])).nonzero()[0, 0])
        factor_V = self._stretches_LV[lead].to(self._device)
        # In float64: deviations are small beside the fields.
        wide = forecasts.double()
        mean = wide.mean(1, keepdim=True)
        self._stretched.add(mean + factor_V[:, None, None] * (wide - mean), truth, hours)

    def all_reduce(self) -> None:
        """Add up what all ranks scored."""
        for scores in self._alone:
            scores.all_reduce()
        self._raw.all_reduce()
        self._stretched.all_reduce()

    def stretches(self) -> Tensor:
        """Return one over the ratio of spread to error, float64 [L, V]; 1 where there is no such ratio."""
        ratios = [row.spread_skill for row in self._raw.results()]
        factors = [1.0 / ratio if math.isfinite(ratio) and ratio > 0.0 else 1.0 for ratio in ratios]
        return torch.tensor(factors, dtype=torch.float64).view(len(self._leads), -1)

    def rows(self, stretches_LV: Tensor) -> list[ForecastRow]:
        """Return one row for each lead time and variable."""
        alone = [scores.results() for scores in self._alone]
        both = zip(self._raw.results(), self._stretched.results(), stretches_LV.flatten().tolist(), strict=True)
        return [
            ForecastRow(
                raw.variable, raw.lead_hours, raw.forecasts, [one[place].rmse for one in alone], stretch, raw, stretched
            )
            for place, (raw, stretched, stretch) in enumerate(both)
        ]


def _hours_between(first: FieldReader, second: FieldReader) -> float:
    """Return the hours between the frames of two splits, in the source where they come closest."""
    found = []
    for one, other in zip(first.sources, second.sources, strict=True):
        seconds = one.store.times.seconds
        # Splits are stretches of time: their first and last frames are the closest to another split.
        apart = np.subtract.outer(seconds[one.windows.frames[[0, -1]]], seconds[other.windows.frames[[0, -1]]])
        found.append(float(np.abs(apart).min()) / HOUR)
    return min(found)


def _require_single_forecasts(members: Sequence[Member]) -> None:
    """Raise ConfigError where a member is an ensemble itself."""
    for member in members:
        if isinstance(member.run, WeatherRun) and member.run.model.noise_channels:
            raise ConfigError(
                f"{member.path} was trained with model.loss=crps and is an ensemble itself; score it with phalanx forecast "
                "--members M"
            )


def _require_same_fields(members: Sequence[Member], loaded: Sequence[LoadedForecaster]) -> None:
    """Raise ConfigError where members read or predict different fields, or normalise them differently."""
    first = _fields_of(loaded[0].run)
    for member, one in zip(members, loaded, strict=True):
        other = _fields_of(one.run)
        differs = next((name for name in first if first[name] != other[name]), None)
        if differs is not None:
            raise ConfigError(
                f"{member.path} differs from {members[0].path} in data.{differs}; members of an ensemble read and predict "
                f"the same fields of the same splits"
            )


def _fields_of(run: WeatherRun) -> dict[str, Any]:
    """Return the fields of the data section that members must share, with the content of the statistics."""
    kept = run.data.model_dump(mode="json", exclude=_OWN)
    path = run.data.statistics
    return kept | {"statistics": None if path is None else Path(path).read_text(encoding="utf-8")}
