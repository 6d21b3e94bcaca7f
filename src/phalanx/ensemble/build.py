"""An ensemble of materials models from candidates to its figures: choose, calibrate on validation, score on test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from phalanx.ensemble.calibrate import Fitted, Kind, calibrate, conformal_part
from phalanx.ensemble.document import EnsembleFile, LabelEntry, entries
from phalanx.ensemble.members import Member, require_alike
from phalanx.ensemble.residuals import FloatArray, Residuals
from phalanx.ensemble.scores import CURVE, LEVELS, Errors, Scores, errors_of, score
from phalanx.ensemble.select import Chosen, best_by_score, choose, fit_weights, relative_products
from phalanx.ensemble.share import ALONE, Share
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.graph_shards import Split
from phalanx.families.materials.ensemble.residuals import member_residuals, untrained_elements


@dataclass(frozen=True)
class Wanted:
    """How an ensemble is to be made."""

    top: int | None = None
    """Members to choose; None takes all candidates."""
    diversity: float = 1.0
    """See `select.choose`."""
    weights: Literal["equal", "fitted"] = "fitted"
    calibration: Kind | None = None
    """None takes the likeliest on held-out structures."""
    samples: int | None = None
    """Structures of each split; None takes all."""
    side_by_side: int | None = None
    """Most members on a device at a time; None goes by memory."""


@dataclass(frozen=True)
class Interval:
    """Conformal intervals of one level on test structures."""

    coverage: float | None
    """Share of truths inside; None where the level has no end."""
    width: float | None
    """Mean width, in the unit of the numbers."""


@dataclass(frozen=True)
class LabelResult:
    """One kind of number of one data set."""

    source: str
    quantity: str
    unit: str
    learned: bool
    fitted: Fitted
    members: list[Errors]
    """Of each member alone, on the test split."""
    raw: Scores
    """Of the ensemble on the test split, the members' spread taken for the standard deviation."""
    scores: Scores
    """The same, calibrated."""
    conformal: dict[str, Interval]
    """By level."""
    conformal_curve: tuple[float | None, ...]
    """Share of truths inside the conformal interval of each of `scores.CURVE`; None where it has no end."""
    by_score: Errors | None
    """Of as many members chosen by score alone, where those are others."""
    numbers: int
    structures: int
    """How much the test split has."""

    @property
    def best(self) -> int:
        """The member with the least mean absolute error on the test split."""
        return min(range(len(self.members)), key=lambda number: self.members[number].mae)


@dataclass(frozen=True)
class Built:
    """An ensemble, ready to be written, shown and used."""

    candidates: list[Member]
    members: list[Member]
    chosen: Chosen
    by_score: Chosen
    """As many by score alone, for comparison."""
    alone: list[float]
    """Relative validation error of each candidate; see `select.relative_products`."""
    labels: list[LabelResult]
    wanted: Wanted
    untrained: dict[Split, dict[str, dict[int, int]]]
    """By split: see `materials.untrained_elements`."""

    def facts(self) -> dict[str, Any]:
        """Everything as plain values."""
        names = [member.name for member in self.candidates]
        return {
            "family": self.members[0].run.model.family,
            "candidates": [
                {
                    "name": one.name,
                    "run": str(one.path),
                    "step": one.step,
                    "score": one.score,
                    "validation_error": error,
                }
                for one, error in zip(self.candidates, self.alone, strict=True)
            ],
            "members": [
                {"name": one.name, "checkpoint": str(one.checkpoint), "step": one.step, "weight": weight}
                for one, weight in zip(self.members, self.chosen.weights, strict=True)
            ],
            "selection": {
                "diversity": self.wanted.diversity,
                "weights": self.wanted.weights,
                "members": [names[number] for number in self.chosen.members],
                "validation_error": list(self.chosen.errors),
                "by_score": [names[number] for number in self.by_score.members],
                "by_score_validation_error": list(self.by_score.errors),
            },
            "labels": [_label_facts(label) for label in self.labels],
            "untrained_elements": self.untrained,
        }

    def document(self, folder: Path) -> EnsembleFile:
        """What is written into `folder`."""
        members = entries(self.members, self.chosen.weights, folder)
        labels = [
            LabelEntry(
                source=one.source,
                quantity=one.quantity,
                unit=one.unit,
                calibration=one.fitted.calibration,
                conformal=one.fitted.conformal,
                held_out_nll=one.fitted.held_out_nll,
                numbers=one.fitted.numbers,
                structures=one.fitted.structures,
            )
            for one in self.labels
        ]
        family = self.members[0].run.model.family
        return EnsembleFile(family=family, members=members, labels=labels, facts=self.facts())


