"""The weather family as run files know it. Needs no torch."""

from __future__ import annotations

from phalanx.config.families import Family
from phalanx.families.weather.config import WeatherRun

FAMILY = Family(
    name="weather",
    run=WeatherRun,
    bound="phalanx.families.weather.bound:BoundWeather",
    sizes="phalanx.families.weather.sizes",
)
