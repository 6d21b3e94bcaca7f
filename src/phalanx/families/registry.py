"""Which family a run's model belongs to."""

from __future__ import annotations

from importlib import import_module

from phalanx.config.schema import Run
from phalanx.families.family import Family


def family_of(run: Run) -> Family:
    """The family's declarations. Its module is imported only now: some families need packages that others do not."""
    family: Family = import_module(f"phalanx.families.{run.model.family}.family").FAMILY
    return family
