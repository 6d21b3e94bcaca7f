"""Whether more simulated weather is of the same climate as the file of 330 days, and none of it the weather of its test.

    python benchmarks/simulated_weather_check.py SIMULATED FILE_OF_330_DAYS --out OUT

Climate: mean and standard deviation of each variable over the days of the year that both have, weighted by area. Weather:
correlation over the globe of 500 hPa geopotential, about running means of 30 days, between each stretch of ten days of the
held-out steps and each such stretch of a member, at every shift. The same weather would give 1; how near chance comes is
seen from stretches of the 330 days that lie before the held-out ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.field_store import BlockCache, FieldStore
from phalanx.families.weather.data.open_fields import open_store
from phalanx.files import write_atomically
from simulated_weather import BETWEEN, DAY, FRAMES_A_DAY, UNITS

Array = NDArray[Any]
TEST = range(580, 660)
"""Held-out steps of the 330 days."""
APART = 60
"""Steps before the held-out ones that are not compared with them either: weather of their own month."""
STRETCH = 10 * FRAMES_A_DAY
WINDOW = 30 * FRAMES_A_DAY
HEIGHT = "geopotential_500"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulated", type=Path, help="folder of member files")
    parser.add_argument("known", type=Path, help="the file of 330 days")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cache = BlockCache(2**30)
    stores = [
        open_store(FieldSource(path=str(path)), list(UNITS), [], cache)
        for path in (options.simulated / "member-*.nc", options.known)
    ]
    found = {
        "days": len(stores[0].times) / FRAMES_A_DAY,
        "members": len(members_of(stores[0])),
        "climate": climate(*stores),
        "largest_correlation": weather(*stores),
    }
    print(json.dumps(found, indent=1))
    if options.out is not None:
        write_atomically(options.out, json.dumps(found, indent=1) + "\n")


def climate(simulated: FieldStore, known: FieldStore) -> dict[str, dict[str, float]]:
    """By variable: simulated standard deviation over the known one, and how many of them the means are apart.

    Each day of the year counts the same in both, whatever the number of its frames.
    """
    days = [store.times.days_of_year for store in (simulated, known)]
    common = np.intersect1d(days[0], days[1])
    found = {}
    for index, name in enumerate(UNITS):
        moments = [
            mean_and_std(store, index, days_of, common) for store, days_of in zip((simulated, known), days, strict=True)
        ]
        (mean_a, std_a), (mean_b, std_b) = moments
        found[name] = {"std_ratio": round(std_a / std_b, 4), "means_apart": round((mean_a - mean_b) / std_b, 4)}
    return found


def mean_and_std(store: FieldStore, variable: int, days_of: Array, wanted: Array) -> tuple[float, float]:
    """Over the days of the year `wanted`, all places weighted by area."""
    frames = np.flatnonzero(np.isin(days_of, wanted))
    weight_H = np.cos(np.deg2rad(store.grid.latitudes))
    weight_H /= weight_H.sum()
    means, squares = np.empty(len(frames)), np.empty(len(frames))
    for first in range(0, len(frames), STRETCH):
        part = slice(first, first + STRETCH)
        fields = store.read(frames[part], [variable])[:, 0].astype(np.float64)
        means[part], squares[part] = (power.mean(axis=2) @ weight_H for power in (fields, fields**2))
    _, day, count = np.unique(days_of[frames], return_inverse=True, return_counts=True)
    share = 1.0 / (count[day] * len(count))
    mean = float(share @ means)
    return mean, float(np.sqrt(share @ squares - mean**2))


def weather(simulated: FieldStore, known: FieldStore) -> dict[str, float]:
    """The largest mean correlation of any two stretches."""
    test = patterns(known, np.array(TEST))
    own = largest(test, patterns(known, np.arange(TEST.start - APART)))
    members = [largest(test, patterns(simulated, frames)) for frames in members_of(simulated) if len(frames) >= STRETCH]
    return {"with_members": round(max(members), 4), "with_earlier_steps_of_the_file": round(own, 4)}


def members_of(store: FieldStore) -> list[Array]:
    """Frames of each member."""
    cuts = np.flatnonzero(np.diff(store.times.seconds) >= BETWEEN * DAY) + 1
    return np.split(np.arange(len(store.times)), cuts)


def patterns(store: FieldStore, frames: Array) -> Array:
    """[n, H * W]: anomalies of geopotential, of length 1 where each place counts by its area."""
    fields = store.read(frames, [list(UNITS).index(HEIGHT)])[:, 0].astype(np.float64)
    sums = np.cumsum(np.concatenate([np.zeros_like(fields[:1]), fields]), axis=0)
    first = np.maximum(np.arange(len(frames)) - WINDOW // 2, 0)
    end = np.minimum(np.arange(len(frames)) + WINDOW // 2 + 1, len(frames))
    anomalies = fields - (sums[end] - sums[first]) / (end - first)[:, None, None]
    anomalies *= np.sqrt(np.cos(np.deg2rad(store.grid.latitudes)))[:, None]
    flat = anomalies.reshape(len(frames), -1)
    flat -= flat.mean(axis=1, keepdims=True)
    unit: Array = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return unit


def largest(test: Array, other: Array) -> float:
    """Of the mean correlations over STRETCH steps, whatever steps of each they begin with."""
    correlation = test @ other.T
    best = -1.0
    for shift in range(STRETCH - len(test), len(other) - STRETCH + 1):
        along = np.diagonal(correlation, shift)
        sums = np.cumsum(np.append(0.0, along))
        best = max(best, float((sums[STRETCH:] - sums[:-STRETCH]).max() / STRETCH))
    return best


if __name__ == "__main__":
    main()
