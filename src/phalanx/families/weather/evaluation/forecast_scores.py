"""Scores of forecasts by variable and lead time, with the definitions of WeatherBench 2 (Rasp et al. 2024).

Every score is a mean over forecasts of something computed forecast by forecast, so what is kept are sums and counts in
float64: they do not depend on how forecasts were batched or spread over ranks, and two of them add up. Fields are
compared in their own units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_SUMS = ("squared", "error", "absolute", "correlation")
_ENSEMBLE_SUMS = ("squared", "error", "variance", "crps", "fair_crps")


@dataclass(frozen=True)
class Score:
    """Scores of the forecasts of one variable at one lead time. NaN where nothing could be scored."""

    variable: str
    lead_hours: int
    forecasts: int
    """Forecasts with at least one point to score."""
    rmse: float
    """Square root of the mean over forecasts of the area-weighted mean squared error."""
    mae: float
    """Mean over forecasts of the area-weighted mean absolute error."""
    bias: float
    """Mean over forecasts of the area-weighted mean of forecast minus truth."""
    acc: float
    """Mean over forecasts of the anomaly correlation: of forecast and truth, each less the climatology of its day, with
    area weights and without removing the mean of the anomalies. NaN without a climatology."""


@dataclass(frozen=True)
class EnsembleScore:
    """Scores of the ensemble forecasts of one variable at one lead time. NaN where nothing could be scored."""

    variable: str
    lead_hours: int
    forecasts: int
    members: int
    rmse: float
    """Of the ensemble mean."""
    bias: float
    """Of the ensemble mean."""
    crps: float
    """Continuous ranked probability score of the members' empirical distribution."""
    fair_crps: float | None
    """The same in its fair form: the score expected of infinitely many such members. None for members that are not
    independent draws, as calibrated ones: its correction rewards spread beyond the truth, of two members without end."""
    spread: float
    """Square root of the mean over forecasts of the area-weighted ensemble variance (divided by members - 1)."""
    spread_skill: float
    """spread / rmse * sqrt((members + 1) / members): 1 for a reliable ensemble (Fortin et al. 2014, equation 15)."""


class ForecastScores:
    """Sums from which the scores of single forecasts follow, by lead time and variable."""

    def __init__(self, variables: Sequence[str], lead_hours: Sequence[int], area_weights: Tensor) -> None:
        """area_weights: [H, W], see `Grid.area_weights`; their scale does not matter. They name the device of the sums."""
        self.variables = tuple(variables)
        self.lead_hours = tuple(lead_hours)
        self._area = area_weights.double()
        self._table = _Table(_SUMS, self.lead_hours, self.variables, area_weights.device)

    def add(
        self, forecast_BVHW: Tensor, truth_BVHW: Tensor, lead_hours_B: Tensor, climatology_BVHW: Tensor | None = None
    ) -> None:
        """Score forecasts, whose truth and climatology are given in the same units; lead_hours: whole hours.

        A point counts where truth (and for the correlation climatology) is not NaN; a NaN in a forecast at such a point
        makes its scores NaN, so a forecast cannot choose where it is scored.
        """
        # The truth decides where is scored; a forecast must not be able to.
        there_BVHW = ~truth_BVHW.isnan()
        weights_BVHW = _mean_weights(self._area, there_BVHW)
        error_BVHW = torch.where(there_BVHW, forecast_BVHW.double() - truth_BVHW.double(), 0.0)
        values = {
            "squared": _area_sum(error_BVHW * error_BVHW, weights_BVHW),
            "error": _area_sum(error_BVHW, weights_BVHW),
            "absolute": _area_sum(error_BVHW.abs(), weights_BVHW),
        }
        self._table.add(values, there_BVHW, lead_hours_B)
        if climatology_BVHW is not None:
            there_BVHW = there_BVHW & ~climatology_BVHW.isnan()
            correlation_BV = self._correlation(forecast_BVHW, truth_BVHW, climatology_BVHW, there_BVHW)
            self._table.add({"correlation": correlation_BV}, there_BVHW, lead_hours_B)

    def merge(self, other: ForecastScores) -> ForecastScores:
        """Return the scores of both sets of forecasts together."""
        assert (self.variables, self.lead_hours) == (other.variables, other.lead_hours)
        merged = ForecastScores(self.variables, self.lead_hours, self._area)
        merged._table.sums = self._table.sums + other._table.sums
        return merged

    def all_reduce(self) -> None:
        """Add up the sums of all ranks, each of which scored forecasts of its own; every rank gets the result."""
        self._table.all_reduce()

    def results(self) -> list[Score]:
        """Return one score for each lead time and variable."""
        return [
            Score(
                variable=cell.variable,
                lead_hours=cell.lead,
                forecasts=cell.count("squared"),
                rmse=math.sqrt(cell.mean("squared")),
                mae=cell.mean("absolute"),
                bias=cell.mean("error"),
                acc=cell.mean("correlation"),
            )
            for cell in self._table.cells()
        ]

    def _correlation(
        self, forecast_BVHW: Tensor, truth_BVHW: Tensor, climatology_BVHW: Tensor, there_BVHW: Tensor
    ) -> Tensor:
        weights_BVHW = _mean_weights(self._area, there_BVHW)
        forecast_anomaly_BVHW = torch.where(there_BVHW, forecast_BVHW.double() - climatology_BVHW.double(), 0.0)
        truth_anomaly_BVHW = torch.where(there_BVHW, truth_BVHW.double() - climatology_BVHW.double(), 0.0)
        product_BV = _area_sum(forecast_anomaly_BVHW * truth_anomaly_BVHW, weights_BVHW)
        size_BV = _area_sum(forecast_anomaly_BVHW**2, weights_BVHW) * _area_sum(truth_anomaly_BVHW**2, weights_BVHW)
        # Without any anomaly, as where the climatology itself is the forecast, nothing is correlated.
        return torch.where(size_BV == 0, 0.0, product_BV / size_BV.sqrt())


