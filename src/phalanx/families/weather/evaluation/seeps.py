"""SEEPS, the stable equitable error in probability space of precipitation (Rodwell et al. 2010, Q. J. R. Meteorol. Soc.
136, 1344).

A forecast is dry, light or heavy, and a wrong category costs the more the rarer the right one is. A perfect forecast scores
0; one that knows the climate alone scores 1 in the mean, whatever category it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_DRY, MOST_DRY = 0.1, 0.85
"""Dry fractions between which points are scored: elsewhere a few events would decide."""


@dataclass(frozen=True)
class PrecipitationClimates:
    """Separates the categories of P variables in B cases, each in its own unit."""

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


def seeps_errors(forecast_BPHW: Tensor, truth_BPHW: Tensor, climates: PrecipitationClimates) -> Tensor:
    """Return the error of each point, float64 [B, P, H, W]; NaN where the forecast has no value.

    The matrix of equation 15 is the sum of two equitable errors: of dry against wet, and of heavy against the rest.
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
