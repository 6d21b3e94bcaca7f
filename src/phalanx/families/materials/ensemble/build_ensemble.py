"""An ensemble of materials models from candidates to its figures: choose, calibrate on validation, score on test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from phalanx.ensemble.error_calibration import Fitted, calibrate_residuals, conformal_part
from phalanx.ensemble.family import EnsembleOptions, Progress
from phalanx.ensemble.members import (
    ALONE,
    EnsembleFile,
    LabelEntry,
    Member,
    Share,
    member_entries,
    require_one_family,
    require_same,
)
from phalanx.ensemble.residuals import FloatArray, Residuals
from phalanx.ensemble.scores import CURVE, LEVELS, Errors, Scores, mean_errors, score_predictions
from phalanx.ensemble.select_members import Chosen, best_by_score, choose_members, fit_weights, relative_products
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_shards import Split, prepared_folder, read_manifest
from phalanx.families.materials.ensemble.member_errors import materials_run, member_residuals, untrained_elements
from phalanx.families.materials.evaluation.prediction_errors import predicted_quantities


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
    """Errors of each member alone, on the test split."""
    raw: Scores
    """Scores of the ensemble on the test split, the members' spread taken for the standard deviation."""
    scores: Scores
    """Scores of the ensemble on the test split, calibrated."""
    conformal: dict[str, Interval]
    """Intervals by level."""
    conformal_curve: tuple[float | None, ...]
    """Share of truths inside the conformal interval of each of `scores.CURVE`; None where it has no end."""
    by_score: Errors | None
    """Errors of as many members chosen by score alone, where those are others."""
    numbers: int
    structures: int
    """Structures of the test split that have such numbers."""

    @property
    def best(self) -> int:
        """Return the member with the least mean absolute error on the test split."""
        return min(range(len(self.members)), key=lambda number: self.members[number].mae)


@dataclass(frozen=True)
class MaterialsEnsemble:
    """An ensemble, ready to be written, shown and used."""

    candidates: list[Member]
    members: list[Member]
    chosen: Chosen
    by_score: Chosen
    """As many members, chosen by score alone, for comparison."""
    alone: list[float]
    """Relative validation error of each candidate; see `select.relative_products`."""
    labels: list[LabelResult]
    options: EnsembleOptions
    untrained: dict[Split, dict[str, dict[int, int]]]
    """Structures with elements unknown to members, by split; see `member_errors.untrained_elements`."""

    def summary(self) -> dict[str, Any]:
        """Return everything as plain values."""
        names = [member.name for member in self.candidates]
        labels = []
        for label in self.labels:
            facts = asdict(label) | {"best_member": asdict(label.members[label.best])}
            facts["calibration"] = label.fitted.calibration.model_dump()
            facts["held_out_nll"] = facts.pop("fitted")["held_out_nll"]
            labels.append(facts)
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
                "diversity": self.options.diversity,
                "weights": self.options.weights,
                "members": [names[number] for number in self.chosen.members],
                "validation_error": list(self.chosen.errors),
                "by_score": [names[number] for number in self.by_score.members],
                "by_score_validation_error": list(self.by_score.errors),
            },
            "labels": labels,
            "untrained_elements": self.untrained,
        }

    def document(self, folder: Path) -> EnsembleFile:
        """Return what is written into `folder`."""
        members = member_entries(self.members, self.chosen.weights, folder)
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
        return EnsembleFile(family=family, members=members, labels=labels, facts=self.summary())


