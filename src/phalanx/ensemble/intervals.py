"""How sure an ensemble is: standard deviations and intervals from the spread of its members.

They are kept with the ensemble and used with every prediction. `ensemble.calibrate` fits them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from phalanx.ensemble.residuals import FloatArray

Kind = Literal["factor", "floor", "isotonic"]
KINDS: tuple[Kind, ...] = ("factor", "floor", "isotonic")
"""Kinds of calibration, the simplest first."""


class Calibration(BaseModel):
    """Standard deviation as a function of how far members lie apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    factor: float
    """a of `factor` and `floor`; 1 for `isotonic`."""
    floor: float
    """b of `floor`; for the other kinds the least standard deviation. In the unit of the numbers."""
    spreads: tuple[float, ...] = ()
    """Spreads at the knots of `isotonic`, rising."""
    stds: tuple[float, ...] = ()
    """Standard deviations at the knots of `isotonic`, never falling."""

    def std(self, spread_n: FloatArray) -> FloatArray:
        """Return calibrated standard deviations for spreads of any shape. Beyond the last knot they grow with the spread."""
        if self.kind != "isotonic":
            return np.sqrt(np.square(self.factor * spread_n) + self.floor**2)
        inside = np.interp(spread_n, self.spreads, self.stds)
        # Beyond the last knot nothing was seen: its ratio of deviation to spread goes on.
        beyond = np.maximum(spread_n / max(self.spreads[-1], np.finfo(np.float64).tiny), 1.0)
        return np.maximum(inside * beyond, self.floor)


class Conformal(BaseModel):
    """Intervals that cover a number of a new structure as often as they promise, if structures are exchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    calibration: Calibration
    """Calibration fitted to other structures than the quantiles."""
    quantiles: dict[str, float | None]
    """Half widths in standard deviations, by level; None where there are too few structures for that level."""

    def half_widths(self, spread_n: FloatArray, level: float) -> FloatArray | None:
        """Return half the width of the interval of a level around each mean [n]; None where the interval has no end.

        spread_n: spreads of the members. level: one of `LEVELS` or `CURVE`.
        """
        quantile = self.quantiles[str(level)]
        return None if quantile is None else quantile * self.calibration.std(spread_n)
