"""What is refused before a store is read for training: holes in time, files in other units."""

from __future__ import annotations

import numpy as np

from phalanx.families.weather.data.consistency import Body, require_alike
from phalanx.families.weather.data.prepared import PreparedStore
from phalanx.families.weather.data.stores.npz_store import NpzStore
from phalanx.families.weather.data.stores.store import FieldStore, require_regular
from phalanx.families.weather.data.stores.times import HOUR
from phalanx.families.weather.data.survey import Survey


def require_whole_axis(store: FieldStore, *, skip_gaps: bool, tolerance_hours: float) -> None:
    """Refuse holes in the time axis of `store` unless `skip_gaps`. Raises DataError naming files and time indices."""
    checked = isinstance(store, PreparedStore) and store.manifest.whole
    if not skip_gaps and not checked:
        allowed = store.ends_year if isinstance(store, NpzStore) else None
        require_regular(store.times, store.segments, tolerance=round(tolerance_hours * HOUR), allowed=allowed)


def require_one_quantity(store: FieldStore, survey: Survey) -> None:
    """Refuse a file of `store` whose variables are in other units than in the other files, or upside down."""
    if len(survey.segment_frames) < 2:
        return
    bodies, first = [], 0
    for segment, length in enumerate(survey.segment_frames.tolist()):
        frames = np.arange(first, first + length, dtype=np.int64)
        names = [str(store.locate(variable, first)[0]) for variable in range(len(store.variables))]
        days = frozenset(store.times.days_of_year[frames].tolist())
        bodies.append(Body(names, survey.moments(frames), survey.profile[segment], days))
        first += length
    for body in bodies[1:]:
        require_alike(store.variables, bodies[0], body)
