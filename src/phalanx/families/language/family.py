"""The language family as run files know it. Needs no torch."""

from __future__ import annotations

from phalanx.config.families import Family
from phalanx.families.language.config import LanguageRun

FAMILY = Family(
    name="language",
    run=LanguageRun,
    bound="phalanx.families.language.bound:BoundLanguage",
    sizes="phalanx.families.language.sizes",
)
