"""Small stores of fields whose every value is known: a function of variable, time and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray

from phalanx.families.weather.config import FieldData, FieldSource

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "weather"
LATITUDES = np.array([-75.0, -45.0, -15.0, 15.0, 45.0, 75.0])
LONGITUDES = np.arange(8) * 45.0
_BASE = {"z500": (54000.0, 3000.0), "t850": (275.0, 15.0), "u10": (2.0, 6.0)}


def field(name: str, hours: np.ndarray, latitudes: np.ndarray = LATITUDES, columns: int = 8) -> np.ndarray:
    """Values [T, H, W] of a variable at hours since 2000-01-01: colder to the south, with waves that move and a season."""
    mean, size = _BASE[name]
    t, y, x = (
        hours[:, None, None],
        np.deg2rad(latitudes)[None, :, None],
        np.arange(columns)[None, None, :] * 2 * np.pi / columns,
    )
    season = 0.3 * np.sin(2 * np.pi * t / (24 * 366))
    moving = 0.2 * np.sin(x - t / 17.0 + len(name)) + 0.1 * np.cos(3 * y + t / 5.0)
    return (mean + size * (np.sin(y) + season + moving)).astype(np.float32)


def dataset(
    hours: np.ndarray,
    names: tuple[str, ...] = ("z500", "t850", "u10"),
    *,
    latitudes: np.ndarray = LATITUDES,
    longitudes: np.ndarray = LONGITUDES,
    units: str = "hours since 2000-01-01",
    calendar: str = "standard",
    static: bool = True,
) -> xarray.Dataset:
    """Fields of `names` at hours since 2000-01-01, with orography."""
    found: dict[str, Any] = {
        name: (("time", "lat", "lon"), field(name, hours, latitudes, len(longitudes))) for name in names
    }
    if static:
        found["orography"] = (("lat", "lon"), np.outer(latitudes + 90, np.arange(len(longitudes)) + 1.0))
    times = ("time", hours.astype(np.float64), {"units": units, "calendar": calendar})
    return xarray.Dataset(found, {"time": times, "lat": latitudes, "lon": longitudes})


def write_year(folder: Path, *, steps: int = 240, files: int = 4, step_hours: int = 6) -> np.ndarray:
    """Consecutive netCDF files of `steps` frames in all; gives their hours since 2000-01-01."""
    hours = np.arange(steps) * step_hours
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(hours, files)):
        dataset(part).to_netcdf(folder / f"part{number}.nc")
    return hours


def field_data(*sources: Any, **changes: Any) -> FieldData:
    """A `data` section over 240 steps; `changes` replace fields."""
    values: dict[str, Any] = {
        "sources": [source if isinstance(source, FieldSource) else FieldSource(path=str(source)) for source in sources],
        "inputs": ["z500", "t850", "u10"],
        "static": ["orography"],
        "lead_hours": [6, 12, 24],
        "splits": {
            "train": {"first": "step 0", "last": "step 159"},
            "validation": {"first": "step 165", "last": "step 199"},
            "test": {"first": "step 205", "last": "step 239"},
        },
    }
    return FieldData.model_validate({**values, **changes})


def write_climax(
    folder: Path,
    years: tuple[int, ...],
    *,
    shards: int = 2,
    step_hours: int = 24,
    frames: int = 364,
    compressed: bool = False,
) -> None:
    """ClimaX shards of `frames` frames a year, the first half of the years in train/, the rest in val/."""
    folder.mkdir(parents=True)
    np.save(folder / "lat.npy", LATITUDES)
    np.save(folder / "lon.npy", LONGITUDES)
    for number, year in enumerate(years):
        split = folder / ("train" if number < max(1, len(years) - 1) else "val")
        split.mkdir(exist_ok=True)
        start = (np.datetime64(f"{year}-01-01") - np.datetime64("2000-01-01")) / np.timedelta64(1, "h")
        for shard, part in enumerate(np.array_split(start + np.arange(frames) * step_hours, shards)):
            arrays = {name: field(name, part)[:, None] for name in ("z500", "t850", "u10")}
            arrays["orography"] = np.broadcast_to(np.outer(LATITUDES + 90, np.arange(8) + 1.0), (len(part), 1, 6, 8))
            save = np.savez_compressed if compressed else np.savez
            save(split / f"{year}_{shard}.npz", **arrays)
