"""The total charge of a structure: its label `total_charge`; where it has none, what its atoms' charges add up to.

Sums are rounded to whole numbers, since that is what total charges are. A structure with neither is taken for neutral.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.families.materials.data.structures.ragged import Int64Array
from phalanx.families.materials.data.structures.structures import Structure
from phalanx.families.materials.data_config import GraphSource

TOLERANCE = 0.1
"""Elementary charges by which a sum of atoms' charges may miss a total charge: rounding of many, or a coarse integration."""


def total_charges(
    given_G: npt.NDArray[np.floating] | None,
    charges_N: npt.NDArray[np.floating] | None,
    graph_N: Int64Array,
    graphs: int,
) -> npt.NDArray[np.float64]:
    """Total charge of each structure in elementary charges [G], NaN where neither label says.

    given_G: labels of structures, NaN where missing. charges_N: of atoms, likewise. graph_N: the structure of each atom.
    """
    known_G = np.full(graphs, np.nan) if given_G is None else given_G.astype(np.float64)
    if charges_N is None:
        return known_G
    # One charge that is missing makes the sum NaN, and with it what it would say of the structure.
    # (Of no atoms numpy counts whole numbers, whatever the weights.)
    sums_G = np.bincount(graph_N, weights=charges_N, minlength=graphs).astype(np.float64)
    return np.where(np.isnan(known_G), np.rint(sums_G), known_G)


def agreed_total(found: float, given: float | None) -> float | None:
    """The total charge that is given, else the whole number nearest to what atoms' charges add up to.

    None where that sum, `found` elementary charges, misses it, or is no number.
    """
    total = float(np.rint(found)) if given is None else given
    return total if abs(found - total) <= TOLERANCE else None


def check_charges(structure: Structure, source: GraphSource) -> None:
    """Refuse charges that add up to no whole number, or not to the total charge, unless the source allows it.

    Raises DataError.
    """
    charges = structure.labels.get("charges")
    if charges is None or source.charge_sum == "any" or np.isnan(charges).any():
        return
    found, label = float(charges.sum()), structure.labels.get("total_charge")
    given = None if label is None or np.isnan(label) else float(label)
    if agreed_total(found, given) is not None:
        return
    against = "which is no whole number" if given is None else f"but its total_charge is {given:g} e"
    then = (
        f"{np.rint(found):+.0f} e is then taken for its total charge" if given is None else "total_charge then counts"
    )
    raise structure.raw.wrong(
        f"its charges add up to {found:.3f} e, {against}; correct their unit ({source.labels['charges'].unit}) or the "
        f"label, or set charge_sum: any for source {source.name} ({then})"
    )