class EnsembleScores:
    """Sums from which the scores of ensemble forecasts follow, by lead time and variable."""

    def __init__(
        self,
        variables: Sequence[str],
        lead_hours: Sequence[int],
        area_weights: Tensor,
        members: int,
        *,
        independent: bool = True,
    ) -> None:
        """area_weights: [H, W]; members: of every ensemble, at least 2; independent: whether the fair score applies."""
        assert members >= 2, members
        self.independent = independent
        self.variables = tuple(variables)
        self.lead_hours = tuple(lead_hours)
        self.members = members
        self._area = area_weights.double()
        self._table = _Table(_ENSEMBLE_SUMS, self.lead_hours, self.variables, area_weights.device)

    def add(self, forecasts_BMVHW: Tensor, truth_BVHW: Tensor, lead_hours_B: Tensor) -> None:
        """Score ensembles of M members; truth is NaN where it is unknown; lead_hours: whole hours."""
        assert forecasts_BMVHW.shape[1] == self.members, (forecasts_BMVHW.shape, self.members)
        there_BVHW = ~truth_BVHW.isnan()
        weights_BVHW = _mean_weights(self._area, there_BVHW)
        members_BMVHW, truth_BVHW = forecasts_BMVHW.double(), truth_BVHW.double()
        mean_BVHW = members_BMVHW.mean(1)
        variance_BVHW = (members_BMVHW - mean_BVHW[:, None]).square().sum(1) / (self.members - 1)
        error_BVHW = torch.where(there_BVHW, mean_BVHW - truth_BVHW, 0.0)
        crps_BVHW, fair_BVHW = ensemble_crps(members_BMVHW, truth_BVHW), fair_crps(members_BMVHW, truth_BVHW)
        values = {
            "squared": _area_sum(error_BVHW * error_BVHW, weights_BVHW),
            "error": _area_sum(error_BVHW, weights_BVHW),
            "variance": _area_sum(torch.where(there_BVHW, variance_BVHW, 0.0), weights_BVHW),
            "crps": _area_sum(torch.where(there_BVHW, crps_BVHW, 0.0), weights_BVHW),
            "fair_crps": _area_sum(torch.where(there_BVHW, fair_BVHW, 0.0), weights_BVHW),
        }
        self._table.add(values, there_BVHW, lead_hours_B)

    def merge(self, other: EnsembleScores) -> EnsembleScores:
        """Return the scores of both sets of forecasts together."""
        assert (self.variables, self.lead_hours, self.members) == (other.variables, other.lead_hours, other.members)
        assert self.independent == other.independent
        merged = EnsembleScores(self.variables, self.lead_hours, self._area, self.members, independent=self.independent)
        merged._table.sums = self._table.sums + other._table.sums
        return merged

    def all_reduce(self) -> None:
        """Add up the sums of all ranks, each of which scored forecasts of its own; every rank gets the result."""
        self._table.all_reduce()

    def results(self) -> list[EnsembleScore]:
        """Return one score for each lead time and variable."""
        found = []
        for cell in self._table.cells():
            rmse, spread = math.sqrt(cell.mean("squared")), math.sqrt(cell.mean("variance"))
            ratio = spread / rmse * math.sqrt((self.members + 1) / self.members) if rmse else math.nan
            found.append(
                EnsembleScore(
                    variable=cell.variable,
                    lead_hours=cell.lead,
                    forecasts=cell.count("squared"),
                    members=self.members,
                    rmse=rmse,
                    bias=cell.mean("error"),
                    crps=cell.mean("crps"),
                    fair_crps=cell.mean("fair_crps") if self.independent else None,
                    spread=spread,
                    spread_skill=ratio,
                )
            )
        return found


