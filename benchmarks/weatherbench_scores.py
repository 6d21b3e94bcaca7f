"""Compare all scores of forecasts with those of WeatherBench 2 and WeatherBench-X, on grids and with gaps of several kinds.

    PYTHONPATH=src:tests:WEATHERBENCH2:WEATHERBENCHX python benchmarks/weatherbench_scores.py \\
        --out benchmarks/results/weather/weatherbench_scores.json

WEATHERBENCH2 and WEATHERBENCHX are checkouts of github.com/google-research/weatherbench2 and weatherbenchX, which no
package index has. Fields are random numbers in netCDF files: on a grid with rows on the poles and on one without, from
south to north and from north to south, whole and with missing values. Truth and climatology are read by our readers on
one side, by xarray on the other; forecasts of an ensemble and of its first member are scored by both. The script fails
where a score differs by more than 1e-6 of itself (a bias: of the RMSE).

How the libraries take missing values decides what is asked of them. A mean over forecasts of means over the points that
are there is WeatherBench 2's with skipna, once forecasts are missing where the truth is: its spread, its variance and the
size of a forecast's anomalies do not look at the truth. Rank histograms are averaged over the points that have a truth.
WeatherBench-X averages over points and forecasts at once, and is compared where nothing is missing; its anomaly
correlation, a ratio of means over forecasts, is not ours, a mean of ratios as of WeatherBench 2.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import weatherbench2.derived_variables
import weatherbench2.metrics as wb2
import weatherbenchX
import xarray
from weatherbenchX import aggregation, weighting
from weatherbenchX.metrics import categorical, deterministic, probabilistic

from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.field_store import BlockCache, FieldStore
from phalanx.families.weather.data.open_fields import open_store
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScores, ForecastScores, PrecipitationClimates
from phalanx.families.weather.evaluation.spectra import ZonalSpectra

BOUND = 1e-6
MEMBERS, DAYS, HOURS = 5, 4, (0, 6, 12, 18)
DRY_M = 0.25 / 1000
GRIDS = {
    "rows on the poles": (np.linspace(-90.0, 90.0, 9), np.arange(16) * 22.5),
    "no row on a pole": (np.linspace(-84.375, 84.375, 16), np.arange(32) * 11.25),
}
WIND, RAIN = "wind", "total_precipitation_24hr"
Scores = dict[str, float | np.ndarray]
LATITUDE_LONGITUDE = ("latitude", "longitude")


def main() -> None:
    """Compare all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, (grid, southward, gaps) in enumerate(product(GRIDS, (False, True), (False, True))):
            case = Case(Path(name) / f"{number}", *GRIDS[grid], southward=southward, gaps=gaps, seed=number)
            about = {"grid": grid, "latitudes": "descending" if southward else "ascending", "missing values": gaps}
            ours = our_scores(case)
            rows.append({**about, "library": "weatherbench2", **differences(ours, weatherbench2_scores(case))})
            if not gaps:
                rows.append({**about, "library": "weatherbenchX", **differences(ours, weatherbenchx_scores(case))})
    libraries = {"weatherbench2": weatherbench2.derived_variables, "weatherbenchX": weatherbenchX}
    content = {
        "command": f"python benchmarks/weatherbench_scores.py --out {asked.out}",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(__file__).parent),
        "libraries": {library: commit_of(Path(str(module.__file__)).parent) for library, module in libraries.items()},
        "versions": {one: metadata.version(one) for one in ("torch", "xarray", "numpy", "scipy")},
        "machine": platform.platform(),
        "bound": BOUND,
        "relative_differences": rows,
    }
    asked.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))
    worst = max(value for row in rows for value in row.values() if isinstance(value, float))
    if not worst < BOUND:
        raise SystemExit(f"scores differ by {worst:.1e} of them, above {BOUND}")


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that a folder lies in, or what its file COMMIT says."""
    for parent in folder.parents:
        if (parent / "COMMIT").is_file():
            return (parent / "COMMIT").read_text().strip()
        if (parent / ".git").exists():
            break
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


class Case:
    """Files of truth, forecasts and climatology on one grid, with what is in them."""

    def __init__(
        self,
        folder: Path,
        latitudes: np.ndarray,
        longitudes: np.ndarray,
        *,
        southward: bool,
        gaps: bool,
        seed: int,
    ) -> None:
        folder.mkdir()
        self.gaps = gaps
        self.generator = np.random.default_rng(seed)
        latitudes = latitudes[::-1] if southward else latitudes
        times = np.array(
            [
                np.datetime64("2020-02-27") + np.timedelta64(24 * day + hour, "h")
                for day in range(DAYS)
                for hour in HOURS
            ]
        )
        self.coordinates = {"time": times.astype("datetime64[ns]"), "latitude": latitudes, "longitude": longitudes}
        self.shape = (len(times), len(latitudes), len(longitudes))
        truth = {WIND: self.normal(), RAIN: self.amounts()}
        if gaps:
            truth[WIND][self.generator.random(self.shape) < 0.1] = np.nan
            # Points of an ice sheet, say, and in one frame a whole row.
            truth[RAIN][:, 2:4, 5] = np.nan
            truth[WIND][3, 4] = np.nan
        self.truth = folder / "truth.nc"
        self._write(self.truth, truth)
        self.climatology = folder / "climatology.nc"
        self._write(self.climatology, {WIND: self.normal(), RAIN: 0.002 + np.abs(self.normal()) * 0.004})
        self.members = [folder / f"member{number}.nc" for number in range(MEMBERS)]
        for path in self.members:
            self._write(path, {WIND: self.normal() + 0.3, RAIN: self.amounts()})
        # The same in all months and hours, since WeatherBench 2 scores by the mean over these; some points too dry or wet.
        self.dry_fraction = self.generator.uniform(0.05, 0.95, self.shape[1:])

    def normal(self) -> np.ndarray:
        """Return fields as of a wind."""
        return self.generator.normal(2.0, 6.0, self.shape).astype(np.float32)

    def amounts(self) -> np.ndarray:
        """Return fields as of precipitation in metres, nothing at half of the points."""
        amounts = self.generator.gamma(0.6, 0.008, self.shape) * (self.generator.random(self.shape) < 0.5)
        return amounts.astype(np.float32)

    def _write(self, path: Path, fields: Mapping[str, np.ndarray]) -> None:
        dims = ("time", *LATITUDE_LONGITUDE)
        xarray.Dataset({name: (dims, values) for name, values in fields.items()}, self.coordinates).to_netcdf(path)

    def store(self, path: Path) -> FieldStore:
        """Open a file as training and forecasts do."""
        return open_store(FieldSource(path=str(path)), [WIND, RAIN], [], BlockCache(0))

    def ours(self, path: Path) -> torch.Tensor:
        """Return the fields [T, V, H, W] of a file, read by our reader."""
        return torch.from_numpy(self.store(path).read(np.arange(self.shape[0]), [0, 1]))

    def theirs(self, path: Path) -> xarray.Dataset:
        """Return the fields of a file in double precision, read by xarray."""
        with xarray.open_dataset(path) as found:
            return found.load().astype(np.float64)


def our_scores(case: Case) -> Scores:
    """Return the scores that Phalanx gives."""
    store = case.store(case.truth)
    area = torch.from_numpy(store.grid.area_weights())
    truth, usual = case.ours(case.truth), case.ours(case.climatology)
    members = torch.stack([case.ours(path) for path in case.members], 1)
    leads = torch.full((len(truth),), 24)
    # As the file has it, turned like its fields.
    southward = case.coordinates["latitude"][0] > case.coordinates["latitude"][-1]
    dry = torch.from_numpy(case.dry_fraction[::-1].copy() if southward else case.dry_fraction)
    climates = PrecipitationClimates(
        (1,), torch.tensor([DRY_M]), dry.expand(len(truth), 1, *dry.shape), usual[:, 1:2].double()
    )
    single = ForecastScores((WIND, RAIN), (24,), area)
    single.add(members[:, 0], truth, leads, usual, climates)
    several = EnsembleScores((WIND, RAIN), (24,), area, MEMBERS)
    several.add(members, truth, leads)
    spectra = ZonalSpectra((WIND, RAIN), (24,), store.grid, torch.device("cpu"))
    spectra.add(members, truth, leads)
    found: Scores = {}
    for score, ensemble, spectrum in zip(single.results(), several.results(), spectra.results(), strict=True):
        name = score.variable
        found |= {f"{what} {name}": getattr(score, what) for what in ("rmse", "mae", "bias", "acc")}
        found |= {f"{what} {name}": getattr(ensemble, what) for what in ("crps", "fair_crps", "spread", "spread_skill")}
        found |= {f"rmse of mean {name}": ensemble.rmse, f"ranks {name}": np.array(ensemble.ranks)}
        found |= {f"spectrum {what} {name}": np.array(getattr(spectrum, what)) for what in ("forecast", "truth")}
    found[f"seeps {RAIN}"] = single.results()[1].seeps
    return found


def weatherbench2_scores(case: Case) -> Scores:
    """Return the scores of weatherbench2.metrics and the spectra of weatherbench2.derived_variables."""
    truth, climatology = (case.theirs(path).sortby("latitude") for path in (case.truth, case.climatology))
    known = {"skipna": case.gaps}
    members = [case.theirs(path).sortby("latitude") for path in case.members]
    ensemble = xarray.concat(members, "realization").assign_coords(realization=np.arange(MEMBERS))
    # Its spread and variance average over all points, those without a truth too.
    ensemble = ensemble.where(truth.notnull())
    single = members[0].where(truth.notnull())
    found: Scores = {}
    squared = wb2.MSE().compute(single, truth, **known)
    absolute, bias = wb2.MAE().compute(single, truth, **known), wb2.Bias().compute(single, truth, **known)
    correlation = wb2.ACC(by_day_and_hour(climatology)).compute(single, truth, **known)
    skill = wb2.CRPSSkill().compute(ensemble, truth, **known)
    half_spread = 0.5 * wb2.CRPSSpread().compute(ensemble, truth, **known)
    fair = wb2.CRPS().compute(ensemble, truth, **known)
    variance = wb2.EnsembleVariance().compute(ensemble, truth, **known)
    of_mean = wb2.EnsembleMeanMSE().compute(ensemble, truth, **known)
    one_hot = wb2.RankHistogram(break_ties_randomly=False).compute_chunk(ensemble, truth)
    ranks = wb2._spatial_average(one_hot.where(truth.notnull()), None, skipna=True).mean("time")
    for name in (WIND, RAIN):
        value = lambda scores: float(scores[name])  # noqa: B023, E731
        found |= {f"rmse {name}": math.sqrt(value(squared)), f"mae {name}": value(absolute)}
        found |= {f"bias {name}": value(bias), f"acc {name}": value(correlation), f"fair_crps {name}": value(fair)}
        # The score of the members' own distribution: of M * M pairs in place of M * (M - 1).
        found[f"crps {name}"] = value(skill) - value(half_spread) * (MEMBERS - 1) / MEMBERS
        found |= {f"spread {name}": math.sqrt(value(variance)), f"rmse of mean {name}": math.sqrt(value(of_mean))}
        found[f"spread_skill {name}"] = math.sqrt(value(variance) / value(of_mean) * (MEMBERS + 1) / MEMBERS)
        # Amounts that are nothing equal one another: ranks among them are a matter of convention.
        if name == WIND:
            found[f"ranks {name}"] = ranks[name].values
        for what, fields in (("forecast", ensemble), ("truth", truth)):
            found[f"spectrum {what} {name}"] = spectrum_of(fields, truth, name)
    return {**found, f"seeps {RAIN}": weatherbench2_seeps(case, single, truth, climatology)}


def by_day_and_hour(climatology: xarray.Dataset) -> xarray.Dataset:
    """Return fields of consecutive times with the dimensions hour and dayofyear."""
    split = climatology.assign_coords(dayofyear=climatology.time.dt.dayofyear, hour=climatology.time.dt.hour).set_index(
        time=("dayofyear", "hour")
    )
    return split.unstack("time")


def spectrum_of(fields: xarray.Dataset, truth: xarray.Dataset, name: str) -> np.ndarray:
    """Return the mean spectrum over rows whose truth is known everywhere, by wavenumber."""
    energy = weatherbench2.derived_variables.ZonalEnergySpectrum(name).compute(fields[[name]])
    energy = energy.where(truth[name].notnull().all("longitude"))
    weights = wb2.get_lat_weights(energy)
    by_forecast = energy.weighted(weights).mean("latitude")
    others = [dim for dim in by_forecast.dims if dim != "zonal_wavenumber"]
    return np.asarray(by_forecast.mean(others))


def weatherbench2_seeps(
    case: Case, forecast: xarray.Dataset, truth: xarray.Dataset, climatology: xarray.Dataset
) -> float:
    """Return the SEEPS of WeatherBench 2, of one climate."""
    climate = by_day_and_hour(climatology)[[RAIN]].rename({RAIN: f"{RAIN}_seeps_threshold"})
    axes = {name: case.coordinates[name] for name in LATITUDE_LONGITUDE}
    dry = xarray.DataArray(case.dry_fraction, axes, LATITUDE_LONGITUDE).sortby("latitude")
    climate[f"{RAIN}_seeps_dry_fraction"] = dry.expand_dims(hour=climate.hour, dayofyear=climate.dayofyear)
    forecast, truth = (fields[[RAIN]].assign_coords(valid_time=fields.time) for fields in (forecast, truth))
    score = wb2.SEEPS(climate, dry_threshold_mm=1000 * DRY_M, precip_name=RAIN).compute_chunk(forecast, truth)
    return float(score[RAIN].mean("time"))


def weatherbenchx_scores(case: Case) -> Scores:
    """Return the scores of weatherbenchX.metrics of whole fields; files are taken as they lie."""
    predictions = xarray.concat([case.theirs(path) for path in case.members], "number")
    truth, climatology = case.theirs(case.truth), case.theirs(case.climatology)
    both = [as_forecasts(fields) for fields in (predictions, truth)]
    single = [both[0].isel(number=0), both[1]]
    axes = {name: case.coordinates[name] for name in LATITUDE_LONGITUDE}
    climate = by_day_and_hour(climatology)
    climate[f"{RAIN}_seeps_threshold"] = climate[RAIN]
    dry = xarray.DataArray(case.dry_fraction, axes, LATITUDE_LONGITUDE)
    climate[f"{RAIN}_seeps_dry_fraction"] = dry.expand_dims(hour=climate.hour, dayofyear=climate.dayofyear)
    deterministic_metrics: dict[str, Any] = {
        "rmse": deterministic.RMSE(),
        "mae": deterministic.MAE(),
        "bias": deterministic.Bias(),
    }
    ensemble_metrics: dict[str, Any] = {
        "crps": probabilistic.CRPSEnsemble(fair=False),
        "fair_crps": probabilistic.CRPSEnsemble(),
        "spread": probabilistic.EnsembleRootMeanVariance(),
    }
    rank_metric = {"ranks": probabilistic.RankHistogram()}
    rain = {"seeps": categorical.SEEPS([RAIN], climate, dry_threshold_mm=1000 * DRY_M)}
    found: Scores = {}
    for metrics, (forecasts, known) in (
        (deterministic_metrics, single),
        (ensemble_metrics, both),
        (rank_metric, [fields[[WIND]] for fields in both]),
        (rain, [fields[[RAIN]] for fields in single]),
    ):
        aggregator = aggregation.Aggregator(
            reduce_dims=["init_time", "lead_time", *LATITUDE_LONGITUDE],
            weigh_by=[weighting.GridAreaWeighting()],
            masked=metrics is rain,
        )
        values = aggregation.compute_metric_values_for_single_chunk(
            metrics, aggregator, dict(forecasts.data_vars), dict(known.data_vars)
        )
        for key, value in values.data_vars.items():
            what, name = str(key).split(".")
            found[f"{what} {name}"] = np.asarray(value).squeeze()
    return found


def as_forecasts(fields: xarray.Dataset) -> xarray.Dataset:
    """Return fields with the dimensions of WeatherBench-X, 24 hours after their start."""
    lead = np.timedelta64(24, "h").astype("timedelta64[ns]")
    valid = fields.time.values
    found = fields.rename(time="init_time").assign_coords(init_time=valid - lead).expand_dims(lead_time=[lead])
    return found.assign_coords(valid_time=found.init_time + found.lead_time)


def differences(ours: Scores, theirs: Scores) -> dict[str, float]:
    """Return for each score the library has the largest difference of ours, relative to it; of a bias to the RMSE."""
    found = {}
    for name, value in theirs.items():
        what, variable = name.rsplit(" ", 1)
        scale = ours[f"rmse {variable}"] if what == "bias" else np.asarray(value)
        # Circles of latitude at the poles have no length, and histograms may have empty ranks.
        scale = np.maximum(np.abs(scale), 1e-9 * np.max(np.abs(scale)))
        found[name] = float(np.max(np.abs(np.asarray(ours[name]) - value) / scale))
    return found


if __name__ == "__main__":
    main()
