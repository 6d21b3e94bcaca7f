"""Observed and simulated fields as they come: real calendars, regions, months, packing and holes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field_files import REAL
from phalanx.families.weather.config import FieldData
from phalanx.families.weather.data.field_samples import FieldBatchStream, FieldReader
from phalanx.families.weather.data.field_store import BlockCache
from phalanx.families.weather.data.open_fields import FieldSet, open_store
from phalanx.families.weather.data.prepare_fields import prepare_fields

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"the weather fields are not at {REAL}")

MONTHLY: dict[str, Any] = {"lead_hours": 730, "time_tolerance_hours": 36, "climatology_days": 31}
STORM: dict[str, Any] = {
    "sources": [
        {
            "path": str(REAL / "storm_jan1996_6h_64steps_north_america.nc"),
            "time_dim": "timestep",
            "time_units": "hours since 1996-01-05 00:00",
        }
    ],
    "inputs": ["t", "p", "u", "v", "u500", "v500"],
    "lead_hours": [6, 12, 24],
    "splits": {
        "train": {"first": "1996-01-05", "last": "1996-01-16"},
        "test": {"first": "1996-01-18", "last": "1996-01-20"},
    },
}


def fields(name: str, steps: int, variables: list[str], **changes: Any) -> FieldSet:
    source = {"path": str(REAL / name), **changes.pop("source", {})}
    splits = {"train": {"first": "step 0", "last": f"step {steps - 1}"}}
    values = {"sources": [source], "inputs": variables, "splits": splits, "lead_hours": 24, **changes}
    return FieldSet(FieldData.model_validate(values))


def check(reader: FieldReader, shape: tuple[int, int], windows: int) -> torch.Tensor:
    """Through the stream, over more than an epoch; gives the inputs of the first batch."""
    assert reader.grid.shape == shape
    assert len(reader.sources[0].windows.starts) == windows
    stream = FieldBatchStream(reader, global_batch=4)
    batches = [stream.next() for _ in range(windows // 4 + 2)]
    stream.close()
    for batch in batches:
        assert batch.fields.isfinite().all()
        assert batch.fields.abs().max() < 40
        assert int(batch.target_counts()) > 0
    return batches[0].fields


def test_a_simulated_year() -> None:
    renamed = {"names": ["z500=geopotential_500"]}
    found = fields(
        "speedy_5.625deg_12h.nc",
        480,
        ["z500", "2m_temperature"],
        static=["orography", "land_sea_mask"],
        lead_hours=72,
        source=renamed,
    )
    check(found.reader("train", seed=0), (32, 64), 474)
    assert found.statistics.variables["z500"].mean == pytest.approx(55281, abs=1)
    assert found.stores[0].times.text(0) == "2000-03-01 12:00"
    # Levels lie along the ground there: over the highest ground, z is largest.
    high = found.stores[0].read_static()[0].argmax()
    assert found.stores[0].read(np.array([0]), [0])[0, 0].argmax() == high


def test_the_storm_with_its_missing_frames(tmp_path: Path) -> None:
    found = FieldSet(FieldData.model_validate(STORM))
    reader = found.reader("train", seed=0)
    check(reader, (33, 36), 44)
    windows = reader.sources[0].windows
    assert not np.isin(windows.starts, [17, 36, 37]).any()
    assert not np.isin(windows.targets, [17, 36, 37]).any()
    assert [place.split(": ")[1] for place in windows.places] == [
        "t, time index 17 (1996-01-09 06:00)",
        "v, time index 17 (1996-01-09 06:00)",
        "v500, time index 36 (1996-01-14 00:00)",
        "v, time index 37 (1996-01-14 06:00)",
    ]
    batch = reader.read(np.arange(8))
    # The corners of the map never have values.
    assert batch.targets.isnan().sum((2, 3)).eq(224).all()
    assert batch.fields[batch.targets.isnan()].eq(0).all()
    assert found.statistics.variables["p"].mean == pytest.approx(101594, rel=0.01)
    source = found.data.sources[0]
    prepare_fields(source, tmp_path / "storm", variables=STORM["inputs"])
    prepared = FieldSet(FieldData.model_validate({**STORM, "sources": [str(tmp_path / "storm")]}))
    again = prepared.reader("train", seed=0).read(np.arange(8))
    assert again.fields.equal(batch.fields)
    assert torch.equal(again.targets.nan_to_num(7), batch.targets.nan_to_num(7))


def test_observed_monthly_winds() -> None:
    found = fields("navy_winds_monthly_1982_1992_2.5deg.nc", 132, ["UWND", "VWND"], **MONTHLY)
    check(found.reader("train", seed=0), (73, 144), 131)
    assert found.grid.longitudes[0] == pytest.approx(0, abs=1e-9)
    assert found.climatology().mean.shape == (366, 1, 2, 73, 144)


def test_a_monthly_climatology_of_ships_with_land() -> None:
    names = ["SST", "AIRT", "SPEH", "WSPD", "UWND", "VWND", "SLP"]
    found = fields("coads_climatology_12m_2deg.nc", 12, names, missing="mask", **MONTHLY)
    check(found.reader("train", seed=0), (90, 180), 11)
    assert found.reader("train", seed=0).read(np.arange(3)).targets.isnan().any(0).any(0).sum() > 3000


def test_months_of_a_climate_model() -> None:
    found = fields("mpi_esm_lr_monthly_12.nc", 12, ["tas", "uas", "vas"], static=["sftlf"], **MONTHLY)
    check(found.reader("train", seed=0), (96, 192), 11)
    assert found.grid.area_weights().mean() == pytest.approx(1)


def test_two_months_of_reanalysis_with_levels_and_no_year() -> None:
    source = {"time_dim": "month", "time_units": "months since 2000-12-01", "calendar": "360_day"}
    names = ["z500", "u850", "v200"]
    found = fields("era_interim_uvz_jan_jul_1.5deg.nc", 2, names, lead_hours=4320, source=source)
    check(found.reader("train", seed=0), (121, 240), 1)
    assert found.grid.latitudes[0] == -90
    # The Antarctic winter: geopotential falls from January to July at 60 south, rises at 60 north.
    z = found.stores[0].read(np.array([0, 1]), [0])[:, 0].mean(axis=2)
    assert z[1, 20] < z[0, 20]
    assert z[1, 100] > z[0, 100]


def test_relief_alone() -> None:
    source = {"path": str(REAL / "mpi_esm_lr_monthly_12.nc"), "static_path": str(REAL / "mpi_esm_lr_monthly_12.nc")}
    store = open_store(
        FieldData.model_validate({**STORM, "sources": [source]}).sources[0], ["tas"], ["sftlf"], BlockCache(0)
    )
    assert 20 < store.read_static().mean() < 40


def test_relief_on_another_grid_is_refused() -> None:
    with pytest.raises(
        Exception, match=r"etopo_1deg.nc: another grid than that of .*: 180 x 360 points instead of 96 x 192"
    ):
        fields(
            "mpi_esm_lr_monthly_12.nc",
            12,
            ["tas"],
            static=["ROSE"],
            source={"static_path": str(REAL / "etopo_1deg.nc")},
            **MONTHLY,
        )
