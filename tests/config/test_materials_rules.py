"""What a person reads where a materials model and its data do not fit together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.config.load import load_run, parse_run
from phalanx.errors import ConfigError
from phalanx.families.materials.config import MaterialsRun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN: dict[str, Any] = {
    "model": {
        "family": "materials",
        "n_layers": 2,
        "d_model": 8,
        "cutoff": 4.0,
        "energy": {"force_weight": 1.0},
        "properties": {"names": ["gap"]},
        "branches": [{"name": "one"}, {"name": "two"}],
    },
    "data": {
        "sources": [
            {"name": "one", "path": "one.npz", "labels": {"energy": "eV", "forces": "eV/A"}},
            {"name": "two", "path": "two.npz", "properties": {"gap": "eV"}},
        ],
        "prepared": "prepared",
        "cutoff": 4.0,
    },
    "layout": {"global_batch": 8, "precision": "fp32"},
    "optimizer": {"lr": 0.001},
    "training": {"steps": 1},
}


def changed(**changes: Any) -> str:
    """The run file with `section__field` replaced."""
    content = copy.deepcopy(RUN)
    for name, value in changes.items():
        section, field = name.split("__")
        content[section][field] = value
    return yaml.safe_dump(content)


def test_one_branch_a_source_or_one_for_all_is_sound() -> None:
    assert isinstance(parse_run(changed(), "run.yaml"), MaterialsRun)
    assert isinstance(parse_run(changed(model__branches=[{"name": "all"}]), "run.yaml"), MaterialsRun)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "cutoff": ({"data__cutoff": 5.0}, "data.cutoff=5 is not model.cutoff=4: the model fades messages to 0"),
    "order of branches": (
        {"model__branches": [{"name": "two"}, {"name": "one"}]},
        "model.branches are two, one, data.sources are one, two; several branches are one for each source",
    ),
    "label": (
        {"model__charges": {}},
        "model.charges learns charges, which no source in data.sources has",
    ),
    "property": (
        {"model__properties": {"names": ["gap", "moment"]}},
        "model.properties learns moment, which no source in data.sources has",
    ),
    "useless source": (
        {"model__properties": None},
        "source two has nothing that the model learns (energy, forces), so it would train nothing",
    ),
    "recompute": ({"layout__recompute": "selective"}, "layout.recompute=selective is for matmuls of blocks"),
    "compile": (
        {"training__compile": True, "layout__recompute": "full"},
        "training.compile=true makes one program of a whole step, which cannot be with layout.recompute=full",
    ),
    "waves": (
        {"training__compile": True, "model__electrostatics": {}},
        "training.compile=true makes one program of a whole step, which cannot be with model.electrostatics",
    ),
    "charges of points": (
        {"model__electrostatics": {"smearing": 0.2}, "data__max_neighbours": 20},
        "data.max_neighbours=20 leaves out edges, over which a part of the energy of charges is summed",
    ),
    "precision": ({"layout__precision": "fp16"}, "layout.precision=fp16 scales the loss against underflow"),
    "attention": ({"training__attention": "flash"}, "training.attention=flash chooses among kernels without second"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str) -> None:
    changes, expected = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        parse_run(changed(**changes), "run.yaml")
    line, nearest = str(caught.value).splitlines()
    assert line.startswith(expected)
    assert nearest.startswith("nearest: ")


@pytest.mark.parametrize("name", ["materials-xtb", "materials-three-sources"])
def test_the_examples_are_sound(name: str) -> None:
    run = load_run(EXAMPLES / f"{name}.yaml")
    assert isinstance(run, MaterialsRun)
    assert [branch.name for branch in run.model.branches] == [source.name for source in run.data.sources]
