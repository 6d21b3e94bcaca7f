"""Files need the packages that read them and no other: netCDF no zarr, zarr stores no netCDF4, prepared fields neither."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from field_files import dataset, field_data, write_climax
from phalanx.families.weather.data.prepare_fields import prepare_fields

READ = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # as if it were not installed
from phalanx.families.weather.config import FieldData
from phalanx.errors import PhalanxError
try:
    from phalanx.families.weather.data.open_fields import FieldSet
    fields = FieldSet(FieldData.model_validate_json(sys.argv[2]))
    print("frames", len(fields.stores[0].times))
except PhalanxError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields")
    fields = dataset(np.arange(240) * 6)
    fields.to_netcdf(folder / "fields.nc")
    fields.to_zarr(folder / "fields.zarr", zarr_format=2, consolidated=True)
    source = field_data(folder / "fields.nc").sources[0]
    prepare_fields(source, folder / "prepared", variables=["z500", "t850", "u10"], statics=["orography"])
    write_climax(folder / "climax", (2000, 2001), step_hours=6, frames=1460)
    return folder


@pytest.mark.parametrize(
    ("name", "hidden", "lacks"),
    [
        ("fields.nc", ["zarr"], None),
        ("fields.nc", ["netCDF4"], "netCDF4"),
        ("fields.nc", ["xarray"], "xarray"),
        ("fields.zarr", ["netCDF4"], None),
        ("fields.zarr", ["zarr"], "zarr"),
        ("prepared", ["zarr", "netCDF4", "xarray"], None),
        ("climax", ["zarr", "netCDF4", "xarray"], None),
        ("prepared", ["cftime"], "cftime"),
    ],
)
def test_a_file_needs_what_reads_it(files: Path, name: str, hidden: list[str], lacks: str | None) -> None:
    data = field_data(files / name, **({"static": []} if name == "climax" else {}))
    words = [json.dumps(hidden), data.model_dump_json()]
    done = subprocess.run([sys.executable, "-c", READ, *words], capture_output=True, text=True, check=True, timeout=300)
    if lacks is None:
        assert done.stdout.startswith("frames ")
        return
    subject = "weather data" if lacks == "cftime" else str(files / name)
    assert done.stdout == f'{subject} needs the package {lacks}; pip install "phalanx-train[weather]"\n'
