"""The section of a run's page on its mixtures of experts: which experts tokens went to, by layer, and how evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.formatting import format_number, format_percent
from phalanx.report.drawing import Drawing, HeatScale, draw_heat_map
from phalanx.report.run_log import FloatArray
from phalanx.report.table import Column

_FIGURES = ("entropy", "violation", "dropped", "balance_loss", "z_loss")
_RELATIVE_LOAD = HeatScale(
    (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0),
    tuple(f"heat-{number}" for number in range(8)),
    ("no token", "up to 1/4 of the mean", "1/2", "4/5", "mean, 4/5 to 5/4", "up to 2", "up to 4", "more"),
)
"""Colours of an expert's load over the mean of its layer."""


@dataclass(frozen=True)
class LayerUse:
    """Use of the experts of one layer, mean over the last recorded steps."""

    layer: int
    load: FloatArray
    """Share of the choices of each expert."""
    figures: Mapping[str, float]
    """The figures of `training.expert_use.ExpertUse` by name."""

    @property
    def unused(self) -> int:
        """Experts that no token went to."""
        return int((self.load == 0.0).sum())


@dataclass(frozen=True)
class ExpertSection:
    """What the page says of the experts of a run."""

    drawing: Drawing
    layers: list[LayerUse]
    steps: int
    """Recorded steps that the figures are means over."""


LAYER_COLUMNS: list[Column[LayerUse]] = [
    Column("layer", lambda use: use.layer),
    Column("largest load / mean", lambda use: format_number(1.0 + use.figures["violation"])),
    Column("least load / mean", lambda use: format_number(float(use.load.min()) * len(use.load))),
    Column("unused", lambda use: use.unused),
    Column("entropy of the load", lambda use: format_percent(use.figures["entropy"])),
    Column("dropped", lambda use: format_percent(use.figures["dropped"])),
    Column("balance loss", lambda use: format_number(use.figures["balance_loss"])),
    Column("z loss", lambda use: format_number(use.figures["z_loss"])),
]


def describe_experts(records: Sequence[Any]) -> ExpertSection | None:
    """Return the section for the experts fields of a log's last records; None where they tell of no experts."""
    found: dict[int, list[tuple[FloatArray, Mapping[str, float]]]] = {}
    for record in records:
        for layer, load, figures in _read_layers(record):
            found.setdefault(layer, []).append((load, figures))
    if not found:
        return None
    layers = []
    for layer, seen in sorted(found.items()):
        # A log that was joined of two runs may hold two numbers of experts: the last one counts.
        same = [(load, figures) for load, figures in seen if len(load) == len(seen[-1][0])]
        means = {name: float(np.mean([figures[name] for _, figures in same])) for name in _FIGURES}
        layers.append(LayerUse(layer, np.mean([load for load, _ in same], axis=0), means))
    steps = max(len(seen) for seen in found.values())
    rows = [(str(use.layer), (use.load * len(use.load)).tolist()) for use in layers]
    words = (
        f"Load of each expert over the mean of its layer, in the last {steps:,} recorded steps: a row a layer, a column an "
        f"expert. {sum(use.unused for use in layers):,} of {sum(len(use.load) for use in layers):,} experts got no token."
    )
    drawing = draw_heat_map(
        rows, _RELATIVE_LOAD, words, lambda name, number, value: f"layer {name}, expert {number}: {value:.2f} x mean"
    )
    return ExpertSection(drawing, layers, steps)


def list_loads(records: Sequence[Any]) -> list[list[float]]:
    """Return the loads of the experts of each layer in each of a log's last records: rows of shares."""
    return [load.tolist() for record in records for _, load, _ in _read_layers(record)]


def _read_layers(record: Any) -> list[tuple[int, FloatArray, Mapping[str, float]]]:
    """Return layer, load and figures of each whole entry of a record; a damaged one is left out."""
    entries = record if isinstance(record, list) else []
    found: list[tuple[int, FloatArray, Mapping[str, float]]] = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("layer"), int):
            continue
        load = entry.get("load")
        # A layer with fewer than two experts has no balance to tell of.
        numbers = load if isinstance(load, list) and len(load) > 1 else [math.nan]
        if not all(isinstance(share, int | float) and 0.0 <= share <= 1.0 for share in numbers):
            continue
        figures = {name: value for name in _FIGURES if isinstance(value := entry.get(name), int | float)}
        if len(figures) == len(_FIGURES):
            found.append((entry["layer"], np.asarray(numbers, dtype=np.float64), figures))
    return found
