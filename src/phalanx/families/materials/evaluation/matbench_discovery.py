"""Metrics of Matbench Discovery: how well predicted formation energies tell which crystals are stable.

Riebesell et al., "A framework to evaluate machine learning crystal stability predictions", Nature Machine Intelligence 7,
836 (2025); formulas as in its package's `metrics.discovery`. The hull stays that of DFT: a predicted energy above it is the
true one plus the error of the formation energy. A crystal is stable at 0 eV/atom or less, and one without a prediction
counts as predicted unstable.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.ensemble.residuals import FloatArray
from phalanx.errors import DataError

ID = "material_id"
HULL = "e_above_hull_mp2020_corrected_ppd_mp"
FORMATION = "e_form_per_atom_mp2020_corrected"
PROTOTYPE = "unique_prototype"
PREDICTED = "e_form_per_atom"
"""Beginning of the name of the column of predictions."""
MOST_STABLE = 10_000
"""Crystals of the third subset: those with the least predicted energies above the hull."""


@dataclass(frozen=True)
class Discovery:
    """Metrics over a set of crystals; NaN where nothing is divided by nothing."""

    crystals: int
    missing: int
    """Crystals without a prediction."""
    f1: float
    daf: float
    """Discovery acceleration factor: precision over the share of stable crystals among those that were to choose from."""
    precision: float
    recall: float
    accuracy: float
    mae: float
    """eV/atom, of crystals with a prediction, as the two below."""
    rmse: float
    r2: float


def score_discovery(predictions: Path, summary: Path) -> dict[str, Discovery]:
    """Return the metrics by subset: all crystals, one of each prototype, and of those the 10,000 predicted most stable.

    predictions: CSV, also .gz, with `material_id` and one column `e_form_per_atom...` (eV/atom). summary: the benchmark's
    table of the WBM crystals. Raises DataError for a column that is missing, an unknown or repeated crystal, and text in
    place of a number.
    """
    wanted = _read_columns(summary, [ID, HULL, FORMATION, PROTOTYPE])
    names = {name: row for row, name in enumerate(wanted[ID])}
    if len(names) < len(wanted[ID]):
        raise DataError(f"{summary}: a {ID} stands there twice")
    with _open_rows(predictions) as rows:
        columns = [name for name in next(rows, []) if name.startswith(PREDICTED)]
    if len(columns) != 1:
        found = ", ".join(columns) or "none"
        raise DataError(f"{predictions}: one column of predictions {PREDICTED}... is expected; found are: {found}")
    given = _read_columns(predictions, [ID, columns[0]])
    predicted = np.full(len(names), np.nan)
    seen: set[str] = set()
    for name, value in zip(given[ID], _numbers(predictions, columns[0], given[columns[0]]), strict=True):
        if name not in names or name in seen:
            raise DataError(
                f"{predictions}: {ID} {name} {'stands there twice' if name in seen else f'is not in {summary}'}"
            )
        seen.add(name)
        predicted[names[name]] = value
    true_hull = _numbers(summary, HULL, wanted[HULL])
    true_formation = _numbers(summary, FORMATION, wanted[FORMATION])
    lacking = np.flatnonzero(np.isnan(true_hull + true_formation))
    if lacking.size:
        raise DataError(f"{summary}: {wanted[ID][lacking[0]]} has no {HULL} or no {FORMATION}")
    predicted_hull = true_hull + predicted - true_formation
    unique = np.flatnonzero([flag.strip().lower() in ("true", "1", "1.0") for flag in wanted[PROTOTYPE]])
    # NaN sorts behind all numbers; a crystal without a prediction is none of the most stable.
    most_stable = unique[np.argsort(predicted_hull[unique], kind="stable")][:MOST_STABLE]
    most_stable = most_stable[~np.isnan(predicted_hull[most_stable])]
    everything = np.arange(len(names))
    # Those predicted most stable were chosen among all prototypes.
    subsets = {
        "full_test_set": (everything, everything),
        "unique_prototypes": (unique, unique),
        "most_stable_10k": (most_stable, unique),
    }
    return {
        name: discovery_metrics(
            true_hull[rows], predicted_hull[rows], _share(int(np.sum(true_hull[pool] <= 0.0)), len(pool))
        )
        for name, (rows, pool) in subsets.items()
    }


def discovery_metrics(true: FloatArray, predicted: FloatArray, prevalence: float) -> Discovery:
    """Return the metrics of predicted energies above the hull [n], eV/atom, NaN where there is none.

    prevalence: share of stable crystals among those that were to choose from.
    """
    # NaN is not at most 0: no prediction is one of an unstable crystal.
    stable, chosen = true <= 0.0, predicted <= 0.0
    right = int(np.sum(stable & chosen))
    precision, recall = _share(right, int(chosen.sum())), _share(right, int(stable.sum()))
    there = ~np.isnan(predicted)
    error = predicted[there] - true[there]
    squares = float(np.square(error).sum())
    spread = float(np.square(true[there] - true[there].mean()).sum()) if there.any() else 0.0
    return Discovery(
        crystals=len(true),
        missing=int((~there).sum()),
        f1=_share(2.0 * precision * recall, precision + recall),
        daf=_share(precision, prevalence),
        precision=precision,
        recall=recall,
        accuracy=_share(int(np.sum(stable == chosen)), len(true)),
        mae=_share(float(np.abs(error).sum()), len(error)),
        rmse=float(np.sqrt(_share(squares, len(error)))),
        r2=1.0 - _share(squares, spread),
    )


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else float("nan")


def _numbers(path: Path, column: str, texts: list[str]) -> FloatArray:
    """Return the numbers of a column, NaN where a field is empty."""
    try:
        return np.array([float(text) if text.strip() else np.nan for text in texts])
    except ValueError as error:
        raise DataError(f"{path}: column {column} holds text in place of a number ({error})") from None


def _read_columns(path: Path, names: list[str]) -> dict[str, list[str]]:
    with _open_rows(path) as rows:
        head = next(rows, [])
        absent = [name for name in names if name not in head]
        if absent:
            raise DataError(f"{path}: no column {absent[0]}; its columns are {', '.join(head) or 'none'}")
        places = [head.index(name) for name in names]
        columns: dict[str, list[str]] = {name: [] for name in names}
        for number, row in enumerate(rows):
            if len(row) != len(head):
                raise DataError(f"{path}: row {number} has {len(row)} fields, its header {len(head)}")
            for name, place in zip(names, places, strict=True):
                columns[name].append(row[place])
    return columns


@contextmanager
def _open_rows(path: Path) -> Iterator[Iterator[list[str]]]:
    """Give the rows of a CSV file, compressed or not. Raises DataError for what is none."""
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            yield (row for row in csv.reader(file) if row)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: it cannot be read as CSV ({error})") from None
