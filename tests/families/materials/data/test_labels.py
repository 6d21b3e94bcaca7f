"""Units: known values, their dimensions, and what is said of those that are not understood."""

from __future__ import annotations

import ase.units
import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.labels import (
    ENERGY,
    FORCE,
    LENGTH,
    STRESS,
    labels_of,
    length_factor,
    parse_unit,
    parse_unit_of,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eV", 1.0),
        ("Ha", ase.units.Hartree),
        ("Ry", ase.units.Rydberg),
        ("kcal/mol", ase.units.kcal / ase.units.mol),
        ("kJ/mol", ase.units.kJ / ase.units.mol),
        ("bohr", ase.units.Bohr),
        ("nm", ase.units.nm),
        ("Ha/bohr", ase.units.Hartree / ase.units.Bohr),
        ("kcal/mol/A", ase.units.kcal / ase.units.mol),
        ("GPa", ase.units.GPa),
        ("kbar", 0.1 * ase.units.GPa),
        ("Ha/bohr^3", ase.units.Hartree / ase.units.Bohr**3),
        ("D", ase.units.Debye),
        ("e*bohr", ase.units.Bohr),
        ("1", 1.0),
    ],
)
def test_values_are_those_of_ase(text: str, expected: float) -> None:
    # ase rests on the CODATA adjustment of 2014, which differs in the eighth digit.
    assert parse_unit(text).factor == pytest.approx(expected, rel=1e-7)


def test_equal_dimensions_are_told_from_others() -> None:
    assert parse_unit_of("Ha/bohr", FORCE, "forces").dimension == parse_unit_of("kcal/mol/A", FORCE, "forces").dimension
    assert parse_unit_of("GPa", STRESS, "stress").dimension == parse_unit_of("eV/A^3", STRESS, "stress").dimension
    with pytest.raises(ValueError, match=r'unit "Ha/bohr" is energy \* length\^-1, not one of energy \(energy\)'):
        parse_unit_of("Ha/bohr", ENERGY, "energy")
    with pytest.raises(ValueError, match=r'unit "eV" is energy, not one of length \(length\)'):
        parse_unit_of("eV", LENGTH, "length")


def test_an_unknown_unit_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match=r'unit "kca/mol": "kca" is not known; did you mean kcal\? known are'):
        parse_unit("kca/mol")
    with pytest.raises(ValueError, match='"A\\^x" is not known'):
        parse_unit("eV/A^x")


def test_labels_are_converted_to_our_units_and_shapes() -> None:
    source = GraphSource(
        name="a",
        path="a.npz",
        labels={"energy": "kcal/mol", "stress": {"unit": "kbar", "factor": -1.0}},  # type: ignore[dict-item]
        properties={"gap": {"key": "table", "column": 2, "unit": "Ha"}},  # type: ignore[dict-item]
    )
    energy, stress, gap = labels_of(source)
    assert energy.convert([-10.0], rows=3) == pytest.approx(-10.0 * 0.0433641)
    voigt = np.arange(1.0, 7.0)
    expected = -0.1 * ase.units.GPa * np.array([[1, 6, 5], [6, 2, 4], [5, 4, 3.0]])
    assert np.allclose(stress.convert(voigt, rows=3), expected, rtol=1e-7)
    assert np.allclose(stress.convert(expected, rows=3), stress.factor * expected)
    assert gap.convert([0.0, 0.0, 0.5], rows=3) == pytest.approx(0.5 * 27.211386)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 3)), r'forces "forces" has shape \[4, 3\], expected \[5, 3\]'),
        (np.zeros(15), r"has shape \[15\], expected \[5, 3\]"),
        (np.full((5, 3), np.inf), "holds an infinite number"),
        ("five", "holds 'five' where numbers are expected"),
    ],
)
def test_forces_of_a_wrong_shape_or_content_are_refused(value: object, message: str) -> None:
    source = GraphSource.model_validate({"name": "a", "path": "a.npz", "labels": {"forces": "eV/A"}})
    with pytest.raises(ValueError, match=message):
        labels_of(source)[0].convert(value, rows=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": {"energy": "eV/A"}}, r'data.sources.a.labels.energy: unit "eV/A" is energy \* length\^-1'),
        ({"properties": {"gap": "volt"}}, 'data.sources.a.properties.gap: unit "volt": "volt" is not known'),
        ({"length_unit": "eV"}, 'data.sources.a.length_unit: unit "eV" is energy'),
        ({"labels": {"energy": "eV"}, "properties": {"energy": "eV"}}, "the name energy is taken"),
    ],
)
def test_wrong_units_in_a_run_file_name_the_field(change: dict[str, object], message: str) -> None:
    source = GraphSource.model_validate({"name": "a", "path": "a.npz", **change})
    with pytest.raises(ConfigError, match=message):
        labels_of(source)
        length_factor(source)
