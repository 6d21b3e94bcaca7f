"""Scores of forecasts by variable and lead time, with the definitions of WeatherBench 2 (Rasp et al. 2024).

Every score is a mean over forecasts of something computed forecast by forecast, so what is kept are sums and counts in
float64: they do not depend on how forecasts were batched or spread over ranks, and two of them add up. Fields are
compared in their own units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.families.weather.model.field_head import almost_fair_crps

LEAST_DRY, MOST_DRY = 0.1, 0.85
"""Dry fractions between which points are scored: elsewhere a few events would decide."""


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
    seeps: float
    """Mean over forecasts of the area-weighted mean SEEPS (see `seeps_errors`), over points whose climate allows it. NaN of
    what is no precipitation."""


@dataclass(frozen=True)
class EnsembleScore:
    """Scores of the ensemble forecasts of one variable at one lead time. NaN where nothing could be scored."""

    variable: str
    lead_hours: int
    forecasts: int
    members: int
    rmse: float
    """Root mean square error of the ensemble mean."""
    bias: float
    """Bias of the ensemble mean."""
    crps: float
    """Continuous ranked probability score of the members' empirical distribution."""
    fair_crps: float | None
    """Fair CRPS: the score expected of infinitely many such members. None for members that are not independent draws, as
    calibrated ones: its correction rewards spread beyond the truth, that of two members without end."""
    spread: float
    """Square root of the mean over forecasts of the area-weighted ensemble variance (divided by members - 1)."""
    spread_skill: float
    """spread / rmse * sqrt((members + 1) / members): 1 for a reliable ensemble (Fortin et al. 2014, equation 15)."""
    ranks: tuple[float, ...]
    """Rank histogram, [members + 1]: mean over forecasts of the area-weighted share of points whose truth is above that many
    members; one that equals some members is shared equally by the ranks that it may have. Flat for a reliable ensemble
    (Hamill 2001)."""

    @classmethod
    def unknown(cls, variable: str, lead_hours: int, members: int) -> EnsembleScore:
        """Return scores of nothing: what says which scores there will be."""
        return cls(variable, lead_hours, 0, members, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (0.0,) * (members + 1))


@dataclass(frozen=True)
class _Means:
    """Means over the forecasts of one variable at one lead time."""

    variable: str
    lead_hours: int
    sums: dict[str, float]
    counts: dict[str, float]

    def mean(self, name: str) -> float:
        """Return the mean of a named value; NaN where nothing could be scored."""
        return self.sums[name] / self.counts[name] if self.counts[name] else math.nan

    @property
    def forecasts(self) -> int:
        """Return the number of forecasts with at least one point to score."""
        return round(self.counts["squared"])


