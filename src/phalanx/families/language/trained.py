"""A decoder that can be trained, bound to its run: the object that answers every room (`families.family`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.language.bound import BoundLanguage
from phalanx.families.language.cost import LanguageTracing
from phalanx.families.language.ensemble import build_language
from phalanx.families.language.inputs import LanguageInputs
from phalanx.families.language.layout import LanguageLayout
from phalanx.families.language.verification import LanguageVerification


class TrainedLanguage(
    BoundLanguage, LanguageLayout, LanguageTracing, LanguageInputs, LanguageVerification, EnsembleModel
):
    """A decoder bound to its run; each room's questions are answered by the base of its name."""

    def build_ensemble(
        self,
        members: Sequence[Member],
        options: EnsembleOptions,
        device: torch.device,
        share: Share,
        progress: Progress,
    ) -> Ensemble:
        """Join the members by the mean of their probabilities."""
        return build_language(members, device, samples=options.samples, share=share, progress=progress)
