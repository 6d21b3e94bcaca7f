"""Sources with different variables: each has its own, nothing is learnt or scored of the others, all share statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field_files import dataset, field, field_data
from phalanx.config.load import load_run
from phalanx.families.weather.config import FieldData, FieldSource
from phalanx.families.weather.data.field_samples import FieldReader
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.data.prepare_fields import prepare_fields
from phalanx.training.start import train
from weather_runs import write_weather_run

HOURS = np.arange(240) * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores: z500 and t850, and t850 and u10 a third later; the second one also prepared."""
    root = tmp_path_factory.mktemp("partial")
    dataset(HOURS, ("z500", "t850")).to_netcdf(root / "first.nc")
    dataset(HOURS + 480, ("t850", "u10")).to_netcdf(root / "second.nc")
    prepare_fields(
        FieldSource(path=str(root / "second.nc")), root / "second", variables=["t850", "u10"], statics=["orography"]
    )
    return root


def sources(folder: Path, second: str = "second.nc") -> list[dict[str, Any]]:
    return [
        {"path": str(folder / "first.nc"), "variables": ["z500", "t850"], "weight": 1.0},
        {"path": str(folder / second), "variables": ["t850", "u10"], "weight": 2.0},
    ]


def field_set(folder: Path, second: str = "second.nc", **changes: Any) -> FieldSet:
    """Both stores as sources of a run of all three variables."""
    data = field_data(folder / "first.nc", **changes)
    return FieldSet(FieldData.model_validate({**data.model_dump(), "sources": sources(folder, second)}))


def reader(folder: Path, second: str = "second.nc", **changes: Any) -> FieldReader:
    return field_set(folder, second, **changes).reader("train", seed=1)


@pytest.mark.parametrize("missing", ["skip", "mask", "refuse"])
@pytest.mark.parametrize("second", ["second.nc", "second"])
def test_a_sample_has_its_sources_variables_and_no_others(folder: Path, second: str, missing: str) -> None:
    found = reader(folder, second, missing=missing)
    numbers = np.arange(120)
    cases, batch = found.locate(numbers), found.read(numbers)
    has = [("z500", "t850"), ("t850", "u10")]
    # By weight: one of three samples is the first source's.
    assert (cases.source == 0).sum() == pytest.approx(40, abs=2)
    for index, shift in ((0, 0), (1, 480)):
        mine = np.flatnonzero(cases.source == index)
        later = HOURS[cases.start[mine]] + shift + batch.lead_hours.numpy()[mine]
        for column, name in enumerate(("z500", "t850", "u10")):
            read, wanted = batch.fields[mine, column].numpy(), batch.targets[mine, column].numpy()
            if name not in has[index]:
                assert (read == 0.0).all() and np.isnan(wanted).all()
                continue
            scale = found.statistics.variables[name]
            expected = (field(name, HOURS[cases.start[mine]] + shift) - scale.mean) / scale.std
            np.testing.assert_allclose(read, expected, atol=2e-5)
            np.testing.assert_allclose(wanted, (field(name, later) - scale.mean) / scale.std, atol=2e-5)
    whole = batch.targets.numel() // 3
    assert int(batch.target_counts()) == 2 * whole


def test_statistics_are_over_the_sources_that_have_a_variable(folder: Path) -> None:
    found = field_set(folder).statistics.variables
    train = np.arange(160)
    values = {
        "z500": field("z500", HOURS[train]),
        "t850": np.concatenate((field("t850", HOURS[train]), field("t850", HOURS[train] + 480))),
        "u10": field("u10", HOURS[train] + 480),
    }
    for name, expected in values.items():
        assert found[name].mean == pytest.approx(expected.astype(np.float64).mean(), rel=1e-5), name
        assert found[name].std == pytest.approx(expected.astype(np.float64).std(), rel=1e-4), name


REFUSED = [
    ([["z500", "t850"], ["t850", "v10"]], "names v10, which is not among inputs and outputs"),
    ([["z500"], ["t850"]], "inputs and outputs names u10, which is not among the variables of any source"),
    ([["z500", "z500"], None], "names z500 more than once"),
]


@pytest.mark.parametrize(("variables", "words"), REFUSED)
def test_variables_that_do_not_fit_are_refused(folder: Path, variables: list[list[str]], words: str) -> None:
    data = field_data(folder / "first.nc").model_dump()
    given = [{**one, "variables": names} for one, names in zip(sources(folder), variables, strict=True)]
    with pytest.raises(ValueError, match=words):
        FieldData.model_validate({**data, "sources": given})
    with pytest.raises(ValueError, match="has none of the outputs"):
        FieldData.model_validate({**data, "outputs": ["u10"], "sources": sources(folder)})


def test_a_run_of_both_sources_learns_and_scores_each_variable(folder: Path, tmp_path: Path) -> None:
    run_file = write_weather_run(tmp_path, {"data.sources": sources(folder), "training.steps": 12})
    train(load_run(run_file, ["model.absent_inputs=masked", "layout.microbatch=4"]), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite([row["loss"] for row in rows]).all() and rows[-1]["loss"] < rows[0]["loss"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    scores = next(event["scores"] for event in events if event["kind"] == "evaluation")
    count = {
        name: max(row["forecasts"] for row in scores if row["variable"] == name) for name in ("z500", "t850", "u10")
    }
    assert all(np.isfinite(row["rmse"]) and row["rmse"] > 0.0 for row in scores)
    # Both sources have t850, and each of the others one.
    assert count["t850"] == count["z500"] + count["u10"]
    assert torch.isfinite(torch.tensor([row["persistence_rmse"] for row in scores])).all()