def build_ensemble(
    candidates: Sequence[Member],
    options: EnsembleOptions,
    device: torch.device,
    share: Share = ALONE,
    progress: Progress = lambda what, done, total: None,
) -> MaterialsEnsemble:
    """Choose members, calibrate them on the validation split and score them on the test split. Every rank calls it.

    Half of the validation structures serve the conformal quantiles alone; members are chosen by the other half, and the
    normal distributions are fitted to all of them. progress: called with a split, and what is done of it and in all.

    Raises ConfigError and DataError for candidates that do not go together and for splits that are too small.
    """
    if len(candidates) < 2 or options.top == 1:
        raise ConfigError("an ensemble has at least two members; name more runs, or a larger --top")
    require_one_family(candidates)
    _require_same_predictions(candidates)

    def residuals(members: Sequence[Member], split: Literal["validation", "test"]) -> list[Residuals]:
        return member_residuals(
            members,
            split,
            device,
            samples=options.samples,
            side_by_side=options.side_by_side,
            share=share,
            progress=lambda done, total: progress(split, done, total),
        )

    validation = residuals(candidates, "validation")
    products = relative_products([rows.where(~conformal_part(rows.structures_n)) for rows in validation])
    count = options.top or len(candidates)
    chosen = choose_members(products, count, diversity=options.diversity)
    if options.weights == "fitted":
        chosen = fit_weights(products, chosen)
    by_score = best_by_score(products, [member.score for member in candidates], count)
    # The two choices overlap: each candidate is run on the test split once.
    shown = list(dict.fromkeys([*chosen.members, *by_score.members]))
    test = {rows.name: rows for rows in residuals([candidates[number] for number in shown], "test")}
    labels = [
        _label_result(rows.of_members(chosen.members), test[rows.name], chosen, by_score, shown, options)
        for rows in validation
        if rows.name in test
    ]
    if not labels:
        raise DataError("the validation and the test split have no labels in common")
    alone = np.sqrt(np.diag(products)).tolist()
    members = [candidates[number] for number in chosen.members]
    splits: tuple[Split, ...] = ("validation", "test")
    untrained = {split: untrained_elements(members, split, options.samples) for split in splits}
    return MaterialsEnsemble(list(candidates), members, chosen, by_score, alone, labels, options, untrained)


def _label_result(
    validation: Residuals,
    test: Residuals,
    chosen: Chosen,
    by_score: Chosen,
    shown: Sequence[int],
    options: EnsembleOptions,
) -> LabelResult:
    """Calibrate and score one kind of number. validation: errors of the members; test: of all candidates in `shown`."""
    fitted = calibrate_residuals(validation, chosen.weights, options.calibration)
    # Scored on the test split, which neither chose members nor fitted anything.
    ours = test.of_members([shown.index(number) for number in chosen.members])
    error_n, spread_n = ours.combined(chosen.weights)
    other: Errors | None = None
    if set(by_score.members) != set(chosen.members):
        others = test.of_members([shown.index(number) for number in by_score.members])
        other = mean_errors(others.combined(by_score.weights)[0])
    return LabelResult(
        source=test.source,
        quantity=test.quantity,
        unit=test.unit,
        learned=test.learned,
        fitted=fitted,
        members=[mean_errors(row.astype(np.float64)) for row in ours.errors_Mn],
        raw=score_predictions(error_n, spread_n),
        scores=score_predictions(error_n, fitted.calibration.std(spread_n)),
        conformal={str(level): _score_interval(fitted, error_n, spread_n, level) for level in LEVELS},
        conformal_curve=tuple(_score_interval(fitted, error_n, spread_n, level).coverage for level in CURVE),
        by_score=other,
        numbers=test.count,
        structures=test.structures,
    )


def _score_interval(fitted: Fitted, error_n: FloatArray, spread_n: FloatArray, level: float) -> Interval:
    half_n = fitted.conformal.half_widths(spread_n, level)
    if half_n is None:
        return Interval(None, None)
    return Interval(float((np.abs(error_n) <= half_n).mean()), 2.0 * float(half_n.mean()))


def _require_same_predictions(members: Sequence[Member]) -> None:
    """Raise ConfigError or DataError for members that predict other numbers, or were trained on another split.

    Widths, backbones, depths, training and layouts may differ.
    """
    runs = [materials_run(member) for member in members]
    described = [
        {
            "data.sources": ", ".join(source.name for source in run.data.sources),
            "model.branches": ", ".join(branch.name for branch in run.model.branches),
            "quantities": ", ".join(quantity.name for quantity in predicted_quantities(run.model)),
            "data.cutoff": run.data.cutoff,
            "data.max_neighbours": run.data.max_neighbours,
        }
        for run in runs
    ]
    require_same(members, described, "predict the same of the same prepared data")
    first, a = members[0], runs[0]
    for other, b in zip(members[1:], runs[1:], strict=True):
        for source, ours, stored in zip(
            a.data.sources, data_fingerprints(a.data), data_fingerprints(b.data), strict=True
        ):
            if ours != stored:
                raise DataError(
                    f"{other.path} was trained on other structures of source {source.name} than {first.path} "
                    f"({b.data.prepared}, {a.data.prepared}), or on another split of them; members need the same"
                )


def data_fingerprints(data: GraphData) -> list[str]:
    """Return what tells prepared data from any other, one a source: structures, labels, edges and their split."""
    return [read_manifest(prepared_folder(data, source)).fingerprint for source in data.sources]
