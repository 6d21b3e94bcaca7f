"""Zonal energy spectra of forecasts and truth, with the definition of WeatherBench 2 (Rasp et al. 2024).

They say at which scales a forecast has as much variance as the weather: means of many possible weathers have too little of
the small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.families.weather.data.coordinates import Grid
from phalanx.families.weather.evaluation.forecast_scores import ScoreSums

EARTH_RADIUS_M = 1000 * (6357 + 6378) / 2
"""Mean of the polar and the equatorial radius, as WeatherBench 2 has it."""


@dataclass(frozen=True)
class Spectrum:
    """Zonal energy spectra of one variable at one lead time, by wavenumber from 0, in its unit squared times metres.

    Means over forecasts, and members of each, of the area-weighted mean over rows. NaN where nothing could be compared.
    """

    variable: str
    lead_hours: int
    forecast: tuple[float, ...]
    truth: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values ready for JSON; what is not a number becomes None."""
        spectra = {"forecast": self.forecast, "truth": self.truth}
        known = {name: [x if math.isfinite(x) else None for x in values] for name, values in spectra.items()}
        return {"variable": self.variable, "lead_hours": self.lead_hours, **known}


class ZonalSpectra(ScoreSums):
    """Sums from which spectra of forecasts and their truth follow, by lead time and variable."""

    def __init__(self, variables: Sequence[str], lead_hours: Sequence[int], grid: Grid, device: torch.device) -> None:
        """grid: one that goes round the globe."""
        assert grid.wraps
        waves = range(grid.shape[1] // 2 + 1)
        self._forecast, self._truth = ([f"{what} {wave}" for wave in waves] for what in ("forecast", "truth"))
        self.names = (*self._forecast, *self._truth)
        super().__init__(variables, lead_hours, torch.from_numpy(grid.area_weights()).to(device))
        lengths_H = 2 * np.pi * EARTH_RADIUS_M * np.cos(np.radians(grid.latitudes))
        self._lengths_H = torch.from_numpy(lengths_H).to(device)

    def add(self, forecasts_BMVHW: Tensor, truth_BVHW: Tensor, lead_hours_B: Tensor) -> None:
        """Add the spectra of M members and of their truth, of rows whose truth is known everywhere.

        lead_hours: whole hours.
        """
        rows_BVH = ~truth_BVHW.isnan().any(-1)
        weights_BVH = self._area.sum(1) * rows_BVH
        weights_BVH = weights_BVH / weights_BVH.sum(-1, keepdim=True)

        def mean_energy(fields_BVHW: Tensor) -> Tensor:
            energy_BVHK = zonal_energy(fields_BVHW, self._lengths_H)
            return torch.where(rows_BVH[..., None], energy_BVHK * weights_BVH[..., None], 0.0).sum(-2)

        # A member at a time: together they would take as much memory as the members.
        members = [mean_energy(member) for member in forecasts_BMVHW.unbind(1)]
        forecast_BVK = torch.stack(members).mean(0)
        values = zip(self.names, (*forecast_BVK.unbind(-1), *mean_energy(truth_BVHW).unbind(-1)), strict=True)
        self._add_values(dict(values), rows_BVH[..., None], lead_hours_B)

    def results(self) -> list[Spectrum]:
        """Return one pair of spectra for each lead time and variable."""
        return [
            Spectrum(
                found.variable,
                found.lead_hours,
                tuple(found.mean(name) for name in self._forecast),
                tuple(found.mean(name) for name in self._truth),
            )
            for found in self._means()
        ]


def zonal_energy(fields: Tensor, lengths_H: Tensor) -> Tensor:
    """Return the energy of each zonal wavenumber, float64 [..., H, W // 2 + 1], of fields [..., H, W].

    lengths: of the circles of latitude in metres. S[0] = C |F[0]|^2 and S[k] = 2 C |F[k]|^2 with F[k] = sum_l f[l]
    exp(-2 pi i k l / W) / W, so that a row's add up to the integral of the squared field along its circle, but for the last
    wavenumber of an even W: as in WeatherBench 2 it counts twice too, though it has no conjugate.
    """
    energy: Tensor = torch.fft.rfft(fields.double(), norm="forward").abs().square() * lengths_H[:, None]
    energy[..., 1:] *= 2.0
    return energy
