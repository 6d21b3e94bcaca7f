"""Gridded fields in time: stores, splits, normalisation, deterministic samples. Needs the weather extra."""

from phalanx.data.fields.packages import require_package

# Of calendars, whatever the files; packages that read files are asked for where a file needs them.
require_package("cftime", "weather data needs")
