"""The materials family as run files know it. Needs no torch."""

from __future__ import annotations

from phalanx.config.families import Family
from phalanx.families.materials.config import MaterialsRun

FAMILY = Family(
    name="materials",
    run=MaterialsRun,
    bound="phalanx.families.materials.bound:BoundMaterials",
    sizes="phalanx.families.materials.sizes",
)
