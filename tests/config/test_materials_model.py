"""The `model` section of the materials family: what it refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from phalanx.families.materials.model_config import Branch, EnergyHead, MaterialsModel

SOUND: dict[str, Any] = {"n_layers": 2, "d_model": 8, "energy": {}}


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        MaterialsModel.model_validate({**SOUND, **changes})
    (error,) = caught.value.errors()
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def test_the_defaults_are_painn_with_one_branch() -> None:
    model = MaterialsModel.model_validate(SOUND)
    assert model.body == "painn" and [branch.name for branch in model.branches] == ["main"]
    assert model.energy == EnergyHead() and model.energy.force_weight is None


def test_a_model_survives_writing_and_reading() -> None:
    model = MaterialsModel.model_validate(
        {**SOUND, "branches": [{"name": "a", "reference_energies": {"1": -13.6}}], "attention": {"kind": "linear"}}
    )
    assert MaterialsModel.model_validate(model.model_dump()) == model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"energy": None}, "predicts nothing; give energy, charges"),
        ({"attention": {"heads": 3}}, "attention.heads=3 does not divide d_model=8"),
        ({"body": "gatv2", "gatv2": {"heads": 5}}, "gatv2.heads=5 does not divide d_model=8"),
        ({"dipole": {"from_charges": True}}, "dipole.from_charges needs the charge head"),
        ({"mace": {"degree": 2}}, "mace has no effect with body=painn"),
        ({"body": "mace", "mace": {"degree": 1, "hidden_degree": 2}}, "hidden_degree=2 must be at most mace.degree=1"),
        ({"branches": [{"name": "a"}, {"name": "a"}]}, "the name a is given twice"),
        ({"branches": [{"reference_energies": {"H": 1.0}}]}, "H is not an atomic number from 1 to 118"),
        ({"branches": [{"reference_energies": {"119": 1.0}}]}, "119 is not an atomic number"),
        ({"branches": [{"properties_scale": [1.0]}]}, "main.properties_scale has 1 values, but properties has 0 names"),
        ({"branches": []}, "at least 1 item"),
        ({"cutoff": 0.0}, "greater than 0"),
        ({"body": "gcn"}, "'gin', 'sage', 'mfc'"),
        ({"branches": [{"name": "a.b"}]}, "branches.0.name"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    found = refusal(**changes)
    assert words in found and "\n" not in found


def test_options_at_their_defaults_may_stand_beside_another_body() -> None:
    """A resolved run holds every field; reading it back must not fail."""
    model = MaterialsModel.model_validate({**SOUND, "mace": {"degree": 3}, "gatv2": {"heads": 4}})
    assert model.body == "painn"


def test_units_fit_the_properties() -> None:
    branch = Branch(properties_shift=[0.0, 1.0], properties_scale=[2.0, 3.0])
    model = MaterialsModel.model_validate({**SOUND, "properties": {"names": ["gap", "homo"]}, "branches": [branch]})
    assert model.branches[0].properties_scale == [2.0, 3.0]
