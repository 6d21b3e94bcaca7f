"""Scoring forecasts over a split, and the two that every model must beat: nothing changes, and it is as usual.

Any forecast is a function from cases to fields, so models, persistence and climatology are scored by the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phalanx.families.weather.data.climatology import Climatology
from phalanx.families.weather.data.samples import Cases, FieldReader
from phalanx.families.weather.evaluation.scores import ForecastScores

Forecast = Callable[[Cases], Tensor]
"""Predicts the output variables [n, V_out, H, W], in their own units, at the targets of n cases."""


def persistence(reader: FieldReader) -> Forecast:
    """The forecast that nothing changes from the input on."""
    return lambda cases: reader.read_outputs(cases, at_start=True)


def climatology_forecast(reader: FieldReader, climatologies: Mapping[int, Climatology]) -> Forecast:
    """The forecast of the usual for the day. climatologies: by number of the source."""
    return lambda cases: climatology_at(reader, climatologies, cases)


def climatology_at(reader: FieldReader, climatologies: Mapping[int, Climatology], cases: Cases) -> Tensor:
    """The climatology at the targets, float32 [n, V_out, H, W]. Raises DataError for a day that it does not cover."""
    out = torch.empty((len(cases), len(reader.outputs), *reader.grid.shape))
    for source, climatology in climatologies.items():
        mine = torch.from_numpy(cases.source == source).nonzero()[:, 0]
        if len(mine):
            frames = cases.target[mine.numpy()]
            out[mine] = torch.from_numpy(climatology.at(reader.sources[source].store.times, frames))
    return out


def score_forecasts(
    reader: FieldReader,
    forecast: Forecast,
    *,
    climatologies: Mapping[int, Climatology] | None = None,
    device: torch.device | None = None,
    source: int = 0,
    batch: int = 16,
    rank: int = 0,
    ranks: int = 1,
) -> ForecastScores:
    """Scores of `forecast` for every input of the split of `source` and every lead time of `reader`.

    climatologies: by number of the source, for the anomaly correlation; None leaves it out. batch: forecasts at a time.
    rank, ranks: which share this rank scores; add the shares up with `all_reduce` or `merge`. A model that needs all ranks
    to compute must be given the same cases on all of them instead.
    """
    device = device or torch.device("cpu")
    weights = torch.from_numpy(reader.grid.area_weights()).to(device)
    scores = ForecastScores(reader.outputs, reader.leads, weights)
    for cases in reader.cases(source).batches(batch, rank=rank, ranks=ranks):
        usual = None if climatologies is None else climatology_at(reader, climatologies, cases).to(device)
        truth = reader.read_outputs(cases).to(device)
        scores.add(forecast(cases).to(device), truth, reader.lead_hours(cases), usual)
    return scores
