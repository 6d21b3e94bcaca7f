"""Read forecasts that Phalanx wrote with WeatherBench-X, and compare its scores with ours.

    python benchmarks/weatherbenchx_check.py --out benchmarks/results/weather/weatherbenchx.json

Needs the package weatherbenchX (github.com/google-research/weatherbenchX; no package index has it) beside Phalanx, and the
folder tests/ on PYTHONPATH, whose small weather run is trained for three steps. Forecasts are read from the zarr store and
from the netCDF file by `PredictionsFromXarray` as they are, truth by `TargetsFromXarray`; RMSE, MAE and bias are weighted by
`GridAreaWeighting`. Where one differs from ours by more than 1e-5 of the RMSE, the script fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import xarray
from weatherbenchX import aggregation, weighting
from weatherbenchX.data_loaders.xarray_loaders import PredictionsFromXarray, TargetsFromXarray
from weatherbenchX.metrics.deterministic import MAE, RMSE, Bias

from phalanx.config.load import load_run
from phalanx.families.weather.evaluation.forecast_scores import Score
from phalanx.families.weather.evaluation.forecast_split import forecast_split, load_forecaster
from phalanx.training.start import train
from weather_runs import write_weather_run

BOUND = 1e-5
LEADS = (6, 12, 24, 36)
METRICS = {"rmse": RMSE(), "mae": MAE(), "bias": Bias()}


def main() -> None:
    """Train, forecast, compare and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(load_run(write_weather_run(folder), ["training.steps=3", "optimizer.lr=0.05"]), folder / "run")
        forecaster = load_forecaster(folder / "run", torch.device("cpu"))
        for path in (folder / "forecasts.zarr", folder / "forecasts.nc"):
            rows = forecast_split(forecaster, hours=max(LEADS), split="test", starts=9, out=path).rows
            worst[path.suffix] = max(compare(row, path, folder / "fields.nc") for row in rows)
    content = {
        "command": f"python benchmarks/weatherbenchx_check.py --out {asked.out}",
        "versions": {one: metadata.version(one) for one in ("xarray", "zarr", "netCDF4", "numpy")},
        "weatherbenchX": "2047a84d9705db79faa64650b44af1cb795c6db9",
        "scores_compared_per_file": len(rows) * len(METRICS),
        "largest_relative_difference": worst,
    }
    asked.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))
    if max(worst.values()) > BOUND:
        raise SystemExit(f"scores differ by {max(worst.values()):.1e} of them, above {BOUND}")


def compare(row: Score, path: Path, fields: Path) -> float:
    """Return the largest difference of WeatherBench-X's scores from those of `row`, relative to its RMSE."""
    array, level = {"z500": ("z", 500), "t850": ("t", 850), "u10": ("u10", None)}[row.variable]
    place = {} if level is None else {"level": level}
    predictions = PredictionsFromXarray(path=str(path), variables=[array], sel_kwargs=place)
    targets = TargetsFromXarray(
        path=str(fields), variables=[array], rename_variables={row.variable: array} if level else None
    )
    lead = np.timedelta64(row.lead_hours, "h")
    with xarray.open_dataset(fields) as truth:
        known = truth.time.values
    with xarray.open_dataset(path) as forecasts:
        starts = forecasts.time.values
    # The last forecasts reach beyond the truth that is known.
    starts = starts[np.isin(starts + lead, known)]
    if len(starts) != row.forecasts:
        raise SystemExit(
            f"{row.variable} at {row.lead_hours} h: {row.forecasts} forecasts scored, {len(starts)} in {path}"
        )
    chunks = [loader.load_chunk(starts, np.array([lead])) for loader in (predictions, targets)]
    aggregator = aggregation.Aggregator(
        reduce_dims=["init_time", "latitude", "longitude"], weigh_by=[weighting.GridAreaWeighting()]
    )
    values = aggregation.compute_metric_values_for_single_chunk(METRICS, aggregator, *chunks)
    differences = [abs(float(values[f"{name}.{array}"].squeeze()) - getattr(row, name)) for name in METRICS]
    return max(differences) / row.rmse


if __name__ == "__main__":
    main()