def fair_crps(members: Tensor, truth: Tensor) -> Tensor:
    """Return the fair continuous ranked probability score of each point: members [B, M, ...], truth [B, ...] -> [B, ...].

    mean |x_i - y| - sum_ij |x_i - x_j| / (2 M (M - 1)) (Ferro 2014): unbiased where members are independent draws, and no
    proper score of anything else.
    """
    count = members.shape[1]
    distance, difference = _crps_terms(members, truth)
    return distance - difference / (count * (count - 1))


def ensemble_crps(members: Tensor, truth: Tensor) -> Tensor:
    """Return the continuous ranked probability score of the members' empirical distribution; shapes as in `fair_crps`.

    mean |x_i - y| - sum_ij |x_i - x_j| / (2 M^2) (Gneiting and Raftery 2007): proper whatever the members are.
    """
    distance, difference = _crps_terms(members, truth)
    return distance - difference / members.shape[1] ** 2


def _crps_terms(members: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean |x_i - y| and sum_ij |x_i - x_j| / 2.

    The double sum is taken over sorted members, in which the i-th of M counts 2 i - M - 1 times (i from 1).
    """
    count = members.shape[1]
    distance = (members - truth.unsqueeze(1)).abs().mean(1)
    order = torch.arange(1, count + 1, device=members.device, dtype=members.dtype) * 2 - count - 1
    difference: Tensor = torch.tensordot(members.sort(1).values.movedim(1, -1), order, dims=1)
    return distance, difference


def _mean_weights(area_HW: Tensor, there_BVHW: Tensor) -> Tensor:
    """Return weights [B, V, H, W] of an area mean over the points that are there; NaN where none is."""
    weights_BVHW = area_HW * there_BVHW
    total: Tensor = weights_BVHW.sum((-2, -1), keepdim=True)
    return weights_BVHW / total


def _area_sum(values_BVHW: Tensor, weights_BVHW: Tensor) -> Tensor:
    return (values_BVHW * weights_BVHW).sum((-2, -1))


@dataclass(frozen=True)
class _Cell:
    """The sums of one lead time and variable."""

    lead: int
    variable: str
    sums: dict[str, float]
    counts: dict[str, float]

    def mean(self, name: str) -> float:
        return self.sums[name] / self.counts[name] if self.counts[name] else math.nan

    def count(self, name: str) -> int:
        return round(self.counts[name])


class _Table:
    """Sums and counts of named values: float64 [2, N, L, V]."""

    def __init__(
        self, names: Sequence[str], lead_hours: Sequence[int], variables: Sequence[str], device: torch.device
    ) -> None:
        self.names = tuple(names)
        self.lead_hours = tuple(lead_hours)
        self.variables = tuple(variables)
        shape = (2, len(self.names), len(self.lead_hours), len(self.variables))
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, values: dict[str, Tensor], there_BVHW: Tensor, lead_hours_B: Tensor) -> None:
        """Add values [B, V] of forecasts; one of which no point is there does not count."""
        leads = torch.tensor(self.lead_hours, device=self.sums.device)
        matches = lead_hours_B.to(self.sums.device)[:, None] == leads
        # Scored under a neighbour's name it would spoil both.
        if not bool(matches.any(1).all()):
            unknown = lead_hours_B[~matches.any(1).to(lead_hours_B.device)][0].item()
            raise ValueError(f"a lead time of {unknown} hours is not among those scored: {self.lead_hours}")
        rows = matches.int().argmax(1)
        counted = there_BVHW.flatten(2).any(-1)
        for name, found in values.items():
            index = self.names.index(name)
            # Where nothing was there the mean is NaN: adding that would spoil the sum.
            self.sums[0, index].index_add_(0, rows, torch.where(counted, found, 0.0))
            self.sums[1, index].index_add_(0, rows, counted.double())

    def all_reduce(self) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Sums and counts, not means: ranks score unequal numbers of forecasts.
            dist.all_reduce(self.sums)

    def cells(self) -> list[_Cell]:
        sums, counts = self.sums.cpu().tolist()
        return [
            _Cell(
                lead,
                variable,
                {name: sums[n][row][column] for n, name in enumerate(self.names)},
                {name: counts[n][row][column] for n, name in enumerate(self.names)},
            )
            for row, lead in enumerate(self.lead_hours)
            for column, variable in enumerate(self.variables)
        ]
