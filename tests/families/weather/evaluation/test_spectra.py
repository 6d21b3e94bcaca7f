"""Zonal energy spectra against WeatherBench 2's definition, written out with numpy and xarray."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray

from phalanx.families.weather.data.coordinates import Grid
from phalanx.families.weather.evaluation.forecast_page import draw_spectra
from phalanx.families.weather.evaluation.spectra import EARTH_RADIUS_M, Spectrum, ZonalSpectra

VARIABLES = ("z500", "t850")
GRID = Grid(np.linspace(-90, 90, 7), np.arange(10) * 36.0)
CPU = torch.device("cpu")


def random_fields(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, *GRID.shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def weatherbench_spectrum(fields: np.ndarray, grid: Grid) -> xarray.DataArray:
    """Spectra of fields [n, latitude, longitude] as `ZonalEnergySpectrum` of weatherbench2.derived_variables has them."""
    stored = xarray.DataArray(
        fields, dims=("n", "latitude", "longitude"), coords={"latitude": grid.latitudes, "longitude": grid.longitudes}
    )

    def simple_power(values: np.ndarray) -> np.ndarray:
        found = np.fft.rfft(values, axis=-1, norm="forward")
        return np.real(found * np.conj(found)) * np.array([1] + [2] * (found.shape[-1] - 1))

    dims = {"input_core_dims": [["longitude"]], "output_core_dims": [["zonal_wavenumber"]]}
    spectrum = xarray.apply_ufunc(simple_power, stored, **dims, exclude_dims={"longitude"})
    return spectrum * np.cos(stored.latitude * np.pi / 180) * (2 * np.pi * 1000 * (6357 + 6378) / 2)


def test_spectra_are_those_of_weatherbench() -> None:
    forecast, truth = random_fields(0, 6, 3, 2), random_fields(1, 6, 2)
    leads = torch.tensor([24, 72, 24, 72, 24, 24])
    spectra = ZonalSpectra(VARIABLES, (24, 72), GRID, CPU)
    # In parts, as they are computed.
    for part in (slice(0, 4), slice(4, 6)):
        spectra.add(forecast[part], truth[part], leads[part])
    found = {(one.variable, one.lead_hours): one for one in spectra.results()}
    weights = xarray.DataArray(GRID.area_weights()[:, 0], dims="latitude", coords={"latitude": GRID.latitudes})
    for lead in (24, 72):
        for column, name in enumerate(VARIABLES):
            for what, fields in (
                ("forecast", forecast[leads == lead][:, :, column]),
                ("truth", truth[leads == lead][:, column]),
            ):
                by_row = weatherbench_spectrum(fields.double().flatten(0, -3).numpy(), GRID)
                expected = by_row.weighted(weights).mean(("latitude", "n"))
                assert len(expected) == 6
                np.testing.assert_allclose(getattr(found[name, lead], what), expected, rtol=1e-6)


def test_energies_of_a_row_are_the_integral_of_the_squared_field() -> None:
    """Parseval, on an odd number of columns, whose waves all have a conjugate; and one wave is one number."""
    grid = Grid(np.array([-30.0, 30.0]), np.arange(9) * 40.0)
    fields = torch.from_numpy(np.stack([5 + 2 * np.cos(np.radians(3 * grid.longitudes))] * 2))[None, None, None]
    spectra = ZonalSpectra(("z500",), (24,), grid, CPU)
    spectra.add(fields, fields[:, 0], torch.tensor([24]))
    (found,) = spectra.results()
    circle = 2 * math.pi * EARTH_RADIUS_M * math.cos(math.radians(30))
    np.testing.assert_allclose(found.forecast, [25 * circle, 0, 0, 2 * circle, 0], atol=1e-6)
    assert sum(found.truth) == pytest.approx(circle * float(fields.square().mean()))


def test_rows_with_missing_truth_are_left_out_of_both() -> None:
    forecast, truth = random_fields(0, 2, 1, 1), random_fields(1, 2, 1)
    known = slice(2, 6)
    truth[0, 0, :2, 3] = torch.nan
    truth[0, 0, 6] = torch.nan
    # Of the second case nothing is known.
    truth[1] = torch.nan
    spectra = ZonalSpectra(("z500",), (24, 72), GRID, CPU)
    spectra.add(forecast, truth, torch.tensor([24, 24]))
    first, second = spectra.results()
    weights = GRID.area_weights()[known, 0]
    for fields, found in ((forecast[0, 0], first.forecast), (truth[0], first.truth)):
        by_row = weatherbench_spectrum(fields.double().numpy(), GRID).values[0][known]
        np.testing.assert_allclose(found, (by_row * weights[:, None]).sum(0) / weights.sum(), rtol=1e-6)
    assert second.as_dict() == {"variable": "z500", "lead_hours": 72, "forecast": [None] * 6, "truth": [None] * 6}


def test_a_drawing_has_both_lead_times_and_the_truth() -> None:
    first, last = (Spectrum("z500", lead, (9.0, 4.0, share), (9.0, 4.0, 1.0)) for lead, share in ((6, 0.5), (48, 0.25)))
    drawn = draw_spectra(first, last)
    assert drawn.svg.count("<polyline") == 3 and "at 2 the forecast of 48 h has 0.2500 times" in drawn.words
    unknown = Spectrum("z500", 48, (math.nan,) * 3, (math.nan,) * 3)
    assert draw_spectra(unknown, unknown).words == "No energy could be compared."
