"""The section of a run's page on its coordinate check: what a few steps change of the logits, over widths."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.formatting import format_count, format_number
from phalanx.report.drawing import Drawing, Plot, fit_scale

CHECK_FILE = "coordinate_check.json"
"""File of a run directory that `phalanx verify RUN --widths` writes."""
_CURVES = ("muP", "usual")
_MOST_WIDTHS = 32


@dataclass(frozen=True)
class WidthSection:
    """What the page says of widths."""

    drawing: Drawing
    words: str


def describe_widths(run_dir: Path) -> WidthSection | None:
    """Return the section for the coordinate check in a run directory; None where there is none that can be read."""
    try:
        found = json.loads((run_dir / CHECK_FILE).read_text("utf-8"))
        widths = [_require_positive(width) for width in found["widths"]]
        changes = {name: [_require_positive(value) for value in found["changes"][name]["logits"]] for name in _CURVES}
        growth = {name: float(found["growth"][name]["logits"]) for name in _CURVES}
        steps, lr = int(found["steps"]), _require_positive(found["lr"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not 2 <= len(widths) <= _MOST_WIDTHS or any(len(values) != len(widths) for values in changes.values()):
        return None
    across = fit_scale(np.asarray(widths), logarithmic=True)
    plot = Plot(across, fit_scale(np.asarray([v for values in changes.values() for v in values]), logarithmic=True))
    plot.label_up()
    plot.label_across(widths, format_count, apart=60)
    for number, name in enumerate(_CURVES, 1):
        plot.add_curve(widths, changes[name], number)
    words = (
        f"What {steps} steps at a rate of {format_number(lr)} change of the logits, root mean square, over the width"
    )
    drawing = plot.finish(words, (("dot-1", "muP"), ("dot-2", "without")))
    return WidthSection(
        drawing,
        f"{words}, of small decoders of this kind. It goes as width^{growth['muP']:.2f} under muP, where it should stay the "
        f"same, and as width^{growth['usual']:.2f} without.",
    )


def _require_positive(value: Any) -> float:
    """Return a number above 0. Raises ValueError for anything else."""
    # To Python true is a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30 or math.isnan(value):
        raise ValueError(f"{value!r:.40} is no number above 0")
    return float(value)