def build_ensemble(
    candidates: Sequence[Member],
    wanted: Wanted,
    device: torch.device,
    share: Share = ALONE,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Built:
    """Choose members, calibrate them on the validation split and score them on the test split. Every rank calls it.

    Half of the validation structures serve the conformal quantiles alone; members are chosen by the other half, and the
    normal distributions are fitted to all of them. progress: called with a split, and what is done of it and in all.

    Raises ConfigError and DataError for candidates that do not go together and for splits that are too small.
    """
    if len(candidates) < 2 or wanted.top == 1:
        raise ConfigError("an ensemble has at least two members; name more runs, or a larger --top")
    require_alike(candidates)

    def residuals(members: Sequence[Member], split: Literal["validation", "test"]) -> list[Residuals]:
        return member_residuals(
            members,
            split,
            device,
            samples=wanted.samples,
            side_by_side=wanted.side_by_side,
            share=share,
            progress=lambda done, total: progress(split, done, total),
        )

    validation = residuals(candidates, "validation")
    products = relative_products([rows.where(~conformal_part(rows.structures_n)) for rows in validation])
    count = wanted.top or len(candidates)
    chosen = choose(products, count, diversity=wanted.diversity)
    if wanted.weights == "fitted":
        chosen = fit_weights(products, chosen)
    by_score = best_by_score(products, [member.score for member in candidates], count)
    shown = list(dict.fromkeys([*chosen.members, *by_score.members]))
    test = {rows.name: rows for rows in residuals([candidates[number] for number in shown], "test")}
    labels = [
        _label_result(rows.of_members(chosen.members), test[rows.name], chosen, by_score, shown, wanted)
        for rows in validation
        if rows.name in test
    ]
    if not labels:
        raise DataError("the validation and the test split have no labels in common")
    alone = np.sqrt(np.diag(products)).tolist()
    members = [candidates[number] for number in chosen.members]
    splits: tuple[Split, ...] = ("validation", "test")
    untrained = {split: untrained_elements(members, split, wanted.samples) for split in splits}
    return Built(list(candidates), members, chosen, by_score, alone, labels, wanted, untrained)


def _label_result(
    validation: Residuals, test: Residuals, chosen: Chosen, by_score: Chosen, shown: Sequence[int], wanted: Wanted
) -> LabelResult:
    """validation: errors of the members; test: of all candidates in `shown`."""
    fitted = calibrate(validation, chosen.weights, wanted.calibration)
    ours = test.of_members([shown.index(number) for number in chosen.members])
    error_n, spread_n = ours.combined(chosen.weights)
    other: Errors | None = None
    if set(by_score.members) != set(chosen.members):
        others = test.of_members([shown.index(number) for number in by_score.members])
        other = errors_of(others.combined(by_score.weights)[0])
    return LabelResult(
        source=test.source,
        quantity=test.quantity,
        unit=test.unit,
        learned=test.learned,
        fitted=fitted,
        members=[errors_of(row.astype(np.float64)) for row in ours.errors_Mn],
        raw=score(error_n, spread_n),
        scores=score(error_n, fitted.calibration.std(spread_n)),
        conformal={str(level): _interval(fitted, error_n, spread_n, level) for level in LEVELS},
        conformal_curve=tuple(_interval(fitted, error_n, spread_n, level).coverage for level in CURVE),
        by_score=other,
        numbers=test.count,
        structures=test.structures,
    )


def _interval(fitted: Fitted, error_n: FloatArray, spread_n: FloatArray, level: float) -> Interval:
    half_n = fitted.conformal.half_widths(spread_n, level)
    if half_n is None:
        return Interval(None, None)
    return Interval(float((np.abs(error_n) <= half_n).mean()), 2.0 * float(half_n.mean()))


def _label_facts(label: LabelResult) -> dict[str, Any]:
    plain = asdict(label) | {"best_member": asdict(label.members[label.best])}
    plain["calibration"] = label.fitted.calibration.model_dump()
    plain["held_out_nll"] = plain.pop("fitted")["held_out_nll"]
    return plain
