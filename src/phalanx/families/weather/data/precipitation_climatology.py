"""How often it is dry at each grid point, and from which amount on precipitation is heavy there: what SEEPS compares with.

Climates are taken by calendar month, as Rodwell et al. (2010, Q. J. R. Meteorol. Soc. 136, 1344) take them, and time of day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.families.weather.data.coordinates import Float32Array, Float64Array, TimeAxis
from phalanx.families.weather.data.field_store import FieldStore

_LIGHT_SHARE = 2.0 / 3.0
"""Share of the wet amounts that are light."""
_MONTHS = 12


@dataclass(frozen=True)
class PrecipitationClimate:
    """Climates of some variables that are amounts of precipitation, each in its own unit."""

    places: tuple[int, ...]
    """[P]: their places among the variables of the forecasts."""
    dry_threshold: Float64Array
    """[P]: amount up to which a time is dry."""
    dry_fraction: Float32Array
    """[12, K, P, H, W]: share of dry times in each month and part of the day; NaN where there was no value."""
    heavy_threshold: Float32Array
    """[12, K, P, H, W]: amount above which precipitation is heavy; NaN where it was never wet."""

    def at(self, times: TimeAxis, frames: Int64Array) -> tuple[Float32Array, Float32Array]:
        """Return dry fractions and heavy thresholds [n, P, H, W] of the times of `frames`, int64 [n]."""
        month, part = times.months[frames], times.parts_of_day(self.dry_fraction.shape[1])[frames]
        return self.dry_fraction[month, part], self.heavy_threshold[month, part]


def climate_by_month(
    store: FieldStore, variables: Sequence[str], frames: Int64Array, dry_thresholds: Mapping[str, float]
) -> PrecipitationClimate:
    """Return the climate of precipitation in a store over `frames`.

    variables: all that are forecast. dry_thresholds: by name, for those of them that are precipitation.
    """
    places = tuple(place for place, name in enumerate(variables) if name in dry_thresholds)
    thresholds = np.array([dry_thresholds[variables[place]] for place in places])
    parts = store.times.frames_a_day
    shape = (_MONTHS, parts, len(places), *store.grid.shape)
    fraction, heavy = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    months, day_parts = store.times.months[frames], store.times.parts_of_day(parts)[frames]
    for month in range(_MONTHS):
        for part in range(parts):
            mine = frames[(months == month) & (day_parts == part)]
            # A variable at a time: a quantile takes all its amounts together.
            for column, (place, threshold) in enumerate(zip(places, thresholds, strict=True)):
                if mine.size:
                    amounts_THW = store.read(mine, [store.variables.index(variables[place])])[:, 0]
                    fraction[month, part, column], heavy[month, part, column] = _find_climate(amounts_THW, threshold)
    return PrecipitationClimate(places, thresholds, fraction, heavy)


def _find_climate(amounts_THW: Float32Array, dry_threshold: float) -> tuple[Float64Array, Float64Array]:
    """Return the share of dry amounts and the quantile of the wet ones that separates light from heavy, each [H, W]."""
    known_HW = (~np.isnan(amounts_THW)).sum(axis=0)
    wet_THW = amounts_THW > dry_threshold
    wet_HW = wet_THW.sum(axis=0)
    # Wet amounts first, in order: their number differs from point to point, which numpy's quantile has slow loops for.
    ordered_THW = np.sort(np.where(wet_THW, amounts_THW, np.inf), axis=0)
    at_HW = np.maximum(wet_HW - 1, 0) * _LIGHT_SHARE
    below_HW = np.floor(at_HW).astype(np.int64)
    above_HW = np.minimum(below_HW + 1, np.maximum(wet_HW - 1, 0))
    low_HW, high_HW = (np.take_along_axis(ordered_THW, row[None], axis=0)[0] for row in (below_HW, above_HW))
    wet = wet_HW > 0
    # Infinite where it was never wet: infinity less infinity would warn.
    low, high = (np.where(wet, one, np.nan).astype(np.float64) for one in (low_HW, high_HW))
    fraction = np.divide(known_HW - wet_HW, known_HW, out=np.full(known_HW.shape, np.nan), where=known_HW > 0)
    return fraction, low + (at_HW - below_HW) * (high - low)