class ScoreSums:
    """Sums and counts of named values of forecasts, by lead time and variable: float64 [2, N, L, V]."""

    names: tuple[str, ...]

    def __init__(self, variables: Sequence[str], lead_hours: Sequence[int], area_weights: Tensor) -> None:
        """area_weights: [H, W], see `Grid.area_weights`; their scale does not matter. They name the device of the sums."""
        self.variables = tuple(variables)
        self.lead_hours = tuple(lead_hours)
        self._area = area_weights.double()
        shape = (2, len(self.names), len(self.lead_hours), len(self.variables))
        self._sums = torch.zeros(shape, dtype=torch.float64, device=area_weights.device)

    def all_reduce(self) -> None:
        """Add up the sums of all ranks, each of which scored forecasts of its own; every rank gets the result."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Sums and counts, not means: ranks score unequal numbers of forecasts.
            dist.all_reduce(self._sums)

    def merge(self, other: ScoreSums) -> None:
        """Add the sums of other forecasts of the same variables and lead times."""
        self._sums += other._sums

    def _add_values(self, values: dict[str, Tensor], there_BVHW: Tensor, lead_hours_B: Tensor) -> None:
        """Add values [B, V] of forecasts; one of which no point is there does not count."""
        leads = torch.tensor(self.lead_hours, device=self._sums.device)
        matches = lead_hours_B.to(self._sums.device)[:, None] == leads
        # Scored under a neighbour's name it would spoil both.
        if not bool(matches.any(1).all()):
            unknown = lead_hours_B[~matches.any(1).to(lead_hours_B.device)][0].item()
            raise ValueError(f"a lead time of {unknown} hours is not among those scored: {self.lead_hours}")
        rows = matches.int().argmax(1)
        counted = there_BVHW.flatten(2).any(-1)
        for name, found in values.items():
            index = self.names.index(name)
            # Where nothing was there the mean is NaN: adding that would spoil the sum.
            self._sums[0, index].index_add_(0, rows, torch.where(counted, found, 0.0))
            self._sums[1, index].index_add_(0, rows, counted.double())

    def _means(self) -> Iterator[_Means]:
        """Yield the means of each lead time and variable."""
        sums, counts = self._sums.cpu().tolist()
        for row, lead in enumerate(self.lead_hours):
            for column, variable in enumerate(self.variables):
                parts = ({name: part[n][row][column] for n, name in enumerate(self.names)} for part in (sums, counts))
                yield _Means(variable, lead, *parts)


@dataclass(frozen=True)
class PrecipitationClimates:
    """Separates the categories of SEEPS, dry, light and heavy, of P variables in B cases, each in its own unit."""

    places: tuple[int, ...]
    """[P]: places of the variables among those that are forecast."""
    dry_threshold_P: Tensor
    """Amount up to which it is dry."""
    dry_fraction_BPHW: Tensor
    """Climatological probability of dry weather; NaN where it is unknown."""
    heavy_threshold_BPHW: Tensor
    """Amount above which precipitation is heavy."""

    def scored_points(self) -> Tensor:
        """Return where the climate allows a score, [B, P, H, W]: neither always dry nor always wet."""
        # Comparisons with NaN are false.
        return (self.dry_fraction_BPHW >= LEAST_DRY) & (self.dry_fraction_BPHW <= MOST_DRY)


class ForecastScores(ScoreSums):
    """Sums from which the scores of single forecasts follow, by lead time and variable."""

    names: tuple[str, ...] = ("squared", "error", "absolute", "correlation", "seeps")

    def add(
        self,
        forecast_BVHW: Tensor,
        truth_BVHW: Tensor,
        lead_hours_B: Tensor,
        climatology_BVHW: Tensor | None = None,
        precipitation: PrecipitationClimates | None = None,
    ) -> dict[str, Tensor]:
        """Score forecasts, whose truth and climatology are given in the same units; lead_hours: whole hours.

        Returns errors of each forecast: "rmse" and "crps", which of one forecast is the mean absolute error, float64
        [B, V], NaN where there is no truth.

        A point counts where truth (and for the correlation climatology) is not NaN; a NaN in a forecast at such a point
        makes its scores NaN, so a forecast cannot choose where it is scored. precipitation: climates of the variables that
        SEEPS is scored of.
        """
        there_BVHW = ~truth_BVHW.isnan()
        weights_BVHW = _mean_weights(self._area, there_BVHW)
        error_BVHW = torch.where(there_BVHW, forecast_BVHW.double() - truth_BVHW.double(), 0.0)
        values = {
            "squared": _area_sum(error_BVHW * error_BVHW, weights_BVHW),
            "error": _area_sum(error_BVHW, weights_BVHW),
            "absolute": _area_sum(error_BVHW.abs(), weights_BVHW),
        }
        self._add_values(values, there_BVHW, lead_hours_B)
        if climatology_BVHW is not None:
            there_BVHW = there_BVHW & ~climatology_BVHW.isnan()
            # The anomaly correlation: of deviations from the climatology, their means kept.
            weights_BVHW = _mean_weights(self._area, there_BVHW)
            forecast_anomaly_BVHW = torch.where(there_BVHW, forecast_BVHW.double() - climatology_BVHW.double(), 0.0)
            truth_anomaly_BVHW = torch.where(there_BVHW, truth_BVHW.double() - climatology_BVHW.double(), 0.0)
            product_BV = _area_sum(forecast_anomaly_BVHW * truth_anomaly_BVHW, weights_BVHW)
            size_BV = _area_sum(forecast_anomaly_BVHW**2, weights_BVHW) * _area_sum(truth_anomaly_BVHW**2, weights_BVHW)
            # Without any anomaly, as where the climatology itself is the forecast, nothing is correlated.
            correlation_BV = torch.where(size_BV == 0, 0.0, product_BV / size_BV.sqrt())
            self._add_values({"correlation": correlation_BV}, there_BVHW, lead_hours_B)
        if precipitation is not None:
            places = list(precipitation.places)
            truth_BPHW = truth_BVHW[:, places]
            there_BPHW = ~truth_BPHW.isnan() & precipitation.scored_points()
            errors_BPHW = seeps_errors(forecast_BVHW[:, places], truth_BPHW, precipitation)
            errors_BPHW = torch.where(there_BPHW, errors_BPHW, 0.0)
            # The sums have a column for every variable: those that are no precipitation have no point that counts.
            there_BVHW = torch.zeros_like(truth_BVHW, dtype=torch.bool)
            there_BVHW[:, places] = there_BPHW
            means_BV = torch.zeros(truth_BVHW.shape[:2], dtype=torch.float64, device=truth_BVHW.device)
            means_BV[:, places] = _area_sum(errors_BPHW, _mean_weights(self._area, there_BPHW))
            self._add_values({"seeps": means_BV}, there_BVHW, lead_hours_B)
        return {"rmse": values["squared"].sqrt(), "crps": values["absolute"]}

    def results(self) -> list[Score]:
        """Return one score for each lead time and variable."""
        return [
            Score(
                variable=found.variable,
                lead_hours=found.lead_hours,
                forecasts=found.forecasts,
                rmse=math.sqrt(found.mean("squared")),
                mae=found.mean("absolute"),
                bias=found.mean("error"),
                acc=found.mean("correlation"),
                seeps=found.mean("seeps"),
            )
            for found in self._means()
        ]


class EnsembleScores(ScoreSums):
    """Sums from which the scores of ensemble forecasts follow, by lead time and variable."""

    names: tuple[str, ...] = ("squared", "error", "variance", "crps", "fair_crps")

    def __init__(
        self,
        variables: Sequence[str],
        lead_hours: Sequence[int],
        area_weights: Tensor,
        members: int,
        *,
        independent: bool = True,
    ) -> None:
        """members: members of every ensemble, at least 2. independent: whether the fair score applies to them."""
        assert members >= 2, members
        self._ranks = tuple(f"rank {rank}" for rank in range(members + 1))
        self.names = (*self.names, *self._ranks)
        super().__init__(variables, lead_hours, area_weights)
        self.independent = independent
        self.members = members

    def add(self, forecasts_BMVHW: Tensor, truth_BVHW: Tensor, lead_hours_B: Tensor) -> dict[str, Tensor]:
        """Score ensembles of M members; truth is NaN where it is unknown; lead_hours: whole hours.

        Returns errors of each ensemble: "rmse" of its mean and "crps", the fair one, float64 [B, V], NaN without a truth.
        """
        assert forecasts_BMVHW.shape[1] == self.members, (forecasts_BMVHW.shape, self.members)
        there_BVHW = ~truth_BVHW.isnan()
        weights_BVHW = _mean_weights(self._area, there_BVHW)
        members_BMVHW, truth_BVHW = forecasts_BMVHW.double(), truth_BVHW.double()
        mean_BVHW = members_BMVHW.mean(1)
        variance_BVHW = (members_BMVHW - mean_BVHW[:, None]).square().sum(1) / (self.members - 1)
        error_BVHW = torch.where(there_BVHW, mean_BVHW - truth_BVHW, 0.0)
        crps_BVHW, fair_BVHW = (almost_fair_crps(members_BMVHW, truth_BVHW, alpha) for alpha in (0.0, 1.0))
        values = {
            "squared": _area_sum(error_BVHW * error_BVHW, weights_BVHW),
            "error": _area_sum(error_BVHW, weights_BVHW),
            "variance": _area_sum(torch.where(there_BVHW, variance_BVHW, 0.0), weights_BVHW),
            "crps": _area_sum(torch.where(there_BVHW, crps_BVHW, 0.0), weights_BVHW),
            "fair_crps": _area_sum(torch.where(there_BVHW, fair_BVHW, 0.0), weights_BVHW),
        }
        # A rank at a time: together they would take as much memory as the members.
        for rank, name in enumerate(self._ranks):
            share_BVHW = rank_share(members_BMVHW, truth_BVHW, rank)
            values[name] = _area_sum(torch.where(there_BVHW, share_BVHW, 0.0), weights_BVHW)
        self._add_values(values, there_BVHW, lead_hours_B)
        return {"rmse": values["squared"].sqrt(), "crps": values["fair_crps"]}

    def results(self) -> list[EnsembleScore]:
        """Return one score for each lead time and variable."""
        found = []
        for means in self._means():
            rmse, spread = math.sqrt(means.mean("squared")), math.sqrt(means.mean("variance"))
            # Spread and error of the mean are of one size only for infinitely many members, hence the factor.
            ratio = spread / rmse * math.sqrt((self.members + 1) / self.members) if rmse else math.nan
            found.append(
                EnsembleScore(
                    variable=means.variable,
                    lead_hours=means.lead_hours,
                    forecasts=means.forecasts,
                    members=self.members,
                    rmse=rmse,
                    bias=means.mean("error"),
                    crps=means.mean("crps"),
                    fair_crps=means.mean("fair_crps") if self.independent else None,
                    spread=spread,
                    spread_skill=ratio,
                    ranks=tuple(means.mean(name) for name in self._ranks),
                )
            )
        return found


def rank_share(members: Tensor, truth: Tensor, rank: int) -> Tensor:
    """Return how much of each truth has this rank among the members, from 0 to 1; shapes as in
    `almost_fair_crps`.

    A truth that equals k members has k + 1 ranks and counts for each of them alike. NaN where a member has no value.
    """
    below, equal = (found.sum(1) for found in (members < truth.unsqueeze(1), members == truth.unsqueeze(1)))
    share = ((below <= rank) & (rank <= below + equal)) / (equal + 1).double()
    return torch.where(members.isnan().any(1), torch.nan, share)


def seeps_errors(forecast_BPHW: Tensor, truth_BPHW: Tensor, climates: PrecipitationClimates) -> Tensor:
    """Return the stable equitable error in probability space of each point, float64 [B, P, H, W]; NaN where the forecast has
    no value (Rodwell et al. 2010, Q. J. R. Meteorol. Soc. 136, 1344).

    A wrong category costs the more the rarer the right one is. A perfect forecast scores 0; one that knows the climate alone
    scores 1 in the mean, whatever category it names. The matrix of equation 15 is the sum of two equitable errors: of dry
    against wet, and of heavy against the rest.
    """
    dry_amount = climates.dry_threshold_P[:, None, None]
    dry_BPHW = climates.dry_fraction_BPHW.double()
    heavy_BPHW = (1.0 - dry_BPHW) / 3.0
    (forecast_wet, forecast_heavy), (truth_wet, truth_heavy) = (
        (amounts > dry_amount, amounts > torch.maximum(climates.heavy_threshold_BPHW, dry_amount))
        for amounts in (forecast_BPHW, truth_BPHW)
    )
    missed_BPHW = (truth_wet & ~forecast_wet) / (1.0 - dry_BPHW) + (truth_heavy & ~forecast_heavy) / heavy_BPHW
    invented_BPHW = (forecast_wet & ~truth_wet) / dry_BPHW + (forecast_heavy & ~truth_heavy) / (1.0 - heavy_BPHW)
    return torch.where(forecast_BPHW.isnan(), torch.nan, 0.5 * (missed_BPHW + invented_BPHW))


def _mean_weights(area_HW: Tensor, there_BVHW: Tensor) -> Tensor:
    """Return weights [B, V, H, W] of an area mean over the points that are there; NaN where none is."""
    weights_BVHW = area_HW * there_BVHW
    total: Tensor = weights_BVHW.sum((-2, -1), keepdim=True)
    return weights_BVHW / total


def _area_sum(values_BVHW: Tensor, weights_BVHW: Tensor) -> Tensor:
    """Return the weighted sum over the grid [B, V]."""
    return (values_BVHW * weights_BVHW).sum((-2, -1))
