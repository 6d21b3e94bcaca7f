"""Scores of a model's forecasts beside the two baselines that every model must beat, on the same cases.

Persistence forecasts that nothing changes, climatology that the weather is as usual on that day of the year.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import DataError
from phalanx.families.weather.data.field_samples import Cases, FieldReader
from phalanx.families.weather.data.field_statistics import Climatology
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.forecast_scores import (
    EnsembleScore,
    EnsembleScores,
    ForecastScores,
    PrecipitationClimates,
)
from phalanx.families.weather.evaluation.significance import SCORES, StartScores
from phalanx.families.weather.evaluation.spectra import Spectrum, ZonalSpectra

_FRAMES_AT_ONCE = 16
"""Frames whose climatology is looked up at a time."""


@dataclass(frozen=True)
class ScoreRow:
    """One variable at one lead time, in the variable's own units; definitions stand in
    `families.weather.evaluation.forecast_scores`."""

    variable: str
    lead_hours: int
    forecasts: int
    rmse: float
    mae: float
    bias: float
    acc: float | None
    """Anomaly correlation of the model; None without a climatology."""
    persistence_rmse: float
    persistence_acc: float | None
    climatology_rmse: float | None
    seeps: float | None = None
    """SEEPS of the model; None of what is no precipitation and without a climatology."""
    persistence_seeps: float | None = None
    ensemble: EnsembleScore | None = None
    """Scores of the members, where there are several; all others are then of their mean."""

    @property
    def baseline_rmse(self) -> float:
        """Return the error of the better of the two baselines."""
        # The climatology may be unknown: there is none of a short period.
        others = [x for x in (self.persistence_rmse, self.climatology_rmse) if x is not None and math.isfinite(x)]
        return min(others, default=math.nan)

    @property
    def skill(self) -> float:
        """Return the share of the better baseline's error that the model saves; negative where it is worse."""
        return 1.0 - self.rmse / self.baseline_rmse if self.baseline_rmse else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return plain values ready for JSON; what is not a number becomes None."""
        return _known_values({**asdict(self), "skill": self.skill})


def _known_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, and those of dictionaries in them, with None in place of what is not a number."""
    known = {name: _known_values(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in known.items()}


class Comparison:
    """Adds up forecasts of one reader's split: a model's, persistence and climatology."""

    def __init__(
        self,
        reader: FieldReader,
        climatologies: Mapping[int, Climatology] | None,
        device: torch.device,
        members: int = 1,
        *,
        details: bool = False,
    ) -> None:
        """climatologies: by number of the source; None leaves them and the anomaly correlation out. members: of each
        forecast. details: whether spectra and the scores of every forecast are kept too."""
        self.reader = reader
        self.climatologies = climatologies
        self.device = device
        weights = torch.from_numpy(reader.grid.area_weights()).to(device)
        model, stays, usual = (ForecastScores(reader.outputs, reader.leads, weights) for _ in range(3))
        self._model, self._persistence, self._climatology = model, stays, usual
        self._ensemble = EnsembleScores(reader.outputs, reader.leads, weights, members) if members > 1 else None
        self._by_start: list[StartScores] | None = [] if details else None
        # Waves are those of whole circles of latitude.
        self._spectra = None
        if details and reader.grid.wraps:
            self._spectra = ZonalSpectra(reader.outputs, reader.leads, reader.grid, device)

    def add(self, cases: Cases, forecast: Tensor) -> None:
        """Score forecasts [n, V, H, W], in the units of the fields, and both baselines for the same cases.

        Of an ensemble forecasts are [n * members, V, H, W], the members of a case one after the other.
        """
        reader, device = self.reader, self.device
        hours = reader.lead_hours(cases)
        truth = reader.read_outputs(cases).to(device)
        forecast = forecast.to(device)
        members = forecast.unflatten(0, (len(cases), -1))
        if self._spectra is not None:
            self._spectra.add(members, truth, hours)
        scores = None
        if self._ensemble is not None:
            scores = self._ensemble.add(members, truth, hours)
            # In float64: deviations from the mean are small beside the fields.
            forecast = members.double().mean(1)
        usual = None if self.climatologies is None else climatology_at(reader, self.climatologies, cases).to(device)
        known = self.climatologies
        rain = None if known is None else precipitation_at(reader, known, cases, device)
        alone = self._model.add(forecast, truth, hours, usual, rain)
        if self._by_start is not None:
            self._by_start.append(_scores_by_start(reader, cases, hours, scores or alone))
        # On the same cases as the model: skill compares like with like.
        self._persistence.add(reader.read_outputs(cases, at_start=True).to(device), truth, hours, usual, rain)
        if usual is not None:
            self._climatology.add(usual, truth, hours)

    def all_reduce(self) -> None:
        """Add up what all ranks scored."""
        for scores in (self._model, self._persistence, self._climatology, self._ensemble, self._spectra):
            if scores is not None:
                scores.all_reduce()

    def merge(self, other: Comparison) -> None:
        """Add forecasts that another comparison scored, on another grid perhaps: scores are means over forecasts."""
        mine, theirs = ((one._model, one._persistence, one._climatology) for one in (self, other))
        for scores, more in zip(mine, theirs, strict=True):
            scores.merge(more)
        if self._ensemble is not None and other._ensemble is not None:
            self._ensemble.merge(other._ensemble)

    def spectra(self) -> list[Spectrum]:
        """Return one pair of spectra for each lead time and variable; none without details, and of a region."""
        return [] if self._spectra is None else self._spectra.results()

    def by_start(self) -> StartScores:
        """Return the scores of every forecast of all ranks, all of which call this; needs details."""
        assert self._by_start is not None
        empty = np.empty(0, dtype=np.int64)
        outputs = self.reader.outputs
        none = StartScores(outputs, empty, empty, empty, np.empty((len(SCORES), 0, len(outputs))))
        return StartScores.join([none, *self._by_start]).gather()

    def rows(self) -> list[ScoreRow]:
        """Return one row for each lead time and variable."""
        known = self.climatologies is not None
        # All three scored the same cases, so their rows come in one order.
        baselines = self._persistence.results(), self._climatology.results()
        spread = repeat(None) if self._ensemble is None else self._ensemble.results()
        both = zip(self._model.results(), *baselines, spread, strict=self._ensemble is not None)
        return [
            ScoreRow(
                variable=mine.variable,
                lead_hours=mine.lead_hours,
                forecasts=mine.forecasts,
                rmse=mine.rmse,
                mae=mine.mae,
                bias=mine.bias,
                acc=mine.acc if known else None,
                persistence_rmse=stays.rmse,
                persistence_acc=stays.acc if known else None,
                climatology_rmse=usual.rmse if known else None,
                seeps=mine.seeps if math.isfinite(mine.seeps) else None,
                persistence_seeps=stays.seeps if math.isfinite(stays.seeps) else None,
                ensemble=members,
            )
            for mine, stays, usual, members in both
        ]


def _scores_by_start(reader: FieldReader, cases: Cases, hours: Tensor, scores: Mapping[str, Tensor]) -> StartScores:
    values = torch.stack([scores[name] for name in SCORES]).cpu().numpy()
    return StartScores(reader.outputs, cases.source, reader.start_seconds(cases), hours.numpy(), values)


def known_climatologies(
    fields: FieldSet, reader: FieldReader, most_bytes: int | None = None
) -> tuple[dict[int, Climatology] | None, str | None]:
    """Return the climatologies of the sources of `reader`, by number, of the days of its split; or None, and why there are
    none.

    There are none where they do not cover the split of `reader`, or where more than `most_bytes` would have to be read.
    """
    size = sum(len(source.store.times) * source.store.frame_bytes for source in reader.sources)
    if most_bytes is not None and size > most_bytes:
        return None, f"its sources hold {size / 2**30:.0f} GiB, too much to average now; phalanx forecast does"
    found = {
        index: fields.climatology(source.number, source.windows.frames) for index, source in enumerate(reader.sources)
    }
    try:
        for index, source in enumerate(reader.sources):
            frames = source.windows.frames
            # Looked up as scoring will: a gap is known before hours of forecasts are made.
            for first in range(0, len(frames), _FRAMES_AT_ONCE):
                found[index].at(source.store.times, frames[first : first + _FRAMES_AT_ONCE])
    except DataError as error:
        return None, str(error)
    return found, None


@dataclass(frozen=True)
class LeadSkill:
    """What forecasts of one lead time save over the better of the two baselines."""

    lead_hours: int
    mean: float
    """Mean of `ScoreRow.skill` over variables."""
    variables: int
    better: int
    """Variables with less error than the better baseline."""
    spread_skill: float | None = None
    """Mean of spread over error of the members over variables, 1 for a reliable ensemble; None of single forecasts."""

    @property
    def percent(self) -> str:
        """Return the mean with its sign."""
        return f"{self.mean:+.0%}"


def skill_by_lead(rows: Sequence[ScoreRow]) -> list[LeadSkill]:
    """Return the skill at each lead time of which anything could be scored."""
    found = []
    for lead in dict.fromkeys(row.lead_hours for row in rows):
        skills = [row.skill for row in rows if row.lead_hours == lead and math.isfinite(row.skill)]
        if skills:
            better = sum(skill > 0 for skill in skills)
            members = [row.ensemble.spread_skill for row in rows if row.lead_hours == lead and row.ensemble is not None]
            spread = sum(members) / len(members) if members else None
            found.append(LeadSkill(lead, sum(skills) / len(skills), len(skills), better, spread))
    return found


def skill_in_words(rows: Sequence[ScoreRow]) -> str:
    """Describe the skill at each lead time in a sentence, and of ensembles their spread."""
    leads = skill_by_lead(rows)
    parts = [f"{at.lead_hours} h {at.percent} ({at.better} of {at.variables} variables better)" for at in leads]
    words = "error saved over the better of persistence and climatology: " + ", ".join(parts)
    spread = [f"{at.lead_hours} h {at.spread_skill:.2f}" for at in leads if at.spread_skill is not None]
    return words + ("; spread over error: " + ", ".join(spread) if spread else "")


def climatology_at(reader: FieldReader, climatologies: Mapping[int, Climatology], cases: Cases) -> Tensor:
    """Return the climatology at the targets, float32 [n, V_out, H, W]. Raises DataError for a day that it does not cover."""
    out = torch.empty((len(cases), len(reader.outputs), *reader.grid.shape))
    for source, climatology in climatologies.items():
        mine = torch.from_numpy(cases.source == source).nonzero()[:, 0]
        if len(mine):
            frames = cases.target[mine.numpy()]
            out[mine] = torch.from_numpy(climatology.at(reader.sources[source].store.times, frames))
    return out


def precipitation_at(
    reader: FieldReader, climatologies: Mapping[int, Climatology], cases: Cases, device: torch.device
) -> PrecipitationClimates | None:
    """Return the climates of precipitation at the targets; None where no variable is precipitation."""
    climates = [one.precipitation for one in climatologies.values() if one.precipitation is not None]
    if not climates:
        return None
    # All sources have the variables of the run, so the first tells which.
    shape = (len(cases), len(climates[0].places), *reader.grid.shape)
    fraction, heavy = (np.full(shape, np.nan, dtype=np.float32) for _ in range(2))
    for source, climatology in climatologies.items():
        mine = np.flatnonzero(cases.source == source)
        if mine.size and climatology.precipitation is not None:
            fraction[mine], heavy[mine] = climatology.precipitation.at(
                reader.sources[source].store.times, cases.target[mine]
            )
    return PrecipitationClimates(
        climates[0].places,
        torch.from_numpy(climates[0].dry_threshold).to(device),
        torch.from_numpy(fraction).to(device),
        torch.from_numpy(heavy).to(device),
    )
